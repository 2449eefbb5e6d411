"""Commands that this package adds to `laserbatch`."""

from laserbatch.jobs.console import LazyCommand

DRAFTER = LazyCommand("laserbatch.research.commands.drafter:app", "Train drafters on a run's own texts.")
RECOMMEND = LazyCommand(
    "laserbatch.research.commands.recommend:recommend",
    "List the best items of every user, and publish them as Parquet: user_id, rank, item_id, score.",
)
RECOMMENDER = LazyCommand("laserbatch.research.commands.recommend:app", "Train recommenders and draft models for them.")
