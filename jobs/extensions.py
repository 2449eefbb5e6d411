"""Extensions: work that other packages add to a night, with runs in a separate workspace within the night's.

An extension has the section `extensions.<name>` of the configuration, and declares its own commands. Its runs are
listed, published, delivered and forgotten like those of nights.
"""

from pathlib import Path
from typing import Any, ClassVar

from laserbatch.pipeline.plugins import load_plugin
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.validation import Strict


class Extension:
    """The base class of an extension; entry points of the group `laserbatch.extensions` name instances of it.

    `Options` : the options of its section in the configuration.
    """

    Options: ClassVar[type[Strict]]

    def check(self, options: Any) -> str:
        """Check the options for `laserbatch doctor`; return a finding. Raises ConfigError or ModelError if unusable."""
        raise NotImplementedError

    def write_report(self, manifest: RunManifest, path: Path) -> None:
        """Write or replace the report of one of the extension's runs."""
        raise NotImplementedError


def extension(name: str) -> Extension:
    """The extension with this name. Raises UnknownPlugin if there is none."""
    return load_plugin("extensions", name)
