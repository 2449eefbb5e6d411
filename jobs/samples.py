"""The few texts that a report shows, with where each stretch of them came from."""

from laserbatch.jobs.night import Night
from laserbatch.jobs.spans import text_spans
from laserbatch.pipeline.decoding.model.identity import load_tokenizer
from laserbatch.pipeline.planning.plan import SidePlan, read_shard
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.manifest import Sample, SampleSpan
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder


def report_samples(night: Night, folder: RunFolder, side: Side, plan: SidePlan) -> list[Sample]:
    """Sample texts of a side: evenly spread over the plan's shards, the first row of each."""
    wanted = night.settings.night.num_report_samples
    if not plan.shards or not wanted:
        return []
    tokenizer = load_tokenizer(night.settings.model_dir)
    stride = max(1, len(plan.shards) // wanted)
    samples = []
    for shard in plan.shards[::stride][:wanted]:
        path = folder.knowledge_folder(side) / f"{shard.name}.parquet"
        if not path.exists():
            continue
        table = read_parquet(path)
        if not table.num_rows:
            continue
        record = table.slice(0, 1).to_pylist()[0]
        planned = next(row for row in read_shard(folder.root / shard.path) if row.entity_id == record["entity_id"])
        spans = text_spans(tokenizer, record["token_ids"], record["token_sources"])
        samples.append(
            Sample(
                entity_id=record["entity_id"],
                group=record["pool_group"],
                prompt=tokenizer.decode(planned.prompt_ids.tolist(), skip_special_tokens=False),
                text=record["text"],
                spans=[SampleSpan(span.text, span.source) for span in spans],
                tokens_per_step=1 + record["num_accepted"] / record["num_steps"] if record["num_steps"] else None,
            )
        )
    return samples
