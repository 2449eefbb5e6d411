"""`laserbatch config`: every option with its value, its default and what it does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from laserbatch.jobs.console import stdout, summary, visible
from laserbatch.jobs.settings import CONFIG, JSON, Settings, load_settings


def config(config: Path | None = CONFIG, as_json: bool = JSON) -> None:
    """Show every option with its value, its default and what it does.

    `*` marks values that differ from the default.

    Example: `laserbatch config --config laserbatch.yaml`
    """
    options = list(options_of(load_settings(config), Settings()))
    if as_json:
        summary({"configuration": None if config is None else str(config), "options": options}, as_json)
        return
    for option in options:
        value, default = (visible(json.dumps(option[key], ensure_ascii=False)) for key in ("value", "default"))
        line = f"* {option['option']}: {value} (default: {default})"
        line = line if option["is_changed"] else f"  {option['option']}: {value}"
        stdout.print(f"{line}\n    {option['description']}", markup=False, soft_wrap=True)


def options_of(settings: BaseModel, default: BaseModel | None, within: str = "") -> Iterator[dict[str, Any]]:
    """Yield the options of a section and its subsections; a field without a description is not an option.

    `default` is None for a section that is absent by default.
    """
    for name, field in type(settings).model_fields.items():
        value, usual = getattr(settings, name), None if field.is_required() else field.get_default()
        usual = usual if default is None else getattr(default, name)
        if isinstance(value, BaseModel):
            yield from options_of(value, usual, f"{within}{name}.")
        elif field.description is not None:
            shown = {
                "option": f"{within}{name}",
                "value": to_jsonable_python(value),
                "default": to_jsonable_python(usual),
                "is_changed": value != usual,
            }
            yield shown | {"description": field.description}
