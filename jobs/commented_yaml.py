"""A configuration as commented YAML, from the settings' own descriptions and defaults: what `init` writes.

Knows pydantic models, not what their options mean.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

LINE_WIDTH = 110


def commented_yaml(model: type[BaseModel], values: Mapping[str, Any], indent: int = 0) -> str:
    """All options of a settings model, each with its description above it.

    Parameters
    ----------
    model : the settings class.
    values : values to write instead of defaults, nested like the model.
    indent : spaces before each line.

    Returns
    -------
    str
        YAML that loads into the model again.
    """
    lines: list[str] = []
    for name, field in model.model_fields.items():
        section = field.annotation
        pad = " " * indent
        if isinstance(section, type) and issubclass(section, BaseModel):
            about = (section.__doc__ or "").strip().splitlines()[0]
            lines += ["", f"{pad}# {about}", f"{pad}{name}:"] if indent == 0 else [f"{pad}{name}:  # {about}"]
            lines.append(commented_yaml(section, values.get(name, {}), indent + 2))
            continue
        for line in textwrap.wrap(field.description or "", LINE_WIDTH - indent):
            lines.append(f"{pad}# {line}")
        value = values.get(name, field.get_default(call_default_factory=True))
        lines.append(f"{pad}{name}: {_inline(value)}")
    return "\n".join(lines)


def _inline(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    elif not isinstance(value, list | dict | str | int | float | bool | None):
        value = str(value)  # a path
    dumped = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return dumped.removesuffix("...\n").strip()
