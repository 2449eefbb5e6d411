"""k-means over embeddings: seeded, one-threaded."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from laserbatch.retrieval_pools.routing import collaborative
from laserbatch.retrieval_pools.routing.collaborative import cluster_embeddings, default_num_groups


def _blobs(sizes, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.eye(len(sizes), 8, dtype=np.float32)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return centres[labels] + 0.05 * rng.standard_normal((len(labels), 8)).astype(np.float32), labels


def test_blobs_come_out():
    vectors, labels = _blobs([10, 40, 25])
    groups = cluster_embeddings(vectors, 3, seed=0)
    assert groups.dtype == np.int32
    assert adjusted_rand_score(labels, groups) == 1
    assert set(groups.tolist()) == {0, 1, 2}


def test_length_of_a_vector_does_not_matter():
    vectors, _ = _blobs([10, 40, 25])
    lengths = np.random.default_rng(1).uniform(0.1, 100, (len(vectors), 1)).astype(np.float32)
    np.testing.assert_array_equal(cluster_embeddings(vectors, 3, 0), cluster_embeddings(vectors * lengths, 3, 0))


def test_centres_of_a_large_side_come_from_a_sample(monkeypatch):
    monkeypatch.setattr(collaborative, "MAX_FIT_ROWS", 30)
    vectors, labels = _blobs([10, 40, 25])
    assert adjusted_rand_score(labels, cluster_embeddings(vectors, 3, seed=0)) == 1


@pytest.mark.parametrize("vectors", [np.zeros((0, 4)), np.zeros((3, 4)), np.ones((1, 4)), np.ones((5, 4))])
def test_fewer_distinct_vectors_than_groups(vectors):
    assert cluster_embeddings(vectors, 4, seed=0).tolist() == [0] * len(vectors)


@pytest.mark.parametrize(("num_entities", "num_groups"), [(0, 1), (1, 1), (943, 15), (1_000_000, 500)])
def test_default_number_of_groups(num_entities, num_groups):
    assert default_num_groups(num_entities) == num_groups
