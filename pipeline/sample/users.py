"""Users of the sample world: latent tastes, and what a recommender is told of them.

The sign-up statement hints at tastes in words of the lore.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.sample.lore import ABOUT, AGE_BANDS, ERAS, MOODS, REGIONS, THEMES, TOP_CATEGORIES
from laserbatch.pipeline.tables.schema import timestamps

DAY_S = 86_400
SIGN_UP_S = 6 * 3_600  # users and items appear before six in the morning, ratings come after
NUM_ARCHETYPES = 12
SHARE_COLD = 0.3  # users with at most three ratings by the last day
SHARE_NEW_USERS = 0.04  # users who signed up on the last day


@dataclass(frozen=True)
class Users:
    """Latent tastes and known attributes of a chunk of users; every field int[n]."""

    category: np.ndarray  # (n, 2) favourite top-level categories
    theme: np.ndarray  # (n, 3) two liked themes, one disliked
    mood: np.ndarray
    era: np.ndarray
    strictness: np.ndarray  # -1 generous, 0, 1 strict
    region: np.ndarray
    age_band: np.ndarray
    created_day: np.ndarray
    cold: np.ndarray  # bool[n]


def draw_archetypes(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Kinds of user: attributes and tastes that tend to come together, each field int[NUM_ARCHETYPES, ...]."""
    sizes = {"mood": MOODS, "era": ERAS, "region": REGIONS, "age_band": AGE_BANDS}
    kinds = {name: rng.integers(len(values), size=NUM_ARCHETYPES) for name, values in sizes.items()}
    kinds["category"] = np.stack([rng.permutation(len(TOP_CATEGORIES))[:2] for _ in range(NUM_ARCHETYPES)])
    kinds["theme"] = np.stack([rng.permutation(len(THEMES))[:3] for _ in range(NUM_ARCHETYPES)])
    return kinds


def draw_users(num: int, days: int, archetypes: dict[str, np.ndarray], rng: np.random.Generator) -> Users:
    """Draw `num` users: mostly of their archetype, partly their own."""
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
        category=ranked("category", 0.7, len(TOP_CATEGORIES), 2),
        theme=ranked("theme", 0.5, len(THEMES), 3),
        mood=taste("mood", 0.6, len(MOODS)),
        era=taste("era", 0.6, len(ERAS)),
        strictness=rng.choice(np.array([-1, 0, 1]), p=[0.25, 0.5, 0.25], size=num),
        region=taste("region", 0.5, len(REGIONS)),
        age_band=taste("age_band", 0.5, len(AGE_BANDS)),
        created_day=created_day,
        cold=cold,
    )


def user_table(users: Users, user_ids: pa.Array, first_s: int, rng: np.random.Generator) -> pa.Table:
    """What is known of the users: region, age band, sign-up statement and time."""
    created_s = first_s + users.created_day * DAY_S + rng.integers(SIGN_UP_S, size=len(user_ids))
    return pa.table(
        {
            "user_id": user_ids,
            "region": words(REGIONS, users.region),
            "age_band": words(AGE_BANDS, users.age_band),
            "about": _about(users, rng),
            "created_at": timestamps(pa.array(created_s)),
        }
    )


def words(vocabulary: tuple[str, ...] | list[str], indices: np.ndarray) -> pa.Array:
    """Words by index, string[n]."""
    return pa.array(list(vocabulary), pa.string()).take(pa.array(indices))


def _about(users: Users, rng: np.random.Generator) -> pa.Array:
    """Sign-up statements, string[n]: some of each user's tastes, in words that hint at themes without naming them."""
    num = len(users.mood)

    def sentences(phrases: list[str], indices: np.ndarray, share: np.ndarray | float) -> pa.Array:
        is_stated = rng.random(num) < share
        texts = [""] + [phrase[0].upper() + phrase[1:] + ". " for phrase in phrases]
        return words(texts, np.where(is_stated, indices + 1, 0))

    def phrased(what: str, words: tuple[str, ...], indices: np.ndarray, share: float) -> pa.Array:
        patterns = ABOUT[what]
        phrases = [pattern.format(word) for word in words for pattern in patterns]
        return sentences(phrases, indices * len(patterns) + rng.integers(len(patterns), size=num), share)

    def hint(theme: np.ndarray, share: float) -> pa.Array:
        cues = [cue for kind in THEMES for cue in kind.cues]
        per_theme = len(THEMES[0].cues)
        return sentences(cues, theme * per_theme + rng.integers(per_theme, size=num), share)

    strict = [*ABOUT["strict"], *ABOUT["generous"]]
    strict_index = np.where(users.strictness > 0, 0, len(ABOUT["strict"])) + rng.integers(2, size=num)
    parts = [
        hint(users.theme[:, 0], 1.0),
        phrased("category", tuple(top.lower() for top in TOP_CATEGORIES), users.category[:, 0], 0.85),
        phrased("mood", MOODS, users.mood, 0.6),
        hint(users.theme[:, 1], 0.6),
        phrased("era", ERAS, users.era, 0.4),
        sentences(strict, strict_index, np.where(users.strictness == 0, 0.0, 0.7)),
    ]
    return pc.utf8_rtrim_whitespace(pc.binary_join_element_wise(*parts, ""))
