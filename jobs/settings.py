"""The whole configuration: frozen, composed of a section for each package, and loaded once from YAML.

A misspelled key fails before any work starts, naming the key and the nearest valid one. Relative paths in a file are
relative to that file's folder, and `~` is the home folder. Every option has a default and a description;
`configs/default.yaml` shows them all. A field without a description is not an option: only code may set it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

import typer
from pydantic import BaseModel, Field, SerializeAsAny, field_validator, model_validator

from laserbatch.ctr.settings import CtrOptions
from laserbatch.jobs.extensions import extension
from laserbatch.pipeline.decoding.plugins import drafter_plugin
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.domains import of_domain
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings, Labels, PromptTemplate
from laserbatch.pipeline.planning.refresh import RefreshSettings
from laserbatch.pipeline.plugins import UnknownPlugin, path_fields, validated_options
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.uris import is_uri, without_credentials
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.settings import TablesSettings
from laserbatch.pipeline.validation import Strict, matching, nearest, read_yaml, slips, validated
from laserbatch.retrieval_pools.settings import PoolSettings, RoutingOptions

PACKAGE_ROOT = Path(__file__).resolve().parent.parent  # configs/ and models/ are next to the packages
SAMPLE_MODEL = "sample"
CONFIG_NAME = "laserbatch.yaml"  # the file that `init` writes


def config_here() -> Path | None:
    """The path of the current folder's configuration; None if it has no such file."""
    path = Path(CONFIG_NAME)
    return path if path.is_file() else None


IF_HERE = f"{CONFIG_NAME} of the current folder, if there is one"
CONFIG = typer.Option(..., "--config", default_factory=config_here, show_default=IF_HERE, help="Configuration file.")
WORKSPACE = typer.Option(None, "--workspace", "-w", show_default="the configured workspace", help="Workspace folder.")
JSON = typer.Option(False, "--json", help="Print the result as JSON.")
DRY_RUN = typer.Option(False, "--dry-run", help="Remove nothing; print what would be removed.")
Consequence = Literal["stop", "warn", "ignore"]
_DESTINATIONS = (
    "a URI: s3://bucket/prefix, delta:s3://bucket/prefix or iceberg://CATALOG/NAMESPACE; of a folder of this machine, "
    "file:///folder or delta:file:///folder"
)
# Sections that change no file of a run.
NOT_OF_OUTPUT = ("workspace", "deliver_to", "cluster", "metrics", "gates", "extensions")
_PATHS_AS_TEXT = {"decoding": ("model", "adapter")}  # besides the options whose type is a path


class NightSettings(Strict):
    """The parts of a night besides writing texts."""

    shard_size: int | None = Field(
        default=None,
        ge=1,
        description="A shard has this many entities and is written again if its worker dies; lower it if workers are "
        "often lost. null: a sixteenth of the side's new texts, but at least 4 and at most 32 batches, and at most "
        "half of the texts if they are two batches or more.",
    )
    compare_with_plain: bool = Field(
        default=False,
        description="The night also decodes every text plainly, so that CTR models can be compared on both. This "
        "takes as long as a night without drafts.",
    )
    train_ctr: bool = Field(
        default=True, description="The night trains CTR models if the tables hold interactions after its date."
    )
    num_audited: int = Field(
        default=32,
        ge=0,
        description="The night decodes this many of its texts of each side plainly as well and compares them, but at "
        "most a tenth of those it wrote. 0 turns the comparison off.",
    )


class GateSettings(Strict):
    """Limits beyond which a finished run is not published. Changing them needs no new run."""

    max_failed_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="The run is not published if more than this share of a side's entities is in quarantine.",
    )
    audit: Consequence = Field(
        default="stop",
        description="This decides what follows if audited texts differ too much from plain texts of the same prompts, "
        "in length, meaning, repetition, lost fields or added names. stop: the run is not published; warn: it is "
        "published with a warning; ignore: it is published.",
    )
    auc: Consequence = Field(
        default="stop",
        description="This decides what follows if the CTR comparison finds the texts worse than plain ones. stop: the "
        "run is not published; warn: it is published with a warning; ignore: it is published.",
    )


class MetricsSettings(Strict):
    """The file to which each night, successful or not, writes its metrics for Prometheus."""

    textfile: Path | None = Field(
        default=None,
        description="Metrics are written to this file for the textfile collector of the node exporter, such as "
        "`.../laserbatch.prom`. Metrics of an extension go to a file in the same folder, such as "
        "`.../laserbatch_lists.prom`. null: no file.",
    )


