"""Prompt templates: versioned YAML files, found by name, with the questions to the model.

`configs/prompts/` has the templates that ship with laserbatch; a folder of the user's own is searched first.
"""

import hashlib
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, ValidationError, model_validator

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.validation import Strict, explain, line_of, matching, read_yaml, slips

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED_TEMPLATES = CONFIGS / "prompts"


CONTROL = re.compile(r"<\|[^|\n]*\|>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos|pad)>")
# The names in braces that texts of a template may have: words of `Words`, also capitalised or with `a` or `an`, and the
# factors, numbered or as an enumeration.
WORDS = frozenset({"user", "item", "items", "interacted", "collection", "enjoy", "User", "Item", "Items", "Interacted",
                   "a_user", "A_user", "a_collection", "factors", "factors_in_words"})  # fmt: skip
_AN = re.compile(r"(?!eu|one|use|usu|uni|uti)[aeiou]", re.IGNORECASE)


def _only_fields(pattern: str, allowed: Collection[str], shows: Collection[str] = ()) -> str:
    control = CONTROL.search(pattern)
    if control:
        raise ValueError(f"has {control.group()}, a control token of chat models: remove it, chat templates write it")
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
    except ValueError as error:
        raise ValueError(f"is not a format string: {error}; write {{{{ and }}}} for literal braces") from None
    if fields - set(allowed):
        names = ", ".join(f"{{{name}}}" for name in sorted(fields - set(allowed)))
        allowed_names = ", ".join(f"{{{name}}}" for name in sorted(allowed))
        raise ValueError(f"has {names}; expected fields are {allowed_names}; write {{{{ and }}}} for literal braces")
    try:
        pattern.format(**(dict.fromkeys(allowed, "x") | {"number": 1}))
    except (ValueError, LookupError) as error:
        raise ValueError(f"is not a format string: {error}; leave out what follows the field's name") from None
    if shows and fields.isdisjoint(shows):
        raise ValueError(f"has no {' or '.join(f'{{{name}}}' for name in shows)}, so prompts would not show the values")
    return pattern


def _pattern(*fields: str, shows: Collection[str] = ()) -> AfterValidator:
    return AfterValidator(partial(_only_fields, allowed=fields, shows=shows))


def _distinct(names: Any) -> Any:
    """Names of parts of an answer, which must differ apart from case, since parsers ignore it."""
    read = [name.strip().lower() for name in names]
    if twice := [name for name in names if read.count(name.strip().lower()) > 1]:
        raise ValueError(f"has names that are equal apart from case: {', '.join(twice)}; keep one of them")
    return names


Text = Annotated[str, _pattern(*WORDS)]  # with `WORDS` in braces
_SHOWN = ("title", "attributes")
EventPattern = Annotated[str, _pattern("number", *_SHOWN, "rating", shows=_SHOWN)]
_Word = Annotated[str, matching(r"\A[^\n]*\S[^\n]*\Z", "a word, in one line")]
Names = Annotated[tuple[_Word, ...], AfterValidator(_distinct)]


class Words(Strict):
    """The words that prompts use for users, items and what users do."""

    user: _Word = Field(default="person", description="Prompts call a user this: reader, listener, applicant.")
    item: _Word = Field(default="title", description="Prompts call an item this: book, song, job.")
    items: _Word = Field(default="titles", description="Prompts call several items this: books, songs, jobs.")
    interacted: _Word | None = Field(
        default=None,
        description="Prompts use these words for what users did with items: clicked, viewed, applied for. null: they "
        "follow from the events or ratings of the table: `clicked or viewed`, `rated from 1 to 5`, `rated`, `picked`.",
    )
    events: dict[str, _Word] = Field(
        default={},
        description="Prompts show a value of the column `event` as these words, {play: played}. Common English values "
        "need none.",
    )
    collection: _Word = Field(
        default="catalogue", description="Prompts call the collection of all items this: job board, shop."
    )
    enjoy: _Word = Field(
        default="enjoy",
        description="Prompts use this verb for what users do with an item that suits them: enjoy, want.",
    )


@dataclass(frozen=True)
class Labels:
    """The form in which interactions tell what users did; `histories.labels_of` infers it."""

    interacted: str = "rated from 1 to 5"  # the words for it, for all interactions
    kind: Literal["numbers", "words", "none"] = "numbers"  # none: all labels are alike
    picked: str | None = None  # the word for a rating of 1 if only 0 and 1 occur


