"""Pools on a terminal: versions, groups, and the draft tree of a query."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from laserbatch.jobs.formatting import counted
from laserbatch.jobs.report.drafts import how_built
from laserbatch.pipeline.storage.manifest import PoolBuilt
from laserbatch.retrieval_pools.draft import Draft
from laserbatch.retrieval_pools.index.manifest import PoolManifest
from laserbatch.retrieval_pools.index.store import PoolVersion
from laserbatch.retrieval_pools.sources import SOURCE_NAMES

VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


class Tokenizer(Protocol):
    """What is used of a tokenizer."""

    def decode(self, token_ids: list[int], **options: object) -> str: ...
    def convert_ids_to_tokens(self, token_id: int) -> str: ...


@dataclass(frozen=True)
class DraftNode:
    """A drafted token.

    Attributes
    ----------
    piece : what it adds to the text.
    parent : index of the node before it, -1 for the text's last token.
    acceptance : estimated probability that the whole path to it is accepted.
    """

    token_id: int
    piece: str
    parent: int
    depth: int
    acceptance: float
    source: str


@dataclass(frozen=True)
class DraftView:
    """What a query drafted, with words for ids."""

    version: str
    manifest: PoolManifest
    group: str | None
    text: str
    num_context_tokens: int
    nodes: list[DraftNode]

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        version: str,
        manifest: PoolManifest,
        group: str | None,
        text: str,
        context: np.ndarray,
        draft: Draft,
    ) -> "DraftView":
        """Put a draft into words; a piece is what its token adds to the text before it."""
        paths: list[list[int]] = []
        nodes: list[DraftNode] = []
        rows = zip(*(array.tolist() for array in (draft.token_ids, draft.parents, draft.source)), strict=True)
        for (token_id, parent, source), acceptance in zip(rows, np.exp(draft.log_acceptance).tolist(), strict=True):
            before = paths[parent] if parent >= 0 else context.tolist()
            paths.append([*before, token_id])
            depth = nodes[parent].depth + 1 if parent >= 0 else 1
            piece = _piece(tokenizer, before, token_id)
            nodes.append(DraftNode(token_id, piece, parent, depth, acceptance, SOURCE_NAMES[source]))
        return cls(version, manifest, group, text, len(context), nodes)

    @property
    def expected_num_accepted(self) -> float:
        """Expected number of accepted tokens: the sum over nodes, each accepted when its whole path is."""
        return sum(node.acceptance for node in self.nodes)

    def data(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "version": self.version,
            "side": self.manifest.side,
            "group": self.group,
            "text": self.text,
            "num_context_tokens": self.num_context_tokens,
            "num_calibration_texts": num_calibration_texts(self.manifest),
            "expected_num_accepted": self.expected_num_accepted,
            "nodes": [vars(node) for node in self.nodes],
        }


def draft_tree(view: DraftView) -> RenderableType:
    """The draft as a tree; tokens without an alternative stand on one line, each with its estimated acceptance."""
    manifest = view.manifest
    whose = f"{manifest.num_texts:,} {manifest.side} texts of pools {view.version}"
    group = f", group {view.group}" if view.group is not None else ""
    title = Text(f"{whose}{group}, {calibrated_on(num_calibration_texts(manifest))}", style="dim")
    tree = Tree(Text("…" + visible(view.text[-60:]) if view.text else "the beginning of a text", style="bold"))
    children: dict[int, list[int]] = {}
    for k, node in enumerate(view.nodes):
        children.setdefault(node.parent, []).append(k)
    _add_branches(tree, view.nodes, children, -1)
    expected = f"{len(view.nodes)} tokens drafted, {view.expected_num_accepted:.2f} expected to be accepted"
    none = "the pool knows nothing to follow this" if not view.nodes else expected
    return Group(title, tree, Text(none, style="dim"))


def _add_branches(tree: Tree, nodes: list[DraftNode], children: dict[int, list[int]], parent: int) -> None:
    for k in children.get(parent, []):
        line = Text()
        last = k
        while True:
            line.append(visible(nodes[last].piece), style="bold" if nodes[last].acceptance >= 0.1 else "")
            line.append(f" {nodes[last].acceptance:.0%}  ", style="cyan" if nodes[last].acceptance >= 0.1 else "dim")
            if len(children.get(last, [])) != 1:
                break
            last = children[last][0]
        _add_branches(tree.add(line), nodes, children, last)


def _piece(tokenizer: Tokenizer, before: list[int], token_id: int) -> str:
    start = tokenizer.decode(before) if before else ""
    whole = tokenizer.decode([*before, token_id])
    if whole.startswith(start) and len(whole) > len(start) and "\ufffd" not in whole[len(start) :]:
        return whole[len(start) :]
    return f"<{tokenizer.convert_ids_to_tokens(token_id)}>"  # a part of a character


def visible(text: str) -> str:
    """Text with its spaces and line ends as marks, and no control characters."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text.translate(VISIBLE))


