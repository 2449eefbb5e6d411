"""The section that compares texts of the night with plain texts: figures, and the worst pairs with marked changes."""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from laserbatch.jobs.formatting import count, counted, decimal, percent
from laserbatch.jobs.report.blocks import Block, Note, Section, SideBySide, Table
from laserbatch.jobs.report.sides import SIDE_LABELS
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import AuditedText, AuditFigures

PARTS = re.compile(r"\s+|[^\s\w]+|\w+")
CAPTION = (
    "Means over the compared texts of tonight; means over their plain versions in parentheses. Length: tokens of "
    "tonight's texts divided by tokens of plain texts. Repeated: share of n-grams that occur earlier in the same text. "
    "Fields: share of the template's fields that a text has. Names: quoted titles and capitalised words per text that "
    "occur neither in its prompt nor in the items table; the model invents some, drafts cause only the difference."
)


def audit_section(audit: AuditFigures | None) -> Section:
    blocks: list[Block] = []
    if audit is None or not audit.sides:
        blocks.append(Note((audit and audit.skipped) or "No text was compared with a plain one."))
    else:
        rows = [{"Side": SIDE_LABELS[side]} | audit_row(asdict(figures), 1) for side, figures in audit.sides.items()]
        blocks.append(Table("Tonight's texts compared with plain texts of the same prompts", rows, ("Side",), CAPTION))
        blocks += [Note(f"{SIDE_LABELS[side]}: {reason}") for side, reason in audit.skipped_sides.items()]
        cases = [_case(side, case) for side, figures in audit.sides.items() for case in figures.cases]
        blocks += cases
        if not cases:
            blocks.append(Note("Every compared text is identical to its plain version."))
    return Section("audit", "Comparison with plain texts", blocks)


def audit_row(figures: Mapping[str, Any], digits: int) -> dict[str, str]:
    """Table cells of a `SideAudit` given as plain values; percentages have `digits` digits."""

    def both(mean: Mapping[str, float], show: Callable[[float], str]) -> str:
        return f"{show(mean['own'])} ({show(mean['plain'])})"

    share = partial(percent, digits=digits)
    row = {
        "Pairs": count(figures["num_pairs"]),
        "Identical": count(figures["num_identical"]),
        "Length": decimal(figures["length_ratio"], 3),
        "Cosine": decimal(figures["cosine"], 3),
        "Repeated": both(figures["repetition"], share),
        "Fields": both(figures["fields"], share),
    }
    return row | {"Names": both(figures["names"], decimal)}


def _case(side: Side, case: AuditedText) -> SideBySide:
    facts = [f"cosine {decimal(case.cosine)}", f"{decimal(case.length_ratio)} times as long"]
    if case.added_repetition > 0:
        facts.append(f"{percent(case.added_repetition)} more repetition")
    if case.lost_fields > 0:
        facts.append(f"{percent(case.lost_fields)} of its fields lost")
    if case.names:
        facts.append(f"{counted(len(case.names), 'added name')}: {', '.join(case.names)}")
    tonight, plain = _marked(case.text, case.plain_text)
    return SideBySide(f"{side.capitalize()} {case.entity_id}", " · ".join(facts), {"Tonight": tonight, "Plain": plain})


def _marked(tonight: str, plain: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Split both texts into parts; a part that differs from the other text is marked."""
    words = PARTS.findall(tonight), PARTS.findall(plain)
    steps = difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes()
    return (
        [("".join(words[0][first:last]), kind != "equal") for kind, first, last, _, _ in steps if last > first],
        [("".join(words[1][first:last]), kind != "equal") for kind, _, _, first, last in steps if last > first],
    )