class Columns(Strict):
    """The attribute columns that are shown, and their names in prompts.

    A column that is null or blank in a row is skipped. "*" means all columns of the table that `columns` does not name
    and that do not look like personal data: the title, then the others by name, since a table's order may change any
    night.
    """

    columns: Literal["*"] | tuple[str, ...] = "*"
    exclude: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)  # column -> name in the prompt
    optional: tuple[str, ...] = ()  # columns named above that a table need not have
    max_value_chars: int = Field(default=300, ge=1)
    # Lists that are paths, broad to narrow; other lists are sets. No part of fingerprints, which cover the text shown.
    paths: tuple[str, ...] = Field(default=(), exclude=True)

    def shown(self, attributes: Collection[str], personal: Collection[str] = ()) -> list[str]:
        """Names of the columns to show, in this order; `personal` ones are shown only if they are named."""
        rest = sorted(
            set(attributes).difference(self.named, personal), key=lambda name: (name != "title", name.casefold(), name)
        )
        names = [name for place in self.columns for name in (rest if place == "*" else [place])]
        return [name for name in dict.fromkeys(names) if name in attributes and name not in self.exclude]

    @property
    def named(self) -> tuple[str, ...]:
        return tuple(name for name in self.columns if name != "*")

    def missing(self, known: Collection[str]) -> list[str]:
        """Columns that are named here, not optional, and not among the columns of a table."""
        named = [*self.named, *self.exclude, *self.labels]
        return [name for name in dict.fromkeys(named) if name not in known and name not in self.optional]


class AttributeLines(Columns):
    """The block of the entity's own attributes, one line each."""

    heading: Text = ""
    line: Annotated[str, _pattern("label", "value", shows=("value",))] = "- {label}: {value}"


class HistoryLines(Columns):
    """The block of what a user did, one line each, oldest first; `{number}` counts the lines shown from 1."""

    heading: Text = ""
    line: EventPattern = "- {title} | {attributes} | {rating}"
    # if labels are words, shown as `{event}`: clicked, passed over; None: `line`
    line_event: Annotated[str, _pattern("number", *_SHOWN, "event", shows=_SHOWN)] | None = None
    line_unrated: EventPattern = "- {title} | {attributes}"
    separator: str = " | "  # between attribute values; left out before `{attributes}` if there are none
    none: Text = "- nothing yet"  # shown for an empty history
    ratings: dict[float, str] = Field(default_factory=dict)  # rating -> text shown: {1: clicked, 0: passed over}
    events: dict[str, str] = Field(default_factory=dict)  # event -> text shown; overrides `knowledge.words.events`
    max_events: int = Field(default=40, ge=0)  # number of newest events kept, of those that the next options leave
    max_days: int | None = Field(default=None, ge=1)  # older events, counted from the user's newest one, are left out
    deduplicate: bool = False  # whether only the newest of a user's events with one item is kept
    half_life: float | None = Field(default=None, gt=0)  # n-th newest event is shown with chance 0.5 ^ (n / half_life)

    @property
    def needs_times(self) -> bool:
        """Whether the events shown depend on their times, besides the order of time."""
        return self.max_days is not None or self.half_life is not None

    def labelled(self, labels: Labels, words: Words) -> "HistoryLines":
        """The same lines, adapted to labels that are numbers, words, or all alike."""
        changes: dict[str, Any] = {"events": words.events | self.events}
        if labels.picked is not None:
            changes["ratings"] = {1: words.interacted or labels.picked, 0: "passed over"} | self.ratings
        if labels.kind == "words":
            changes["line"] = self.line_event or self.line
        elif labels.kind == "none" and not self.ratings:
            changes["line"] = self.line_unrated
        return self.model_copy(update=changes)


_PARSERS = "aspects, attributes, free, json, or a Python file beside the template"
_PARSER = matching(r"^(aspects|attributes|free|json|[A-Za-z0-9_\-]+\.py)\Z", _PARSERS)


