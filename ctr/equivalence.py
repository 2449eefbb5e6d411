"""Tests whether texts are as good as other texts: paired AUC differences under new users and new seeds, and a verdict.

Knows labels, users and scores of test rows, nothing of models. To first order, an AUC under resampled users is a sum
over users of weight times influence (the limit of the jackknife; for rows: DeLong et al. 1988), so that the variance of
a bootstrap over users is a sum of squares. Seeds are resampled together with users, like readers and cases in studies
with many readers (Obuchowski and Rockette 1995). Models are fixed; models with a smaller variance get more weight.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, stdtrit
from scipy.stats import rankdata

from laserbatch.ctr.metrics import MIN_ROWS_OF_A_SUBSET
from laserbatch.pipeline.storage.figures import CtrVerdict

ALL_MODELS = "all"
MIN_POWER = 0.8  # a comparison with this power is large enough
MAX_SEEDS_ADVISED = 50
MANY = 1e6  # degrees of freedom if nothing varies


@dataclass(frozen=True)
class PairedAuc:
    """One model trained on both texts from the same seeds, judged on the same rows."""

    differences: np.ndarray  # float64 (num_seeds,), AUC of the candidate minus that of the reference
    influence: np.ndarray  # float64 (num_seeds, num_users): to first order, what a user adds to the difference


def auc_influence(labels: np.ndarray, scores: np.ndarray) -> tuple[float, np.ndarray]:
    """AUC, and each row's influence on it, float64 (n,); the influences sum to zero.

    If rows have weights w, the AUC is, to first order, `auc + (w - 1) @ influence`. `labels` (n,) are 0 and 1.
    """
    is_positive = labels == 1
    num_positives, num_negatives = int(is_positive.sum()), int((~is_positive).sum())
    ranks, share = rankdata(scores), np.zeros(len(scores))
    # For each row, the share of rows of the other label that are ranked correctly against it; ties count half.
    share[is_positive] = (ranks[is_positive] - rankdata(scores[is_positive])) / num_negatives
    share[~is_positive] = 1 - (ranks[~is_positive] - rankdata(scores[~is_positive])) / num_positives
    auc = float(share[is_positive].mean())
    return auc, (share - auc) / np.where(is_positive, num_positives, num_negatives)


def pair(labels: np.ndarray, users: np.ndarray, candidate: np.ndarray, reference: np.ndarray) -> PairedAuc:
    """Pair two scores (num_seeds, n) of a model for the same rows and seeds; `users` int (n,) may be any numbers."""
    codes = np.unique(users, return_inverse=True)[1]
    differences, influence = [], []
    for of_candidate, of_reference in zip(candidate, reference, strict=True):
        auc, of_rows = auc_influence(labels, of_candidate)
        other_auc, of_other_rows = auc_influence(labels, of_reference)
        differences.append(auc - other_auc)
        influence.append(np.bincount(codes, weights=of_rows - of_other_rows))
    return PairedAuc(np.array(differences), np.stack(influence))


def compare_paired(
    pairs: Mapping[str, PairedAuc], num_rows: int, margin: float = 0.002, confidence: float = 0.95
) -> dict[str, CtrVerdict]:
    """A verdict for each model, and for "all" models together, weighted by their inverse variance.

    A verdict is "equivalent", "worse", "better" (than the reference, by more than `margin`) or "undecided", by the
    mean difference's interval over new users and seeds. A single seed has no interval, and neither have fewer than
    `MIN_ROWS_OF_A_SUBSET` test rows, whose AUC has so few values that all seeds may agree by chance. `num_rows` counts
    the test rows.
    """
    groups = {model: [of_model] for model, of_model in pairs.items()}
    if pairs:
        groups[ALL_MODELS] = list(pairs.values())
    return {name: _judged(group, _weights(group), num_rows, margin, confidence) for name, group in groups.items()}


@dataclass(frozen=True)
class _Spread:
    """The components of the variance of a weighted mean difference, for one seed and the given test rows."""

    seeds: np.ndarray  # (num_models,) the measured variance over seeds
    interaction: float  # the part of `seeds` that more test rows would lower: users differ in which seed suits them
    users: float  # the variance over users that all seeds share
    num_seeds: int
    num_users: int

    def variance(self, num_seeds: int | None = None, growth: float = 1.0) -> float:
        """The variance of the mean for another number of seeds, or for `growth` times as many users and test rows."""
        of_seeds = max(self.seeds.sum() - self.interaction, 0.0) + self.interaction / growth
        if growth == 1.0:
            of_seeds = self.seeds.sum()
        return of_seeds / (num_seeds or self.num_seeds) + self.users / growth

    def quantile(self, confidence: float, num_seeds: int | None = None) -> float:
        """The quantile of Student's t with Satterthwaite's degrees of freedom."""
        num_seeds = num_seeds or self.num_seeds
        parts = self.seeds / num_seeds
        uncertainty = (parts**2).sum() / (num_seeds - 1) + self.users**2 / max(self.num_users - 1, 1)
        df = (parts.sum() + self.users) ** 2 / uncertainty if uncertainty else MANY
        return float(stdtrit(df, (1 + confidence) / 2))


def _spread(pairs: list[PairedAuc], weights: np.ndarray) -> _Spread:
    num_seeds, num_users = pairs[0].influence.shape
    correction = num_users / max(num_users - 1, 1)
    seeds, interaction, mean = [], 0.0, np.zeros(num_users)
    for of_model, weight in zip(pairs, weights, strict=True):
        seeds.append(weight**2 * np.var(of_model.differences, ddof=1))
        of_all_seeds = of_model.influence.mean(axis=0)
        interaction += weight**2 * ((of_model.influence - of_all_seeds) ** 2).sum() * correction / (num_seeds - 1)
        mean += weight * of_all_seeds
    users = max((mean**2).sum() * correction - interaction / num_seeds, 0.0)
    return _Spread(np.array(seeds), interaction, users, num_seeds, num_users)


def _weights(pairs: list[PairedAuc]) -> np.ndarray:
    """The weight of each model, proportional to the inverse variance over users: (num_models,), summing to 1.

    Variances over seeds come from a handful of numbers: with weights from them, intervals covered 87 % instead of 95 %.
    """
    variances = np.array([(of_model.influence**2).sum() / len(of_model.influence) for of_model in pairs])
    inverse = 1 / np.maximum(variances, max(variances.max() * 1e-6, 1e-30))
    return inverse / inverse.sum()


def _judged(pairs: list[PairedAuc], weights: np.ndarray, num_rows: int, margin: float, confidence: float) -> CtrVerdict:
    mean = float(sum(weight * of_model.differences.mean() for of_model, weight in zip(pairs, weights, strict=True)))
    num_pairs, num_seeds = sum(len(of_model.differences) for of_model in pairs), len(pairs[0].differences)
    if num_seeds < 2 or num_rows < MIN_ROWS_OF_A_SUBSET:
        return CtrVerdict(num_pairs, mean, None, None, margin, confidence, "undecided")
    spread = _spread(pairs, weights)
    half_width = spread.quantile(confidence) * math.sqrt(spread.variance())
    low, high, verdict = mean - half_width, mean + half_width, "undecided"
    if -margin <= low and high <= margin:
        verdict = "equivalent"
    elif high < -margin:
        verdict = "worse"
    elif low > margin:
        verdict = "better"
    power, num_more = _power(spread, margin, confidence), _num_more(spread, num_rows, margin, confidence)
    return CtrVerdict(num_pairs, mean, low, high, margin, confidence, verdict, power, *num_more)


def _power(
    spread: _Spread, margin: float, confidence: float, num_seeds: int | None = None, growth: float = 1.0
) -> float:
    """The probability that texts without a true difference are called equivalent."""
    standard_error = math.sqrt(spread.variance(num_seeds, growth))
    if standard_error == 0:
        return 1.0
    room = margin / standard_error - spread.quantile(confidence, num_seeds)
    return max(0.0, 2 * float(ndtr(room)) - 1)


def _num_more(spread: _Spread, num_rows: int, margin: float, confidence: float) -> tuple[int | None, int | None]:
    """The number of seeds on the same test rows, and of test rows, that gives MIN_POWER; None if no tried number does.

    Up to MAX_SEEDS_ADVISED seeds are tried, and test rows of more users of the same kind.
    """

    def is_enough(num_seeds: int | None = None, growth: float = 1.0) -> bool:
        return _power(spread, margin, confidence, num_seeds, growth) >= MIN_POWER

    growths = (growth for growth in (2 ** np.arange(-3, 10, 0.25)).tolist() if is_enough(growth=growth))
    num_seeds = next(filter(is_enough, range(2, MAX_SEEDS_ADVISED + 1)), None)
    return num_seeds, next((math.ceil(num_rows * growth) for growth in growths), None)
