"""What a worker of lists is started with."""

from dataclasses import dataclass
from typing import ClassVar

from laserbatch.pipeline.distributed.spec import WorkerSpec
from laserbatch.research.recommending.settings import RecommendingSettings


@dataclass(frozen=True, kw_only=True)
class ListSpec(WorkerSpec):
    """`model_dir` is the folder of a recommender, `plan/catalogue.parquet` what it lists."""

    options: RecommendingSettings
    worker: ClassVar[str] = "laserbatch.research.recommending.list_worker:ListWorker"
