"""Plug-ins of other packages: found by their entry points, loaded when a configuration names them.

Groups: `laserbatch.drafters` and `laserbatch.verifiers` (`decoding/plugins.py`), `laserbatch.extensions` (work outside
the night, with its own runs: `jobs/extensions.py`), `laserbatch.commands` (`jobs/cli.py`).
"""

import difflib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.validation import explain


class UnknownPlugin(ConfigError, ValueError):
    """The plug-in that a configuration names is not installed, cannot be imported, or comes from two packages."""


@cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group, such as "drafters", by name. Raises UnknownPlugin if two packages use one name."""
    by_name: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=f"laserbatch.{group}"), key=lambda entry: entry.name):
        first = by_name.setdefault(entry.name, entry)
        if first.value != entry.value:
            raise UnknownPlugin(
                f"{_package(first)} and {_package(entry)} both provide {entry.name!r} ({group}); uninstall one of them"
            )
    return by_name


def load_plugin(group: str, name: str, built_in: tuple[str, ...] = ()) -> Any:
    """Load the object of an entry point. Raises UnknownPlugin, which lists all plug-ins and the `built_in` names."""
    plugins = installed(group)
    if name not in plugins:
        of_origin = {"built in": [*built_in]}
        for plugin, entry in plugins.items():
            of_origin.setdefault(f"package {_package(entry)}", []).append(plugin)
        near = difflib.get_close_matches(str(name), [*built_in, *plugins], n=1, cutoff=0.5)
        listed = "; ".join(f"{', '.join(names)} ({origin})" for origin, names in of_origin.items() if names)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        raise UnknownPlugin(f"no installed package provides {name!r}. {meant}There are: {listed or 'none'}")
    try:
        return plugins[name].load()
    except (ImportError, AttributeError) as error:
        raise UnknownPlugin(f"{name!r} of the package {_package(plugins[name])} cannot be loaded: {error}") from error


def validated_options(kind: type[BaseModel], raw: Any, place: str) -> BaseModel:
    """The options of a plug-in. Raises ValueError with the key (below `place`), its value and what was expected."""
    try:
        return raw if isinstance(raw, kind) else kind.model_validate({} if raw is None else raw)
    except ValidationError as error:
        raise ValueError(f"{place}: {explain(error, kind)}") from None


def path_fields(kind: type[BaseModel]) -> list[str]:
    """The options of a plug-in that are paths, or lists of paths."""
    return [name for name, field in kind.model_fields.items() if _holds_paths(field.annotation)]


def _holds_paths(annotation: Any) -> bool:
    return annotation is Path or any(map(_holds_paths, get_args(annotation)))


def _package(entry: EntryPoint) -> str:
    return "an unnamed package" if entry.dist is None else entry.dist.name
