"""The sample world: seeded tables of a made-up radio library, at any scale, written in bounded memory.

Users are made and written in chunks of whole arrays, each from its own random stream, so that a million users need no
more memory than one chunk. No column has the themes of titles and the tastes of users: they show only in the words of
titles and in each user's sign-up statement (`lore.py`).
"""

import datetime
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.sample import lore
from laserbatch.pipeline.sample.catalogue import Catalogue, WeightedGroups, make_catalogue
from laserbatch.pipeline.tables.parts import table_parts
from laserbatch.pipeline.tables.schema import timestamps

LAST_DATE = datetime.date(2025, 3, 1)  # the last day of the period; the future begins after it
USERS_PER_CHUNK = 20_000
SHARE_ACTIVE_LAST_DAY = 0.17  # share of the earlier users that are active on the last day
MAX_COLD_RATINGS = 3
DAY_S = 86_400
SIGN_UP_S = 6 * 3_600  # users and items appear before six in the morning, ratings come after
NUM_ARCHETYPES = 12
SHARE_COLD = 0.3  # users with at most three ratings by the last day
SHARE_NEW_USERS = 0.04  # users who signed up on the last day


def write_sample_world(
    out_dir: str | Path,
    num_users: int = 400,
    num_items: int = 300,
    days: int = 60,
    future_days: int = 7,
    seed: int = 0,
    progress: Callable[[int], object] = lambda num_users: None,
    num_asked: int = 0,
) -> None:
    """Write `users.parquet`, `items.parquet` and `interactions.parquet` into a folder.

    The same arguments give the same bytes. Users who signed up, items that appeared and ratings given on the last
    day (2025-03-01) are new to a night of that day, compared with a night of the day before. Ratings of the
    `future_days` that follow are for evaluation; many are by cold and new users.

    `num_users`, `num_items` and `days` are at least 1, 20 and 2; the last day counts among the days. `progress` is
    called with the number of users of each chunk that was written. `num_asked`: items that each user is asked to rate,
    all at one moment of the future days. They give more ratings of the same tastes to judge models by; earlier rows
    stay the same, and no history grows.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    catalogue = make_catalogue(num_items, days, np.random.default_rng([seed, 0]))
    first_day = LAST_DATE - datetime.timedelta(days=days - 1)
    first_s = int(datetime.datetime.combine(first_day, datetime.time(), datetime.UTC).timestamp())
    period = days, future_days, first_s
    item_ids = _ids("i", np.arange(num_items))
    pq.write_table(_item_table(catalogue, item_ids, first_s, seed), out_dir / "items.parquet", compression="zstd")

    archetypes = _draw_archetypes(np.random.default_rng([seed, 1]))
    writers: dict[str, pq.ParquetWriter] = {}
    with ExitStack() as stack:
        for chunk, start in enumerate(range(0, num_users, USERS_PER_CHUNK)):
            stop = min(start + USERS_PER_CHUNK, num_users)
            rng = np.random.default_rng([seed, 2, chunk])
            users = _draw_users(stop - start, days, archetypes, rng)
            user_ids = _ids("u", np.arange(start, stop))
            user_rows = _user_table(users, user_ids, first_s, rng)
            questions = num_asked if future_days else 0, np.random.default_rng([seed, 4, chunk])
            interactions = _interaction_table(users, user_ids, item_ids, catalogue, period, rng, *questions)
            for name, rows in (("users", user_rows), ("interactions", interactions)):
                if name not in writers:
                    writer = pq.ParquetWriter(out_dir / f"{name}.parquet", rows.schema, compression="zstd")
                    writers[name] = stack.enter_context(writer)
                writers[name].write_table(rows)
            progress(stop - start)


def is_sample_world(folder: Path | str) -> bool:
    """Whether users and items have exactly the columns of a sample world, which the bundled model can write about."""
    items = {"item_id", "title", "category", "creator", "era", "mood", "created_at"}
    expected = {"users": {"user_id", "region", "age_band", "about", "created_at"}, "items": items}
    return all(set(table_parts(folder, name)[0].schema.names) == names for name, names in expected.items())


@dataclass(frozen=True)
class Users:
    """Latent tastes and known attributes of a chunk of users; fields are int[n] unless they say otherwise."""

    category: np.ndarray  # (n, 2) favourite top-level categories
    theme: np.ndarray  # (n, 3) two liked themes, one disliked
    mood: np.ndarray
    era: np.ndarray
    strictness: np.ndarray  # -1 generous, 0, 1 strict
    region: np.ndarray
    age_band: np.ndarray
    created_day: np.ndarray
    cold: np.ndarray  # bool[n]


def _draw_archetypes(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Kinds of user: attributes and tastes that tend to come together, each field int[NUM_ARCHETYPES, ...]."""
    sizes = {"mood": lore.MOODS, "era": lore.ERAS, "region": lore.REGIONS, "age_band": lore.AGE_BANDS}
    kinds = {name: rng.integers(len(values), size=NUM_ARCHETYPES) for name, values in sizes.items()}
    kinds["category"] = np.stack([rng.permutation(len(lore.TOP_CATEGORIES))[:2] for _ in range(NUM_ARCHETYPES)])
    kinds["theme"] = np.stack([rng.permutation(len(lore.THEMES))[:3] for _ in range(NUM_ARCHETYPES)])
    return kinds