class PromptTemplate(Strict):
    """One question that is asked about every entity of a side.

    The prompt is the instruction, which is the same for all entities, then attributes, history and request.
    """

    name: Annotated[str, matching(r"^[a-z0-9_\-]+\Z", "small letters, digits, _ and -")]
    version: int = Field(ge=1)
    framework: str
    side: Side
    parser: Annotated[str, _PARSER]  # for a .py file: its function `parse(text)`
    factors: Names = ()  # the names of aspects or attributes
    fields: Annotated[dict[_Word, Literal["text", "list"]], AfterValidator(_distinct)] = Field(default={})  # of JSON
    optional_fields: Names = ()  # fields that an answer need not have
    max_items: dict[str, int] = Field(default_factory=dict)  # JSON list -> the most items that it may have
    # The form of answers for guided decoding, if the parser does not imply it: one of these.
    json_schema: dict[str, JsonValue] | None = None
    regex: str | None = None
    grammar: str | None = None  # in llguidance's variant of Lark
    encode: Names = ()  # parts of the answer that are encoded as its vector; empty: the whole text
    any_language: bool = False  # answers may be in another language than the question
    system: Text | None = None
    instruction: Text
    attributes: AttributeLines = AttributeLines()
    history: HistoryLines | None = None
    request: Text | None = None
    chat_options: dict[str, JsonValue] = Field(default_factory=dict)  # for the chat template; over those of `decoding`
    parser_path: Path | None = Field(default=None, exclude=True)  # the user's parser, found when the template is loaded
    parser_sha256: str | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "PromptTemplate":
        if self.side == "item" and self.history is not None:
            raise ValueError("an item template cannot have a `history`: remove it")
        texts = (self.system, self.instruction, self.request, re.sub(r"{.*?}", "", self.attributes.line))
        if not any(re.search(r"\w", text or "") for text in texts):
            raise ValueError(
                "the prompt asks nothing: `system`, `instruction`, `request` and `attributes.line` have no words"
            )
        if not self.attributes.columns and self.history is None:
            raise ValueError(f"prompts show nothing of the {self.side}: name columns in `attributes.columns`")
        if self.parser in ("aspects", "attributes") and not self.factors:
            raise ValueError(f"parser `{self.parser}` needs their names in `factors`; add them, or use parser `free`")
        if (self.parser == "json") != bool(self.fields):
            raise ValueError("parser `json` needs `fields`, names with kinds (text, list), and other parsers have none")
        if sum(form is not None for form in (self.json_schema, self.regex, self.grammar)) > 1:
            raise ValueError("a template has only one of `json_schema`, `regex` and `grammar`: remove the others")
        for name, most in self.max_items.items():
            if self.fields.get(name) != "list" or most < 1:
                raise ValueError(f"`max_items` has {name}: {most}; expected a list of `fields` and a number above 0")
        parts = {"json": tuple(self.fields), "free": ("text",)}.get(self.parser, self.factors)
        for key, names in (("optional_fields", self.optional_fields), ("encode", self.encode)):
            for name in () if self.parser.endswith(".py") else names:  # the parts of a .py parser are unknown
                if name not in parts:
                    raise ValueError(f"`{key}` has {name!r}, but parser `{self.parser}` gives {', '.join(parts)}")
        return self

    def worded(self, words: Words, labels: Labels = Labels(), factors: Sequence[str] | None = None) -> "PromptTemplate":
        """The same template with words and factors, such as those of a team's domain, in its texts.

        `factors` replace those of the template; a template without factors ignores them.
        """
        factors = tuple(factors or ()) if self.factors and factors else self.factors
        interacted = words.interacted or labels.interacted
        named = {name: word for name, word in words if isinstance(word, str)} | {"interacted": interacted}
        named |= {name.capitalize(): _begun(word) for name, word in named.items()}
        if not re.search(r",| or ", interacted):
            named["Interacted"] = _begun(interacted.split()[0])  # Rated titles, not: rated from 1 to 5 titles
        named |= {f"a_{name}": f"{'an' if _AN.match(word) else 'a'} {word}" for name, word in named.items()}
        named["A_user"] = _begun(named["a_user"])
        named["factors"] = " ".join(f"{number}. {factor}" for number, factor in enumerate(factors, 1))
        named["factors_in_words"] = in_words(factors, "and")

        def filled(model: Strict, names: Collection[str]) -> dict[str, str]:
            texts = {name: getattr(model, name) for name in names}
            return {name: text.format(**named) for name, text in texts.items() if text is not None}

        changes: dict[str, Any] = filled(self, ("system", "instruction", "request")) | {"factors": factors}
        changes["attributes"] = self.attributes.model_copy(update=filled(self.attributes, ("heading",)))
        if self.history is not None:
            history = self.history.labelled(labels, words)
            changes["history"] = history.model_copy(update=filled(history, ("heading", "none")))
        return self.model_copy(update=changes)

    def with_columns(self, paths: Sequence[str] = (), personal: Collection[str] = ()) -> "PromptTemplate":
        """The same template, with `paths` shown as paths, and with `personal` columns (users.zip_code) added to "*"."""
        changes: dict[str, Any] = {}
        for name, table in (("attributes", f"{self.side}s"), ("history", "items")):
            block: Columns | None = getattr(self, name)
            if block is None:
                continue
            named = [column.removeprefix(f"{table}.") for column in personal if column.startswith(f"{table}.")]
            columns = (*block.columns, *named) if "*" in block.columns and named else block.columns
            changes[name] = block.model_copy(update={"columns": columns, "paths": (*block.paths, *paths)})
        return self.model_copy(update=changes)

    def with_chat_options(self, options: Mapping[str, Any]) -> "PromptTemplate":
        """The same template, with these options of the chat template where it does not set its own."""
        return self.model_copy(update={"chat_options": {**options, **self.chat_options}})

    @property
    def identity(self) -> str:
        """`name@version`, as records carry it."""
        return f"{self.name}@{self.version}"


