"""The text of `configs/default.yaml`; `python tests/jobs/default_yaml.py` writes the file after a change of options."""

import textwrap

import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from laserbatch.jobs.settings import PACKAGE_ROOT, Settings

DEFAULT_YAML = PACKAGE_ROOT / "configs" / "default.yaml"
YAML_LINE_WIDTH = 110
HEAD = """\
# Every option of laserbatch with its default; `laserbatch config` shows yours. A configuration names what it changes.

"""


def default_yaml() -> str:
    return HEAD + commented_yaml(Settings).lstrip("\n") + "\n"


def commented_yaml(model: type[BaseModel], indent: int = 0) -> str:
    """All options of a settings model as YAML that loads into an equal model, each with its description above it."""
    lines: list[str] = []
    for name, field in model.model_fields.items():
        section = field.annotation
        pad = " " * indent
        if isinstance(section, type) and issubclass(section, BaseModel):
            about = (section.__doc__ or "").strip().splitlines()[0]
            lines += ["", f"{pad}# {about}", f"{pad}{name}:"] if indent == 0 else [f"{pad}{name}:  # {about}"]
            lines.append(commented_yaml(section, indent + 2))
            continue
        if field.description is None:
            continue  # no option
        for line in textwrap.wrap(field.description or "", YAML_LINE_WIDTH - indent):
            lines.append(f"{pad}# {line}")
        value = to_jsonable_python(field.get_default(call_default_factory=True))
        dumped = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
        lines.append(f"{pad}{name}: {dumped.removesuffix('...' + chr(10)).strip()}")
    return "\n".join(lines)


if __name__ == "__main__":
    DEFAULT_YAML.write_text(default_yaml(), encoding="utf-8")
