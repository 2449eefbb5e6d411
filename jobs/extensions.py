"""Work beside the night that other packages bring, with runs in a workspace of its own within the night's.

An extension has a section `extensions.<name>` of the configuration, and commands that it declares itself. Its runs are
listed, published, delivered and forgotten as a night's are.
"""

from pathlib import Path
from typing import Any, ClassVar

from laserbatch.pipeline.plugins import load_plugin
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.validation import Strict


class Extension:
    """What a package's entry point in the group `laserbatch.extensions` is an instance of.

    `Options` : the keys of its section.
    """

    Options: ClassVar[type[Strict]]

    def check(self, options: Any) -> str:
        """For `laserbatch doctor`: what was found, if it is sound. Raises ConfigError or ModelError."""
        raise NotImplementedError

    def write_report(self, manifest: RunManifest, path: Path) -> None:
        """Write or replace the page of one of its runs."""
        raise NotImplementedError


def extension(name: str) -> Extension:
    """The extension of a name. Raises UnknownPlugin."""
    return load_plugin("extensions", name)
