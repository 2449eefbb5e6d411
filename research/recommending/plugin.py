"""The extension `recommending`: nightly lists of items."""

from pathlib import Path

from laserbatch.jobs.extensions import Extension
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.research.recommending.settings import RecommendingSettings


class Recommending(Extension):
    Options = RecommendingSettings

    def check(self, options: RecommendingSettings) -> str:
        from laserbatch.research.recommending.listed import known_models

        target, codes = known_models(options)
        return f"{target.model_id}, with codes of {len(codes)} items"

    def write_report(self, manifest: RunManifest, path: Path) -> None:
        from laserbatch.research.recommending.report import write_lists_report

        write_lists_report(manifest, path)


RECOMMENDING = Recommending()