def in_words(parts: Sequence[str], between: str) -> str:
    """Some words as an enumeration: `genre, theme and mood`."""
    return f" {between} ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _begun(word: str) -> str:
    return word[:1].upper() + word[1:]


_ColumnName = Annotated[str, matching(r"^(users|items)\..", "users.COLUMN or items.COLUMN")]


class KnowledgeSettings(Strict):
    """The questions that prompts ask about users and items."""

    user_template: str = Field(default="kar_user", description="Prompts of users are made from this template.")
    item_template: str = Field(default="kar_item", description="Prompts of items are made from this template.")
    template_dir: Path | None = Field(
        default=None,
        description="Templates are searched for in this folder first, then among those that ship with laserbatch. "
        "null: only the latter are used.",
    )
    words: Words = Field(
        default=Words(), description="Prompts call your users and items, and what users do with items, by these words."
    )
    user_factors: Names | None = Field(
        default=None,
        description="User prompts ask about these factors, on which it depends whether users like items. A template of "
        "your own keeps its factors. null: the factors of the template.",
    )
    item_factors: Names | None = Field(
        default=None,
        description="Item prompts ask about these factors. A template of your own keeps its factors. null: the factors "
        "of the template.",
    )
    personal_attributes: tuple[_ColumnName, ...] = Field(
        default=(),
        description="Prompts show these columns although they look like personal data or secrets, such as "
        "users.zip_code. All other such columns are left out, with a warning.",
    )
    paths: tuple[str, ...] = Field(
        default=(),
        description="These columns of lists are paths, broad to narrow, which prompts show as Books > Poetry. Other "
        "lists are sets, which prompts show with commas.",
    )
    max_prompt_tokens: int = Field(
        default=1024,
        ge=16,
        description="A prompt has at most this many tokens: the oldest events of a longer history are left out, and "
        "an entity whose prompt is still too long goes to quarantine.",
    )

    def template_of(self, side: Side) -> str:
        return self.user_template if side == "user" else self.item_template

    def template(self, side: Side, labels: Labels = Labels()) -> PromptTemplate:
        """A side's template with the configured words and factors. Raises ConfigError like `load_template`.

        A user's own template keeps the factors that it has.
        """
        name, factors = self.template_of(side), self.user_factors if side == "user" else self.item_factors
        is_own = template_path(name, self.template_dir).parent != SHIPPED_TEMPLATES
        template = load_template(name, self.template_dir).worded(self.words, labels, None if is_own else factors)
        return template.with_columns(self.paths, self.personal_attributes)


def template_path(name: str, folder: str | Path | None = None) -> Path:
    """The file of a template, from the user's own `folder` if it is there. Raises ConfigError if there is none."""
    folders = [SHIPPED_TEMPLATES] if folder is None else [Path(folder), SHIPPED_TEMPLATES]
    path = next((path for place in folders if (path := place / f"{name}.yaml").is_file()), None)
    if path is None:
        available = ", ".join(sorted({path.stem for place in folders for path in place.glob("*.yaml")}))
        own = " For your own, name it without folder and suffix, and set knowledge.template_dir to its folder."
        raise ConfigError(f"there is no prompt template {name!r}; templates are: {available}. Name one of these.{own}")
    return path


def load_template(name: str, folder: str | Path | None = None) -> PromptTemplate:
    """Load a template by name: `<folder>/<name>.yaml` if it exists, otherwise the one that ships with laserbatch.

    Its texts still have words in braces, which `PromptTemplate.worded` fills in. Raises ConfigError, which names file,
    line and key.
    """
    path = template_path(name, folder)
    raw = read_yaml(path, "prompt template", "name another")
    for key in ("parser_path", "parser_sha256") if isinstance(raw, Mapping) else ():
        if key in raw:
            raise ConfigError(f"prompt template {path}: {key} is not a key of a file; set `parser: {name}.py` instead")
    try:
        template = PromptTemplate.model_validate(raw)
    except ValidationError as error:
        line = line_of(path, error.errors()[0]["loc"])
        raise ConfigError(f"prompt template {path}, line {line}: {explain(error, PromptTemplate)}") from None
    if faults := list(slips(raw, template)):
        raise ConfigError(f"prompt template {path}: {'; '.join(faults)}")
    if template.name != name:
        raise ConfigError(f"prompt template {path} has the name {template.name!r}; expected {name!r}, as its file")
    if not template.parser.endswith(".py"):
        return template
    parser = path.with_name(template.parser)
    if not parser.is_file():
        raise ConfigError(f"prompt template {path}: its parser {parser} is not there; write it, or name another parser")
    sha256 = hashlib.sha256(parser.read_bytes()).hexdigest()
    return template.model_copy(update={"parser_path": parser.resolve(), "parser_sha256": sha256})
