"""Prompt templates: what is asked, as versioned YAML, found by name.

Templates ship in `configs/prompts/`; a folder of the user's own is looked in first.
"""

import string
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.validation import Strict, explain, read_yaml

SHIPPED_TEMPLATES = Path(__file__).resolve().parents[2] / "configs" / "prompts"


def _only_fields(pattern: str, allowed: set[str]) -> str:
    try:
        found = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
    except ValueError as error:
        raise ValueError(f"{pattern!r} is not a format string: {error}") from None
    if found - allowed:
        raise ValueError(f"{pattern!r} has {sorted(found - allowed)}; fields are {sorted(allowed)}")
    return pattern


class Columns(Strict):
    """Which attribute columns are shown, and under what names.

    A column that is null in a row is skipped. "*" is every column of the table.
    """

    columns: Literal["*"] | tuple[str, ...] = "*"
    exclude: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)  # column -> name in the prompt
    optional: tuple[str, ...] = ()  # named above, but a table may be without them
    max_value_chars: int = Field(300, ge=1)

    def shown(self, attributes: dict[str, object]) -> list[str]:
        """Names of the columns to show, in the order to show them."""
        names = list(attributes) if self.columns == "*" else [name for name in self.columns if name in attributes]
        return [name for name in names if name not in self.exclude]

    def missing(self, known: Collection[str]) -> list[str]:
        """Columns that are named here, not optional, and not among those of a table."""
        named = [*([] if self.columns == "*" else self.columns), *self.exclude, *self.labels]
        return [name for name in dict.fromkeys(named) if name not in known and name not in self.optional]


class AttributeLines(Columns):
    """The block of the entity's own attributes, one line each."""

    heading: str = ""
    line: str = "- {label}: {value}"

    @field_validator("line")
    @classmethod
    def _line(cls, line: str) -> str:
        return _only_fields(line, {"label", "value"})


class HistoryLines(Columns):
    """The block of what a user rated, one line each, oldest first; `{number}` counts the lines shown from 1."""

    heading: str = ""
    line: str = "- {title} | {attributes} | {rating}"
    line_unrated: str = "- {title} | {attributes}"
    separator: str = " | "  # between attribute values; with no attributes the one before them goes too
    none: str = "- nothing yet"  # stands for an empty history
    max_events: int = Field(40, ge=0)  # newest kept

    @field_validator("line", "line_unrated")
    @classmethod
    def _line(cls, line: str) -> str:
        return _only_fields(line, {"number", "title", "attributes", "rating"})


class PromptTemplate(Strict):
    """One question that is asked of every entity of a side.

    The prompt is the instruction, which is the same for all entities, then attributes, history and request.
    """

    name: str = Field(pattern=r"^[a-z0-9_\-]+$")
    version: int = Field(ge=1)
    framework: str
    side: Side
    parser: Literal["aspects", "free"]
    factors: tuple[str, ...] = ()
    system: str | None = None
    instruction: str
    attributes: AttributeLines = AttributeLines()
    history: HistoryLines | None = None
    request: str | None = None
    chat_options: dict[str, Any] = Field(default_factory=lambda: {"enable_thinking": False})

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "PromptTemplate":
        if self.side == "item" and self.history is not None:
            raise ValueError("an item template has no history")
        if not self.instruction.strip() and not (self.request or "").strip():
            raise ValueError("nothing is asked: `instruction` is empty, and so is `request`")
        if self.parser == "aspects" and not self.factors:
            raise ValueError("parser `aspects` needs `factors`, the names of the aspects; or take parser `free`")
        return self

    @property
    def identity(self) -> str:
        """`name@version`, as records carry it."""
        return f"{self.name}@{self.version}"


class KnowledgeSettings(Strict):
    """What is asked about users and items."""

    user_template: str = Field("kar_user", description="Prompt template for users.")
    item_template: str = Field("kar_item", description="Prompt template for items.")
    template_dir: Path | None = Field(
        None, description="A folder of your own templates; looked in before those that ship."
    )
    max_prompt_tokens: int = Field(
        1024,
        ge=16,
        description="Longer histories are cut from their oldest side; what still does not fit is quarantined.",
    )

    def template_of(self, side: Side) -> str:
        """Name of a side's template."""
        return self.user_template if side == "user" else self.item_template


@lru_cache(maxsize=64)
def load_template(name: str, folder: str | Path | None = None) -> PromptTemplate:
    """Load a template by name: `<folder>/<name>.yaml` where there is one, else the one that ships."""
    folders = [SHIPPED_TEMPLATES] if folder is None else [Path(folder), SHIPPED_TEMPLATES]
    paths = (place / f"{name}.yaml" for place in folders)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        known = ", ".join(sorted({path.stem for place in folders for path in place.glob("*.yaml")}))
        raise ConfigError(f"there is no prompt template {name!r}; templates are: {known}. Name one of these.")
    try:
        template = PromptTemplate.model_validate(read_yaml(path, "prompt template", "name another"))
    except ValidationError as error:
        raise ConfigError(f"prompt template {path}: {explain(error, PromptTemplate)}") from None
    if template.name != name:
        raise ConfigError(f"prompt template {path} calls itself {template.name!r}; its name must be that of its file")
    return template
