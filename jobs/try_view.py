"""`laserbatch try` on a terminal: one entity's prompt, its pool, its text with accepted spans coloured, its record.

Everything that comes from tables or from a model is drawn as text: rich
markup in it is not read, and control characters are shown, not sent to the terminal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from laserbatch.jobs.formatting import ROUTE_LABELS, SOURCE_LABELS, counted, decimal, percent, rate, ratio
from laserbatch.jobs.pools_view import calibrated_on
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.manifest import SampleSpan

# Underlines differ too, so that the spans can be told apart without colours. The model's own tokens stay unmarked.
SOURCE_STYLES = {
    "pool": "#101820 on #f2c4dd",
    "previous": "#101820 on #a9d3f2 underline",
    "prompt": "#101820 on #f7d48a underline2",
    "output": "#101820 on #9edcc5 italic",
    "target": "",
}
FINISH_LABELS = {"end_of_text": "ended by itself", "stop": "ended at a stop string", "length": "cut at the token limit"}


@dataclass(frozen=True)
class TriedEntity:
    """One entity, tried.

    Attributes
    ----------
    template : `name@version` of the prompt template.
    prompt : as the model got it, control tokens included.
    pool_version, group, scheme : the pool, the group that the router chose, and by which scheme; None without a pool.
    num_calibration_texts : texts that the pool's estimates are calibrated on; 0: they are not.
    num_accepted : accepted draft tokens.
    finish_reason : "end_of_text", "stop" or "length".
    fields : the parsed record; None when the text could not be parsed, and `problem` says why.
    """

    side: Side
    entity_id: object
    template: str
    prompt: str
    num_prompt_tokens: int
    num_history: int
    num_history_dropped: int
    pool_version: str | None
    group: str | None
    scheme: str | None
    num_calibration_texts: int
    spans: Sequence[SampleSpan]
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    wall_s: float
    finish_reason: str
    fields: Mapping[str, str] | None
    problem: str | None = None


def print_tried(console: Console, tried: TriedEntity) -> None:
    """Draw a tried entity from top to bottom."""
    console.print(
        prompt_panel(tried),
        pool_line(tried),
        text_panel(tried.spans),
        counts_line(tried),
        record_panel(tried),
        verdict_line(tried),
    )


def prompt_panel(tried: TriedEntity) -> Panel:
    """The prompt, with what was cut from the history."""
    cut = f", {counted(tried.num_history_dropped, 'older event')} cut" if tried.num_history_dropped else ""
    history = f", {counted(tried.num_history, 'event')} of history{cut}" if tried.num_history or cut else ""
    about = f"{tried.template}: {counted(tried.num_prompt_tokens, 'token')}{history}"
    return _panel(Text(visible(tried.prompt)), f"Prompt of {tried.side} {tried.entity_id}", about)


def pool_line(tried: TriedEntity) -> Text:
    """Which pool and group the drafts come from, and what their estimates rest on."""
    if tried.pool_version is None:
        return Text("No pool yet: drafts come from the prompt, the output and the entity's own earlier text.\n")
    scheme = ROUTE_LABELS.get(tried.scheme or "none", str(tried.scheme))
    return Text.assemble(
        "Pool ",
        (visible(tried.pool_version), "bold"),
        ", group ",
        (visible(tried.group or "none"), "bold"),
        f" ({scheme}), {calibrated_on(tried.num_calibration_texts)}\n",
    )


def text_panel(spans: Sequence[SampleSpan]) -> Panel:
    """The text with its spans coloured by source, over their legend; draw it again and again in a `rich.live.Live`."""
    text = Text()
    for span in spans:
        text.append(visible(span.text), SOURCE_STYLES.get(span.source, "reverse"))
    content: RenderableType = text if spans else Text("(nothing written yet)", "dim")
    return _panel(Group(content, Text(), legend()), "Text")


def legend() -> Text:
    """The colours of sources, in one line."""
    entries = [Text(f" {SOURCE_LABELS[name]} ", style) for name, style in SOURCE_STYLES.items()]
    return Text("  ").join(entries)


def counts_line(tried: TriedEntity) -> Text:
    """Tokens, steps, tokens per step, acceptance, speed, ending."""
    per_step = ratio(tried.num_accepted, tried.num_steps)
    accepted = percent(ratio(tried.num_accepted, tried.num_drafted))
    return Text.assemble(
        f"{counted(tried.num_tokens, 'token')} in {counted(tried.num_steps, 'step')}: ",
        (f"{decimal(None if per_step is None else per_step + 1)} tokens per step", "bold"),
        f" (accepted draft tokens + 1); {accepted} of {counted(tried.num_drafted, 'draft token')} accepted; ",
        f"{rate(ratio(tried.num_tokens, tried.wall_s))} tokens/s; "
        f"{FINISH_LABELS.get(tried.finish_reason, tried.finish_reason)}.\n",
    )


def record_panel(tried: TriedEntity) -> Panel:
    """The parsed record, or why there is none."""
    if tried.fields is None:
        problem = visible(tried.problem or "the text could not be parsed")
        return _panel(Text(f"No record: {problem}", "bold red"), "Record")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=False)
    table.add_column()
    for name, value in tried.fields.items():
        table.add_row(Text(visible(name)), Text(visible(value)))
    return _panel(table if tried.fields else Text("(no fields)", "dim"), "Record")


def verdict_line(tried: TriedEntity) -> Text:
    """Whether a night would keep the text, and what to do where something is wrong with it."""
    is_cut = tried.finish_reason == "length"
    if tried.fields is None:
        where = ", and it was cut at the token limit" if is_cut else ""
        return Text(
            f"A night would put {tried.side} {visible(str(tried.entity_id))} in quarantine: nothing could be parsed of "
            f"this text{where}. Try another decoding.model or knowledge.{tried.side}_template.",
            "bold red",
        )
    if is_cut:
        return Text("It was parsed, but cut at the token limit: raise decoding.max_new_tokens.", "bold yellow")
    return Text("It was parsed and ended by itself: a night would keep it.", "bold green")


def visible(text: str) -> str:
    """The text with control characters replaced by their pictures; line ends and tabs stay."""
    return "".join(_picture(character) for character in text.replace("\r\n", "\n"))


def _picture(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or code >= 0xA0 or 0x20 <= code < 0x7F:
        return character
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def _panel(content: RenderableType, title: str, subtitle: str = "") -> Panel:
    titles = {"title": Text(visible(title)), "subtitle": Text(visible(subtitle)) if subtitle else None}
    return Panel(content, **titles, title_align="left", subtitle_align="left")
