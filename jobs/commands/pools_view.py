"""Pools on a terminal: versions, groups, and the draft tree of a query."""

from typing import Any, Protocol

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from laserbatch.jobs.formatting import counted
from laserbatch.retrieval_pools.draft import Draft
from laserbatch.retrieval_pools.index.manifest import PoolManifest
from laserbatch.retrieval_pools.index.store import PoolVersion
from laserbatch.retrieval_pools.sources import SOURCE_NAMES

VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


class Tokenizer(Protocol):
    """What is used of a tokenizer."""

    def decode(self, token_ids: list[int], **options: object) -> str: ...
    def convert_ids_to_tokens(self, token_id: int) -> str: ...


def draft_nodes(tokenizer: Tokenizer, context: np.ndarray, draft: Draft) -> list[dict[str, Any]]:
    """What was drafted behind int32[n] tokens, with words for ids.

    `piece` is what a token adds to the text, `parent` the node before it, -1 for the context's last token, `acceptance`
    the estimated probability that the whole path to it is accepted.
    """
    paths: list[list[int]] = []
    nodes = []
    rows = zip(*(array.tolist() for array in (draft.token_ids, draft.parents, draft.source)), strict=True)
    for (token_id, parent, source), acceptance in zip(rows, np.exp(draft.log_acceptance).tolist(), strict=True):
        before = paths[parent] if parent >= 0 else context.tolist()
        paths.append([*before, token_id])
        piece, depth = _piece(tokenizer, before, token_id), len(paths[-1]) - len(context)
        nodes.append(
            {"token_id": token_id, "piece": piece, "parent": parent, "depth": depth, "acceptance": acceptance,
             "source": SOURCE_NAMES[source]}
        )  # fmt: skip
    return nodes


def _piece(tokenizer: Tokenizer, before: list[int], token_id: int) -> str:
    start = tokenizer.decode(before) if before else ""
    whole = tokenizer.decode([*before, token_id])
    if whole.startswith(start) and len(whole) > len(start) and "\ufffd" not in whole[len(start) :]:
        return whole[len(start) :]
    return f"<{tokenizer.convert_ids_to_tokens(token_id)}>"  # a part of a character


def draft_tree(nodes: list[dict[str, Any]], text: str, title: str) -> RenderableType:
    """The draft as a tree; tokens without an alternative stand on one line, each with its estimated acceptance."""
    tree = Tree(Text("…" + visible(text[-60:]) if text else "the beginning of a text", style="bold"))
    children: dict[int, list[int]] = {}
    for k, node in enumerate(nodes):
        children.setdefault(node["parent"], []).append(k)
    _add_branches(tree, nodes, children, -1)
    num_accepted = sum(node["acceptance"] for node in nodes)
    expected = f"{len(nodes)} tokens drafted, {num_accepted:.2f} expected to be accepted"
    none = "the pool knows nothing to follow this" if not nodes else expected
    return Group(Text(title, style="dim"), tree, Text(none, style="dim"))


def _add_branches(tree: Tree, nodes: list[dict[str, Any]], children: dict[int, list[int]], parent: int) -> None:
    for k in children.get(parent, []):
        line = Text()
        last = k
        while True:
            is_likely = nodes[last]["acceptance"] >= 0.1
            line.append(visible(nodes[last]["piece"]), style="bold" if is_likely else "")
            line.append(f" {nodes[last]['acceptance']:.0%}  ", style="cyan" if is_likely else "dim")
            if len(children.get(last, [])) != 1:
                break
            last = children[last][0]
        _add_branches(tree.add(line), nodes, children, last)


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


def groups_table(side: str, manifest: PoolManifest, num_groups: int) -> Table:
    """The largest groups of a pool."""
    ordered = sorted(manifest.groups.items(), key=lambda item: (-item[1]["num_tokens"], item[0]))
    left_out = f", the {num_groups} largest of {len(ordered)}" if len(ordered) > num_groups else ""
    table = Table(
        title=f"{side}: groups{left_out}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for name in ("group", "texts", "tokens", "share"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for name, counts in ordered[:num_groups]:
        share = counts["num_tokens"] / max(1, manifest.num_tokens)
        cells = [f"{counts['num_texts']:,}", f"{counts['num_tokens']:,}", f"{share:.1%}"]
        table.add_row(Text(name or "(none)"), *cells)
    return table


def calibrated_on(manifest: PoolManifest) -> str:
    """What estimated acceptance rests on, in a few words."""
    known = manifest.calibration
    return f"calibrated on {counted(known.num_texts, 'text')}" if known is not None else "not calibrated"


def calibration_line(side: str, manifest: PoolManifest) -> Text:
    """How far estimated acceptance can be believed, in a sentence."""
    said = f"{side}: {calibrated_on(manifest)}"
    if manifest.calibration is not None:
        error = manifest.calibration.reliability.expected_calibration_error
        said += f"; calibration error {error:.3f} on texts not fitted to"
    return Text(said, style="dim")


def version_data(version: PoolVersion) -> dict[str, Any]:
    """For `--json`."""
    return {
        "version": version.version,
        "folder": str(version.folder),
        "is_current": version.is_current,
        "problem": version.problem,
        "pools": {side: manifest.model_dump(mode="json") for side, manifest in version.pools.items()},
    }
