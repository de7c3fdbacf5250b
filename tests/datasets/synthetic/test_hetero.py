"""The graph of IGBH's shape: sizes, degrees, and classes that features and neighbors carry."""

import pytest
import torch

from pyg_direct.datasets.synthetic import NODES, RELATIONS, synthetic_igbh
from pyg_direct.errors import ArgumentError


@pytest.fixture(scope="module")
def graph():
    return synthetic_igbh(1e-4, num_features=16, num_classes=7, feature_signal=4.0)


def test_sizes_are_the_published_ones_times_the_scale(graph):
    assert {kind: graph[kind].num_nodes for kind in graph.node_types} == {
        kind: max(1, int(count * 1e-4)) for kind, count in NODES.items()}  # fmt: skip
    assert len(graph.edge_types) == 11
    for source, name, target, count, source_hub, _, is_reversed in RELATIONS:
        edges = graph[source, name, target].edge_index
        expected = min(int(count * 1e-4), graph[source].num_nodes) if source_hub == 0 else int(count * 1e-4)
        assert edges.shape == (2, expected)
        assert int(edges.min()) >= 0
        assert int(edges[0].max()) < graph[source].num_nodes
        assert int(edges[1].max()) < graph[target].num_nodes
        if is_reversed:
            assert torch.equal(graph[target, f"rev_{name}", source].edge_index, edges.flip(0))


def test_degrees_are_skewed_and_a_paper_has_one_journal(graph):
    cited = graph["paper", "cites", "paper"].edge_index[1].bincount()
    journals = graph["paper", "published", "journal"].edge_index[0].bincount()

    assert cited.max() > 50 * cited.float().mean()
    assert journals.max() == 1


def test_neighbors_are_mostly_of_the_same_class(graph):
    y, (source, target) = graph["paper"].y, graph["paper", "cites", "paper"].edge_index
    alike = (y[source] == y[target]).float().mean()
    at_random = (y.bincount().double() / len(y)).square().sum()

    assert float(alike) > 0.5 + 0.4 * float(at_random)


def test_features_tell_most_of_a_class_apart(graph):
    x, y = graph["paper"].x.float(), graph["paper"].y
    centroids = torch.stack([x[y == c].mean(0) for c in range(7)])

    guess = torch.cdist(x, centroids).argmin(1)

    assert 0.5 < float((guess == y).float().mean()) < 0.999


def test_equal_seeds_give_equal_graphs_and_others_do_not(graph):
    again, other = (synthetic_igbh(1e-4, num_features=16, num_classes=7, seed=seed) for seed in (0, 1))

    assert all(torch.equal(graph[kind].edge_index, again[kind].edge_index) for kind in graph.edge_types)
    assert all(torch.equal(graph[kind].x, again[kind].x) for kind in graph.node_types)
    assert not torch.equal(graph["paper"].x, other["paper"].x)
    assert not torch.equal(graph["author"].x[:100], graph["paper"].x[:100])


def test_rows_may_take_eight_bits_or_be_left_out():
    narrow = synthetic_igbh(1e-6, num_features=8, dtype=torch.float8_e4m3fn)

    assert narrow["author"].x.dtype == torch.float8_e4m3fn
    assert "x" not in synthetic_igbh(1e-6, topology_only=True)["author"]


def test_wrong_values_are_named():
    with pytest.raises(ArgumentError, match="homophily"):
        synthetic_igbh(1e-6, homophily=2.0)