def versions_table(versions: list[PoolVersion]) -> Table:
    """A row for each side of each version."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "version", "side", "texts", "tokens", "groups", "size", "min support", "scope", "model"):
        is_number = name in ("texts", "tokens", "groups", "size", "min support")
        table.add_column(name, justify="right" if is_number else "left")
    for version in versions:
        mark = "*" if version.is_current else ""
        if version.problem is not None:
            table.add_row(mark, version.version, Text("damaged", style="red"))
            continue
        for side, manifest in version.pools.items():
            counts = (manifest.num_texts, manifest.num_tokens, len(manifest.groups))
            size = f"{manifest.size_bytes / 1e6:,.1f} MB"
            built_with = (str(manifest.settings.min_support), manifest.settings.scope, manifest.model_id)
            row = (mark, version.version, side, *(f"{n:,}" for n in counts), size, *built_with)
            table.add_row(*(Text(value) for value in row))
            mark = ""
    return table


def groups_table(side: str, manifest: PoolManifest, num_groups: int, rules: Mapping[str, str]) -> Table:
    """The largest groups of a pool; what they hold is shown for those whose names do not say it."""
    ordered = sorted(manifest.groups.items(), key=lambda item: (-item[1]["num_tokens"], item[0]))
    left_out = f", the {num_groups} largest of {len(ordered)}" if len(ordered) > num_groups else ""
    table = Table(
        title=f"{side}: groups{left_out}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for name in ("group", "texts", "tokens", "share"):
        table.add_column(name, justify="left" if name == "group" else "right")
    if rules:
        table.add_column("holds")
    for name, counts in ordered[:num_groups]:
        share = counts["num_tokens"] / max(1, manifest.num_tokens)
        cells = [f"{counts['num_texts']:,}", f"{counts['num_tokens']:,}", f"{share:.1%}"]
        table.add_row(Text(name or "(none)"), *cells, *([Text(rules.get(name, ""))] if rules else []))
    return table


def built_line(side: str, built: PoolBuilt) -> Text:
    """How the run that a pool is of built it, in a sentence."""
    room = f"{counted(built.num_texts_left_out, 'text')} left out" if built.num_texts_left_out else "no text left out"
    return Text(f"{side}: built {how_built(built)}; {room} by pool_building.max_tokens", style="dim")


def num_calibration_texts(manifest: PoolManifest) -> int:
    """Texts that a pool's estimates are calibrated on; 0: they are not."""
    return 0 if manifest.calibration is None else manifest.calibration.num_texts


def calibrated_on(num_texts: int) -> str:
    """What estimated acceptance rests on, in a few words."""
    return f"calibrated on {counted(num_texts, 'text')}" if num_texts else "not calibrated"


def calibration_line(side: str, manifest: PoolManifest) -> Text:
    """How far estimated acceptance can be believed, in a sentence."""
    calibration = manifest.calibration
    if calibration is None:
        return Text(f"{side}: not calibrated: relative counts are taken for acceptance", style="dim")
    error, before = (one.expected_calibration_error for one in (calibration.reliability, calibration.uncalibrated))
    by_chance = calibration.reliability.error_by_chance
    of_few = "" if by_chance is None else f" ({by_chance:.3f} of right estimates, by chance)"
    return Text(
        f"{side}: calibrated on {calibration.num_texts:,} replayed texts ({calibration.num_tokens:,} tokens); expected "
        f"calibration error {error:.3f} on texts not fitted to{of_few}, {before:.3f} without calibration",
        style="dim",
    )


def version_data(version: PoolVersion) -> dict[str, Any]:
    """For `--json`."""
    return {
        "version": version.version,
        "folder": str(version.folder),
        "is_current": version.is_current,
        "problem": version.problem,
        "pools": {side: manifest.model_dump(mode="json") for side, manifest in version.pools.items()},
    }