def _draw_users(num: int, days: int, archetypes: dict[str, np.ndarray], rng: np.random.Generator) -> Users:
    """Draw `num` users, mostly with the tastes of their archetype, partly with their own."""
    kind = rng.integers(NUM_ARCHETYPES, size=num)

    def taste(name: str, share: float, size: int) -> np.ndarray:
        return np.where(rng.random(num) < share, archetypes[name][kind], rng.integers(size, size=num))

    def ranked(name: str, share: float, size: int, width: int) -> np.ndarray:
        drawn = np.argsort(rng.random((num, size)), axis=1)[:, :width]
        return np.where((rng.random(num) < share)[:, None], archetypes[name][kind], drawn)

    cold = rng.random(num) < SHARE_COLD
    new = cold & (rng.random(num) < SHARE_NEW_USERS / SHARE_COLD)
    early = rng.integers(-200, 1, size=num)
    late = rng.integers(0, max(1, days - 1), size=num)
    created_day = np.where(rng.random(num) < np.where(cold, 0.5, 0.85), early, np.where(cold, late, late * 2 // 3))
    created_day[new] = days - 1
    return Users(
        category=ranked("category", 0.7, len(lore.TOP_CATEGORIES), 2),
        theme=ranked("theme", 0.5, len(lore.THEMES), 3),
        mood=taste("mood", 0.6, len(lore.MOODS)),
        era=taste("era", 0.6, len(lore.ERAS)),
        strictness=rng.choice(np.array([-1, 0, 1]), p=[0.25, 0.5, 0.25], size=num),
        region=taste("region", 0.5, len(lore.REGIONS)),
        age_band=taste("age_band", 0.5, len(lore.AGE_BANDS)),
        created_day=created_day,
        cold=cold,
    )


def _user_table(users: Users, user_ids: pa.Array, first_s: int, rng: np.random.Generator) -> pa.Table:
    """The user table: region, age band, sign-up statement and time of sign-up."""
    created_s = first_s + users.created_day * DAY_S + rng.integers(SIGN_UP_S, size=len(user_ids))
    return pa.table(
        {
            "user_id": user_ids,
            "region": _words(lore.REGIONS, users.region),
            "age_band": _words(lore.AGE_BANDS, users.age_band),
            "about": _about(users, rng),
            "created_at": timestamps(pa.array(created_s)),
        }
    )


def _words(vocabulary: tuple[str, ...] | list[str], indices: np.ndarray) -> pa.Array:
    """Words by index, string[n]."""
    return pa.array(list(vocabulary), pa.string()).take(pa.array(indices))


def _about(users: Users, rng: np.random.Generator) -> pa.Array:
    """Sign-up statements, string[n]: some of each user's tastes, in words that hint at themes without naming them."""
    num = len(users.mood)

    def sentences(phrases: list[str], indices: np.ndarray, share: np.ndarray | float) -> pa.Array:
        is_stated = rng.random(num) < share
        texts = [""] + [phrase[0].upper() + phrase[1:] + ". " for phrase in phrases]
        return _words(texts, np.where(is_stated, indices + 1, 0))

    def phrased(what: str, words: tuple[str, ...], indices: np.ndarray, share: float) -> pa.Array:
        patterns = lore.ABOUT[what]
        phrases = [pattern.format(word) for word in words for pattern in patterns]
        return sentences(phrases, indices * len(patterns) + rng.integers(len(patterns), size=num), share)

    def hint(theme: np.ndarray, share: float) -> pa.Array:
        cues = [cue for kind in lore.THEMES for cue in kind.cues]
        per_theme = len(lore.THEMES[0].cues)
        return sentences(cues, theme * per_theme + rng.integers(per_theme, size=num), share)

    strict = [*lore.ABOUT["strict"], *lore.ABOUT["generous"]]
    strict_index = np.where(users.strictness > 0, 0, len(lore.ABOUT["strict"])) + rng.integers(2, size=num)
    parts = [
        hint(users.theme[:, 0], 1.0),
        phrased("category", tuple(top.lower() for top in lore.TOP_CATEGORIES), users.category[:, 0], 0.85),
        phrased("mood", lore.MOODS, users.mood, 0.6),
        hint(users.theme[:, 1], 0.6),
        phrased("era", lore.ERAS, users.era, 0.4),
        sentences(strict, strict_index, np.where(users.strictness == 0, 0.0, 0.7)),
    ]
    return pc.utf8_rtrim_whitespace(pc.binary_join_element_wise(*parts, ""))


def _ids(prefix: str, numbers: np.ndarray) -> pa.Array:
    """Ids such as u0000012, string[n]."""
    return pa.array([f"{prefix}{number:07d}" for number in numbers.tolist()], pa.string())


def _item_table(catalogue: Catalogue, item_ids: pa.Array, first_s: int, seed: int) -> pa.Table:
    seconds = np.random.default_rng([seed, 3]).integers(SIGN_UP_S, size=len(catalogue.titles))
    paths = pa.array([list(path) for path in lore.CATEGORY_PATHS], pa.list_(pa.string()))
    return pa.table(
        {
            "item_id": item_ids,
            "title": pa.array(catalogue.titles, pa.string()),
            "category": paths.take(pa.array(catalogue.category)),
            "creator": pa.array(catalogue.creators, pa.string()),
            "era": _words(lore.ERAS, catalogue.era),
            "mood": _words(lore.MOODS, catalogue.mood),
            "created_at": timestamps(pa.array(first_s + catalogue.created_day * DAY_S + seconds)),
        }
    )


def _interaction_table(
    users: Users,
    user_ids: pa.Array,
    item_ids: pa.Array,
    catalogue: Catalogue,
    period: tuple[int, int, int],
    rng: np.random.Generator,
    num_asked: int,
    asked_rng: np.random.Generator,
) -> pa.Table:
    """Ratings of one chunk of users, ordered by user and time; a user rates an item once."""
    days, future_days, first_s = period
    user, day = _when(users, days, future_days, rng)
    item = _what(users, user, day, catalogue, days, rng)
    exists = catalogue.created_day[item] <= day
    user, day, item = user[exists], day[exists], item[exists]
    _, first = np.unique(user * np.int64(len(catalogue.titles)) + item, return_index=True)
    user, day, item = user[first], day[first], item[first]
    rating = _rating(users, user, item, catalogue, rng)
    when_s = first_s + day * DAY_S + rng.integers(SIGN_UP_S, DAY_S, size=len(user))
    if num_asked:
        raters, moments, items = _asked(users, num_asked, days, future_days, catalogue, asked_rng)
        seen = user * np.int64(len(catalogue.titles)) + item
        is_new = ~np.isin(raters * np.int64(len(catalogue.titles)) + items, seen)
        raters, items = raters[is_new], items[is_new]
        user, item = np.concatenate([user, raters]), np.concatenate([item, items])
        rating = np.concatenate([rating, _rating(users, raters, items, catalogue, asked_rng)])
        when_s = np.concatenate([when_s, first_s + moments[raters]])
    order = np.lexsort((item, when_s, user))
    return pa.table(
        {
            "user_id": user_ids.take(pa.array(user[order])),
            "item_id": item_ids.take(pa.array(item[order])),
            "timestamp": timestamps(pa.array(when_s[order])),
            "rating": pa.array(rating[order].astype("int32"), pa.int32()),
        }
    )


def _when(users: Users, days: int, future_days: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """User and day of each rating, int[n] each: first those before the last day, then those on it, then later ones."""
    num, last = len(users.cold), days - 1
    new = users.created_day == last
    num_before = np.where(
        users.cold, rng.integers(MAX_COLD_RATINGS + 1, size=num), np.clip(6 + rng.gamma(2.0, 9.0, size=num), 6, 48)
    ).astype(int)
    num_before[new] = 0
    active = ~new & ~users.cold & (rng.random(num) < SHARE_ACTIVE_LAST_DAY / (1 - SHARE_COLD))
    num_last = np.where(new, rng.integers(MAX_COLD_RATINGS + 1, size=num), active * rng.integers(1, 4, size=num))
    num_after = np.where(users.cold, 3, 1) + rng.poisson(np.where(users.cold, 3.0, 2.5), size=num)
    if future_days == 0:
        num_after[:] = 0
    before, on, after = (np.repeat(np.arange(num), counts) for counts in (num_before, num_last, num_after))
    since = np.minimum(np.maximum(users.created_day, 0), max(last - 1, 0))[before]
    day_before = since + np.floor(rng.random(len(before)) * (max(last, 1) - since)).astype(int)
    day_after = days + rng.integers(max(future_days, 1), size=len(after))
    return np.concatenate([before, on, after]), np.concatenate([day_before, np.full(len(on), last), day_after])


def _asked(
    users: Users, num_asked: int, days: int, future_days: int, catalogue: Catalogue, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """User of each requested rating, int[n]; each user's moment, in seconds since day 0; item of each, int[n]."""
    num = len(users.cold)
    moments = (days + rng.integers(future_days, size=num)) * DAY_S + rng.integers(SIGN_UP_S, DAY_S, size=num)
    user = np.repeat(np.arange(num), num_asked)
    item = _what(users, user, np.full(len(user), days), catalogue, days, rng)
    pairs = np.unique(user * np.int64(len(catalogue.titles)) + item)
    return pairs // len(catalogue.titles), moments, pairs % len(catalogue.titles)


def _what(
    users: Users, user: np.ndarray, day: np.ndarray, catalogue: Catalogue, days: int, rng: np.random.Generator
) -> np.ndarray:
    """Item of each rating, int[n]: from the user's categories and themes, from new items, or from all."""
    num_tops, num_themes = len(lore.TOP_CATEGORIES), len(lore.THEMES)
    by_top = WeightedGroups(catalogue.top, catalogue.popularity, num_tops)
    by_theme = WeightedGroups(catalogue.theme, catalogue.popularity, num_themes)
    by_new = WeightedGroups(np.where(catalogue.created_day == days - 1, 0, -1), catalogue.popularity, 1)
    reason = rng.choice(5, p=[0.36, 0.14, 0.16, 0.09, 0.25], size=len(user))
    item = by_top.draw(np.full(len(user), num_tops), rng)  # anything
    for index in (0, 1):
        item = np.where(reason == index, by_top.draw(users.category[user, index], rng), item)
        item = np.where(reason == 2 + index, by_theme.draw(users.theme[user, index], rng), item)
    news = (day >= days - 1) & (rng.random(len(user)) < 0.2)
    return np.where(news, by_new.draw(np.zeros(len(user), int), rng), item)


def _rating(
    users: Users, user: np.ndarray, item: np.ndarray, catalogue: Catalogue, rng: np.random.Generator
) -> np.ndarray:
    """Ratings 1 to 5: taste for theme, category, mood and era, the item's quality, the user's habit, and noise."""
    theme, undertone, top = catalogue.theme[item], catalogue.undertone[item], catalogue.top[item]
    likes = users.theme[user]
    score = 2.8 - 0.7 * users.strictness[user] + catalogue.quality[item]
    score += 1.3 * (theme == likes[:, 0]) + 0.9 * (theme == likes[:, 1]) - 1.1 * (theme == likes[:, 2])
    score += 0.4 * (undertone == likes[:, 0]) + 0.3 * (undertone == likes[:, 1]) - 0.3 * (undertone == likes[:, 2])
    score += 0.5 * (top == users.category[user, 0]) + 0.3 * (top == users.category[user, 1])
    score += 0.5 * (catalogue.mood[item] == users.mood[user]) + 0.3 * (catalogue.era[item] == users.era[user])
    return np.clip(np.rint(score + rng.normal(0.0, 0.75, size=len(user))), 1, 5)
