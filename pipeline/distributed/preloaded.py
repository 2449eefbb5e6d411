"""Loaded by processes of a local Ray while a night is planned, so that workers need not: their code takes seconds."""

from laserbatch.pipeline.distributed.loading import quick_imports

with quick_imports():
    import laserbatch.pipeline.distributed.worker
    import laserbatch.pipeline.engines.own  # noqa: F401
