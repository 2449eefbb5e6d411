"""Texts that refresh policies save, and the share of the behaviour that the kept texts have not seen; no model runs.

    python benchmarks/refresh.py --quick --json OUT

It replays real interactions with their times (MovieLens 100K) night after night. Every user whose history grew is a
candidate, and `pipeline.planning.refresh` decides, as in a night. The last nights of the data are simulated once for
each policy. Every text counts as 200 tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from common import Figure, benchmark_parser, finish, scale_of

from laserbatch.pipeline.planning.refresh import Candidates, RefreshSettings, decide

TOKENS = 200.0  # per text
DAY_S = 24 * 3600
POLICIES: dict[str, dict] = {
    "every change": {},
    "3 new interactions": {"min_new_interactions": 3},
    "10 new interactions": {"min_new_interactions": 10},
    "10 new, or a week old": {"min_new_interactions": 10, "max_age_days": 7},
    "half the tokens": {"max_tokens": 0.5},  # share of the mean tokens per night of "every change"
    "a fifth of the tokens": {"max_tokens": 0.2},
}


@dataclass(frozen=True)
class Lived:
    """The result of the nights under one policy; unseen and stale shares are means over nights."""

    policy: str
    num_texts: int
    saved_share: float  # share of the texts of "every change" that are not written
    busiest_night: int  # number of texts
    unseen_share: float  # share of a user's interactions that the text has not seen, mean over users with a text
    stale_share: float  # share of users whose text has not seen everything
    oldest_days: int  # maximum age of a text that has not seen everything


def live(first_day: int, users: np.ndarray, days: np.ndarray, settings: RefreshSettings, max_tokens: float | None,
         new_template: bool = False) -> tuple[list[int], list[float], list[float], int]:  # fmt: skip
    """Simulate nights from `first_day` on; returns texts, unseen and stale share by night, and the oldest stale age."""
    num_users = users.max() + 1
    seen = np.bincount(users[days < first_day], minlength=num_users)
    written_on, is_old = np.full(num_users, first_day - 1), np.full(num_users, new_template)
    has_text = seen > 0
    num_texts, unseen, stale, oldest = [], [], [], 0
    for day in range(first_day, days.max() + 1):
        now = np.bincount(users[days <= day], minlength=num_users)
        rows = np.flatnonzero((now != seen) | (is_old & has_text))
        candidates = Candidates(
            has_text=has_text[rows],
            is_changed_beyond_history=is_old[rows],
            num_interactions=now[rows],
            num_seen=seen[rows],
            age_days=np.where(has_text[rows], day - written_on[rows], 0).astype(float),
            num_tokens=np.full(len(rows), TOKENS),
        )
        written = rows[decide(candidates, settings, max_tokens).is_written]
        seen[written], written_on[written], is_old[written], has_text[written] = now[written], day, False, True
        known = np.flatnonzero(has_text)
        share = (now[known] - seen[known]) / now[known]
        num_texts.append(len(written))
        unseen.append(float(share.mean()))
        stale.append(float(((share > 0) | is_old[known]).mean()))
        waiting = known[share > 0]
        oldest = max([oldest, *(day - written_on[waiting]).tolist()])
    return num_texts, unseen, stale, oldest


def main() -> None:
    arguments = benchmark_parser(__doc__, "data").parse_args()
    num_nights = scale_of(arguments, full=120, quick=14, smoke=5)
    users, days = read_events(arguments.data)
    first_day = days.max() - num_nights + 1
    every, *_ = live(first_day, users, days, RefreshSettings(), None)
    rows = []
    for name, policy in POLICIES.items():
        share = policy.get("max_tokens")
        budget = None if share is None else share * TOKENS * sum(every) / num_nights
        unbounded = {key: value for key, value in policy.items() if key != "max_tokens"}
        texts, unseen, stale, oldest = live(first_day, users, days, RefreshSettings(**unbounded), budget)
        saved = 1 - sum(texts) / sum(every)
        rows.append(Lived(name, sum(texts), saved, max(texts), float(np.mean(unseen)), float(np.mean(stale)), oldest))
    num_users = len(np.unique(users[days < first_day]))
    budget = TOKENS * (num_users / 5 + sum(every) / num_nights)
    template, _, stale, _ = live(first_day, users, days, RefreshSettings(), budget, new_template=True)
    done = next((night for night, share in enumerate(stale, 1) if share == 0), None)
    by_policy = {row.policy: row for row in rows}
    figures = [
        Figure.at_most("texts after 3 new interactions, over those of every change",
                       by_policy["3 new interactions"].num_texts / sum(every), 1.0),
        Figure.at_most("texts after 10 new interactions or a week, over those of every change",
                       by_policy["10 new, or a week old"].num_texts / sum(every), 1.0),
    ]  # fmt: skip
    lines = [f"{num_nights} nights, {num_users} users with a text before them; every change: {sum(every)} texts"]
    lines += [
        f"{row.policy:24} {row.num_texts:6} texts, {row.saved_share:4.0%} saved, busiest night {row.busiest_night:4}; "
        f"unseen {row.unseen_share:.2%}, stale {row.stale_share:.1%}, oldest {row.oldest_days} days"
        for row in rows
    ]
    lines.append(
        f"a new template, a fifth of the users a night beside the usual: {template[:6]} ..., nobody waits after {done}"
    )
    content = {"num_nights": num_nights, "num_users": num_users, "rows": rows}
    content["new_template"] = {"texts": template, "stale_share": stale, "nights": done}
    finish(arguments.json, figures, ["\n".join(lines)], content)


def read_events(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """The user number and the day of each interaction: int64[n] both."""
    table = pq.read_table(data / "ml-100k" / "interactions.parquet", columns=["user_id", "timestamp"])
    _, users = np.unique(table["user_id"].to_numpy(), return_inverse=True)
    times = table["timestamp"]
    seconds = times.cast("int64").to_numpy() // (1 if str(times.type).startswith("int") else 10**6)
    return users, seconds // DAY_S - (seconds // DAY_S).min()


if __name__ == "__main__":
    main()