class Settings(Strict):
    """The configuration of a run."""

    workspace: Path = Field(
        default=Path("workspace"), description="This folder holds runs, pools and everything else that nights write."
    )
    deliver_to: Annotated[str, matching("://", _DESTINATIONS)] | None = Field(
        default=None,
        description="Published runs are copied to this URI (s3://bucket/prefix) for readers elsewhere. "
        "delta:s3://bucket/prefix, iceberg://CATALOG/NAMESPACE: their features are added to tables of Delta Lake or "
        "Iceberg. null: runs are not copied.",
    )
    seed: int = 0  # seed of routing and drafter training
    tables: TablesSettings = TablesSettings()
    knowledge: KnowledgeSettings = KnowledgeSettings()
    refresh: RefreshSettings = RefreshSettings()
    decoding: DecodingSettings = DecodingSettings()
    pools: PoolSettings = PoolSettings()
    routing: RoutingOptions = RoutingOptions()
    encoding: EncodingSettings = EncodingSettings()
    ctr: CtrOptions = CtrOptions()
    night: NightSettings = NightSettings()
    gates: GateSettings = GateSettings()
    cluster: ClusterSettings = ClusterSettings()
    metrics: MetricsSettings = MetricsSettings()
    extensions: dict[str, SerializeAsAny[Strict]] = Field(
        default={},
        description="Options of the extensions that other packages add to a night, by extension name, such as "
        "{recommending: {model: DIR}} for laserbatch.research.",
    )
    _folder: Path | None = None  # folder of the configuration file

    @model_validator(mode="after")
    def _go_together(self) -> "Settings":
        decoding = self.decoding
        if decoding.engine != "laserbatch" and self.night.compare_with_plain:
            reason = f"with decoding.engine {decoding.engine} the texts are those of plain decoding"
            raise ValueError(f"night.compare_with_plain must be false: {reason}")
        if decoding.engine == "endpoint" and (self.cluster.num_workers or 1) > 1:
            raise ValueError("with decoding.engine endpoint one worker is enough: set cluster.num_workers to null")
        return self

    @field_validator("deliver_to")
    @classmethod
    def _has_no_credentials(cls, uri: str | None) -> str | None:
        return None if uri is None else without_credentials(uri)

    @field_validator("extensions", mode="before")
    @classmethod
    def _validated_by_extensions(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {name: validated_options(extension(name).Options, value, name) for name, value in raw.items()}

    def extension(self, name: str) -> Any:
        return self.extensions.get(name) or extension(name).Options()

    @property
    def model_dir(self) -> Path:
        return PACKAGE_ROOT / "models" / "sample" if self.decoding.model == SAMPLE_MODEL else Path(self.decoding.model)

    @property
    def effective_knowledge(self) -> KnowledgeSettings:
        """`knowledge`; with the bundled model, in the words that this model knows unless others are configured."""
        is_sample = self.decoding.model == SAMPLE_MODEL and not self.decoding.borrows_tokenizer
        return of_domain(self.knowledge, "sample") if is_sample else self.knowledge

    def template(self, side: Side, labels: Labels = Labels()) -> PromptTemplate:
        """The template of a side, in the words of this configuration; raises ConfigError as `load_template` does."""
        return self.effective_knowledge.template(side, labels).with_chat_options(self.decoding.chat_options)

    def of_output(self) -> dict[str, Any]:
        """The settings that may change the files of a run."""
        output = self.model_dump(mode="json", exclude=set(NOT_OF_OUTPUT))
        if (server := self.decoding.endpoint) is None:
            del output["decoding"]["endpoint"]  # the runs of other engines keep their names
        else:  # a night may go on at another address, or with a higher limit of cost
            output["decoding"]["endpoint"] = {"model": server.model} | server.provenance()
        return output

    def identity(self) -> dict[str, Any]:
        """The settings that a run's name depends on: `of_output`, with paths relative to the configuration's folder.

        Only paths below that folder become relative. Nights thus keep their names when the whole folder is moved.
        """
        named, folder = self.of_output(), self._folder
        if folder is None:
            return named

        def within(path: str) -> str:
            return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else path

        for options, key in _path_options(named):
            if options.get(key) is not None:
                options[key] = _each(options[key], within)
        return named


def _each(paths: str | list[str], change: Callable[[str], str]) -> str | list[str]:
    return [change(path) for path in paths] if isinstance(paths, list) else change(paths)


def load_settings(path: Path | None, overrides: dict[str, Any] | None = None) -> Settings:
    """Load settings from a YAML file; without a file, take the defaults.

    `overrides` are `{"section.key": value}` from the command line; None values are ignored. Raises ConfigError if
    the file is missing or not YAML, a key is unknown, or a value is invalid for its key.
    """
    data = _read_yaml(path) if path is not None else {}
    for dotted, value in (overrides or {}).items():
        if value is None:
            continue
        if isinstance(value, Path):
            value = Path(_expanded(str(value), f"--{dotted}"))
        *sections, key = dotted.split(".")
        section = data
        for name in sections:
            section = section.setdefault(name, {})
        if isinstance(section, dict):  # otherwise validation reports its type
            section[key] = value
    source = path if path is not None else "the command line"
    settings = validated(Settings, data, source)
    if faults := list(slips(data, settings)):
        raise ConfigError(f"{source}: {'; '.join(faults)}")
    settings._folder = None if path is None else path.resolve().parent
    return settings


def open_workspace(config: Path | None, workspace: Path | None) -> Workspace:
    """Open the given workspace, or else the configured one; it must exist."""
    return Workspace.open(load_settings(config, {"workspace": workspace}).workspace, create=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    data = read_yaml(path, "configuration", "`laserbatch init TABLES` writes one")
    if not isinstance(data := {} if data is None else data, dict):
        raise ConfigError(f"{path}: expected sections (`decoding:`, `pools:`, ...), found a {type(data).__name__}")
    data, faults = _configured(data, Settings)
    if faults:
        raise ConfigError(f"{path}: {'; '.join(faults)}")
    for options, key in _path_options(data):
        is_sample = options is data.get("decoding") and key == "model" and options.get(key) == SAMPLE_MODEL
        if isinstance(options.get(key), str | list) and not is_sample:
            options[key] = _each(options[key], partial(_anchored, path, key))
    return data


def _anchored(config: Path, key: str, written: str) -> str:
    """A configured path, made absolute from the configuration's folder; a URI stays as it is."""
    expanded = _expanded(str(written), f"{config}: {key}")
    return expanded if is_uri(written) or key == "deliver_to" else str(config.resolve().parent / expanded)


def _expanded(written: str, place: str) -> str:
    """Replace `~` by the home folder. Raises ConfigError for variables such as `$HOME`, which are not expanded."""
    if re.search(r"\$[{\w]", written):
        advice = "write the path or URI itself, a path relative or from ~, the home folder"
        raise ConfigError(f"{place}: no variable is expanded (found {written!r}); {advice}")
    return expanduser(written)


def _configured(data: dict[str, Any], model: type[BaseModel], place: str = "") -> tuple[dict[str, Any], list[str]]:
    """The configured values of a section, without empty subsections (null in YAML), and its faults.

    A fault is a key whose field is not an option; it is refused like an unknown key.
    """
    sections = {name: field.annotation for name, field in model.model_fields.items() if _is_section(field.annotation)}
    options = [name for name, field in model.model_fields.items() if field.description is not None]
    configured, faults = {key: value for key, value in data.items() if value is not None or key not in sections}, []
    for key, value in configured.items():
        if key in sections and isinstance(value, dict):
            configured[key], of_section = _configured(value, sections[key], f"{place}{key}.")
            faults += of_section
        elif key in model.model_fields and key not in (*sections, *options):
            faults.append(f"{place}{key}: no such key; {nearest(key, (*sections, *options))}")
    return configured, faults


def _is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _path_options(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (raw options, key) for each path option of sections and plug-ins; validation refuses unknown plug-ins."""
    yield data, "workspace"
    yield data, "deliver_to"
    for section, field in Settings.model_fields.items():
        if _is_section(field.annotation) and isinstance(options := data.get(section), dict):
            for key in (*path_fields(field.annotation), *_PATHS_AS_TEXT.get(section, ())):
                yield options, key
    decoding = data.get("decoding")
    drafters = decoding.get("drafter_options") if isinstance(decoding, dict) else None
    for section, plugin_of in ((drafters, drafter_plugin), (data.get("extensions"), extension)):
        for name, options in section.items() if isinstance(section, dict) else ():
            with suppress(UnknownPlugin):
                for key in path_fields(plugin_of(name).Options) if isinstance(options, dict) else ():
                    yield options, key
