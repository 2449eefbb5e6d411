"""As much of pydantic as pools need, for engines that do not have it: `records` chooses.

Fields with defaults and bounds, nested ones among them; unknown names and wrong types are refused by name.
"""

from collections.abc import Iterable
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, is_typeddict

_MISSING = object()
_BOUNDS = {
    "ge": ("greater than or equal to", lambda value, bound: value >= bound),
    "gt": ("greater than", lambda value, bound: value > bound),
    "le": ("less than or equal to", lambda value, bound: value <= bound),
    "lt": ("less than", lambda value, bound: value < bound),
    "min_length": ("of a length of at least", lambda value, bound: len(value) >= bound),
    "max_length": ("of a length of at most", lambda value, bound: len(value) <= bound),
}


class ValidationError(ValueError):
    """A value that is not what its field is for; `loc` is where it stands."""

    def __init__(self, loc: tuple, message: str) -> None:
        super().__init__(f"{'.'.join(map(str, loc))}: {message}")
        self._error = {"loc": loc, "msg": message}

    def errors(self) -> list[dict[str, Any]]:
        return [self._error]


class Field:
    """A field's default, its bounds and its description."""

    def __init__(self, default: Any = _MISSING, description: str = "", **bounds: float) -> None:
        self.default, self.description, self.bounds = default, description, bounds
        self.annotation: Any = Any


class BaseModel:
    """Values by the names of a class's annotations; made by keyword, never changed."""

    model_fields: ClassVar[dict[str, Field]] = {}

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()
        cls.model_fields = dict(cls.model_fields)
        for name, annotation in get_annotations(cls).items():
            given = cls.__dict__.get(name, _MISSING)
            field = given if isinstance(given, Field) else Field(given)
            field.annotation = annotation
            cls.model_fields[name] = field
            if given is not _MISSING:
                delattr(cls, name)

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in self.model_fields:
                raise ValidationError((name,), "Extra inputs are not permitted")
        for name, field in self.model_fields.items():
            value = values.get(name, field.default)
            if value is _MISSING:
                raise ValidationError((name,), "Field required")
            self.__dict__[name] = _checked(value, field, (name,)) if name in values else value

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValidationError((name,), "Instance is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(vars(self).values())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @classmethod
    def model_validate(cls, values: Any) -> "BaseModel":
        return _typed(values, cls, ())

    def model_dump(self, mode: str = "python") -> dict[str, Any]:
        return {name: _dumped(value, mode) for name, value in vars(self).items()}

    def model_copy(self, update: dict[str, Any]) -> "BaseModel":
        copied = object.__new__(type(self))
        copied.__dict__.update(vars(self) | update)
        return copied


def _dumped(value: Any, mode: str) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode)
    if isinstance(value, dict):
        return {name: _dumped(one, mode) for name, one in value.items()}
    if isinstance(value, tuple):
        found = [_dumped(one, mode) for one in value]
        return found if mode == "json" else tuple(found)
    return str(value) if mode == "json" and isinstance(value, Path) else value


def _checked(value: Any, field: Field, loc: tuple) -> Any:
    value = _typed(value, field.annotation, loc)
    for name, bound in field.bounds.items():
        wanted, holds = _BOUNDS[name]
        if value is not None and not holds(value, bound):
            raise ValidationError(loc, f"Input should be {wanted} {bound}")
    return value


def _typed(value: Any, kind: Any, loc: tuple) -> Any:
    """A value as a type of the manifests has it, as it stands in JSON or in Python."""
    origin, of = get_origin(kind), get_args(kind)
    if origin is Literal:
        fits = value in of
    elif origin in (Union, UnionType):
        return None if value is None and NoneType in of else _typed(value, of[0], loc)
    elif origin is tuple:
        if not (fits := isinstance(value, Iterable) and not isinstance(value, str | dict)):
            raise ValidationError(loc, "Input should be a valid tuple")
        return tuple(_typed(one, of[0], (*loc, k)) for k, one in enumerate(value))
    elif origin is dict or is_typeddict(kind):
        if not isinstance(value, dict):
            raise ValidationError(loc, "Input should be a valid dictionary")
        kinds = get_annotations(kind) if is_typeddict(kind) else dict.fromkeys(value, of[1] if of else Any)
        if missing := kinds.keys() ^ value.keys():
            raise ValidationError((*loc, min(missing)), "Field missing or unknown")
        key = (lambda name: name) if is_typeddict(kind) else (lambda name: _typed(name, of[0], loc))
        return {key(name): _typed(one, kinds[name], (*loc, name)) for name, one in value.items()}
    elif issubclass(kind, BaseModel):
        if isinstance(value, dict):
            try:
                return kind(**value)
            except ValidationError as error:
                (found,) = error.errors()
                raise ValidationError((*loc, *found["loc"]), found["msg"]) from None
        fits = isinstance(value, kind)
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if fits else value
    elif kind is Path:
        fits = isinstance(value, str | Path)
        value = Path(value) if fits else value
    else:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise ValidationError(loc, f"Input should be a valid {getattr(kind, '__name__', kind)} (found {value!r})")
    return value
