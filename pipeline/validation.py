"""Reading of YAML files that people write, and one-line messages for the faults that pydantic finds in them."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from laserbatch.pipeline.errors import ConfigError

MAX_FOUND_CHARACTERS = 60
MAX_NUMBER = 10**12  # largest value of an option; a larger one is a slip, and overflows where it is used
ModelT = TypeVar("ModelT", bound=BaseModel)


class Strict(BaseModel):
    """An immutable model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _KeyTwice(yaml.YAMLError):
    """A mapping has a key twice; the message names the key and both lines."""


class _UniqueKeys(yaml.SafeLoader):
    def compose_mapping_node(self, anchor) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            is_merge = key.tag == "tag:yaml.org,2002:merge"
            name = key.tag if is_merge else self.construct_object(key)  # 16 and 0x10 are the same
            line = key.start_mark.line + 1
            if name in lines:
                raise _KeyTwice(f"{key.value} twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return node

    def construct_scalar(self, node) -> Any:
        text = super().construct_scalar(node)  # JSON writes a character beyond U+FFFF as two escaped surrogates
        return text.encode("utf-16", "surrogatepass").decode("utf-16")

    def construct_object(self, node, deep=False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # 2025-02-30, or a text that is tagged `!!int`
            problem = f"{node.value!r} is not a valid {node.tag.rpartition(':')[2]}; put a text in quotes"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark) from None


def read_yaml(path: Path, what: str, advice: str) -> Any:
    """The content of a YAML file; in messages, `what` names the file, and `advice` says what to do if it is missing.

    Raises ConfigError if it cannot be read, is not YAML, or has a key twice (YAML would keep the last one).
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError:
        raise ConfigError(f"the {what} {path} is not there; {advice}") from None
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read ({error.strerror}); {advice}") from None
    except _KeyTwice as error:
        raise ConfigError(f"the {what} {path} has the key {error}; keep one of them") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        words = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise ConfigError(f"the {what} {path} is not YAML: {words[:200]}") from None


def line_of(path: Path, location: Iterable[str | int]) -> int:
    """The line, from 1, of a key in a YAML file; for a missing key, the line of the innermost parent that is there."""
    node, line = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader), 1
    for part in location:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        pair = next(((key, value) for key, value in pairs if key.value == str(part)), None)
        if pair is None:
            break
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The faults in one line, each with key, found value and expectation; for an unknown key, the nearest valid key."""
    faults = error.errors(include_url=False)
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
    return "; ".join(_sentence(fault, model) for fault in unknown or faults)  # a misspelled key is also a missing one


def validated(model: type[ModelT], data: Any, place: object, advice: str = "") -> ModelT:
    """`data` validated as a model. Raises ConfigError with `place`, the faults and `advice`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{place}: {explain(error, model)}{advice}") from None


def slips(data: Mapping[Any, Any], checked: BaseModel, place: str = "") -> Iterator[str]:
    """Messages on values that pydantic accepts and nobody means: `true` for a number, huge numbers, repeated names."""
    for key, value in data.items():
        read = getattr(checked, str(key), None)
        if isinstance(read, BaseModel) and isinstance(value, dict):
            yield from slips(value, read, f"{place}{key}.")
        elif isinstance(read, tuple | list):
            twice = sorted({name for name in read if isinstance(name, str) and read.count(name) > 1})
            yield from (f"{place}{key}: names {name!r} twice; keep one of them" for name in twice)
        elif isinstance(read, bool) or not isinstance(read, int | float):
            continue
        elif isinstance(value, bool):
            yield f"{place}{key}: expected a number (found {value}, as YAML reads yes, no, on and off too)"
        elif abs(read) > MAX_NUMBER:
            found = str(value)[:MAX_FOUND_CHARACTERS]
            yield f"{place}{key}: expected a number of at most {MAX_NUMBER:,} (found {found})"


def matching(pattern: str, expected: str) -> AfterValidator:
    """A validator that requires a text to contain a pattern; its error names what is `expected`."""

    def require(text: str) -> str:
        if not re.search(pattern, text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(require)


def nearest(name: str, names: Iterable[str]) -> str:
    """`did you mean 'x'?` if a known name is similar, otherwise a list of all known names."""
    names = sorted(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}"


def _sentence(fault: ErrorDetails, model: type[BaseModel]) -> str:
    *parents, key = fault["loc"] or ("",)
    place = ".".join(part for part in map(str, fault["loc"]) if "[" not in part[1:])  # tuple[str, ...] is not a key
    if fault["type"] == "extra_forbidden":
        return f"{place}: no such key; {nearest(str(key), _model_at(model, parents).model_fields)}"
    if fault["type"] == "missing":
        return f"{place}: the key is missing"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "dict_type":
        message = "expected names with values, each on its own line"
    if fault["type"] == "tuple_type":
        message = "expected a list, such as [a, b]"
    if fault["type"] in ("model_type", "model_attributes_type"):
        keys = _model_at(model, fault["loc"]).model_fields
        message = f"expected keys with values, such as {', '.join(keys)}"
    shown = "nothing" if fault["input"] is None else repr(fault["input"])
    if isinstance(fault["input"], dict) and fault["type"] == "value_error":
        return f"{place}: {message}".removeprefix(": ")  # a rule between keys, which the message names
    shown = f"{shown[:MAX_FOUND_CHARACTERS]}..." if len(shown) > MAX_FOUND_CHARACTERS else shown
    return f"{place}: {message} (found {shown})".removeprefix(": ")


def _model_at(model: type[BaseModel], location: Iterable[str | int]) -> type[BaseModel]:
    """The innermost model at a location, also below optional types and mappings."""
    for part in location:
        if part in model.model_fields:
            model = _first_model(model.model_fields[str(part)].annotation) or model
    return model


def _first_model(kind: Any) -> type[BaseModel] | None:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((model for part in get_args(kind) if (model := _first_model(part)) is not None), None)
