"""Negative edges of whole graphs and of batches: what PyG's functions promise, drawn where the edges lie."""

import pytest
import torch
from torch_geometric.utils import batched_negative_sampling, negative_sampling, to_undirected

from pyg_direct.sampling import negative_links
from pyg_direct.sampling.negative_links import sample_batched_negative_edges, sample_negative_edges

SIZES = (8, 9, 5, 20, 7, 50)


def draw_edges(num_sources, num_edges, num_targets=None):
    ends = [torch.randint(count, (num_edges,)) for count in (num_sources, num_targets or num_sources)]
    return torch.stack(ends)


def make_batch(is_undirected):
    """Edges of graphs of several sizes, and the graph of each node."""
    parts, first = [], 0
    for size in SIZES:
        edges = draw_edges(size, 2 * size)
        parts.append((to_undirected(edges) if is_undirected else edges) + first)
        first += size
    return torch.cat(parts, 1), torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))


def list_pairs(edges):
    return list(map(tuple, edges.t().tolist()))


def assert_negative(found, edge_index):
    pairs = list_pairs(found)
    assert found.dtype == torch.int64
    assert len(set(pairs)) == len(pairs)
    assert not set(pairs) & set(list_pairs(edge_index))


@pytest.mark.parametrize("num_nodes", [None, 40, (30, 35)])
@pytest.mark.parametrize("requested", [None, 2, 0.5, 300, 5000])
@pytest.mark.parametrize("method", ["sparse", "dense"])
def test_as_many_as_from_pyg_and_none_is_an_edge(device, num_nodes, requested, method):
    edges = draw_edges(30, 100)

    found = sample_negative_edges(edges.to(device), num_nodes, requested, method)

    assert found.device.type == device.type
    assert_negative(found, edges)
    assert found.shape == negative_sampling(edges, num_nodes, requested, method).shape
    if not isinstance(num_nodes, tuple):
        assert (found[0] != found[1]).all()


@pytest.mark.parametrize("requested", [None, 4, 0.5, 5000])
def test_undirected_ones_go_both_ways(device, requested):
    edges = to_undirected(draw_edges(30, 60))

    found = sample_negative_edges(edges.to(device), 30, requested, force_undirected=True)

    assert_negative(found, edges)
    half = found.shape[1] // 2
    assert torch.equal(found[:, :half], found[:, half:].flip(0))
    assert found.shape == negative_sampling(edges, 30, requested, force_undirected=True).shape


def test_a_pair_whose_reverse_is_an_edge_is_no_undirected_negative(device):
    # Each edge goes from a higher to a lower id, and PyG looks only at the other direction.
    edges = torch.tensor([[2, 3, 3], [0, 0, 1]], device=device)

    found = sample_negative_edges(edges, 4, 100, force_undirected=True)

    assert sorted(list_pairs(found)) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]


@pytest.mark.parametrize(("num_nodes", "undirected"), [(5, False), (5, True), ((5, 5), False)])
def test_a_complete_graph_has_none(device, num_nodes, undirected):
    edges = torch.cartesian_prod(torch.arange(5), torch.arange(5)).t()

    assert sample_negative_edges(edges.to(device), num_nodes, 7, force_undirected=undirected).shape == (2, 0)
    assert negative_sampling(edges, num_nodes, 7, force_undirected=undirected).shape == (2, 0)


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_tiny_graphs_have_what_there_is(device, num_nodes):
    edges = torch.tensor([[0], [num_nodes - 1]])

    found = sample_negative_edges(edges.to(device), num_nodes, 9)

    assert_negative(found, edges)
    assert found.shape == negative_sampling(edges, num_nodes, 9).shape


def test_a_graph_without_edges_or_requests(device):
    none = torch.empty(2, 0, dtype=torch.int64, device=device)

    assert sample_negative_edges(none, 4).shape == (2, 0)
    assert sample_negative_edges(none, 4, 0).shape == (2, 0)
    assert sorted(list_pairs(sample_negative_edges(none, 2, 9))) == [(0, 1), (1, 0)]
    assert sample_batched_negative_edges(none, torch.zeros(3, dtype=torch.int64, device=device)).shape == (2, 0)


def test_parallel_edges_count_as_in_pyg(device):
    for count in (1, 2, 3):
        edges = torch.tensor([[0], [1]]).repeat(1, 2 * count)
        expected = negative_sampling(edges, 3, 100)

        assert sample_negative_edges(edges.to(device), 3, 100).shape == expected.shape


def test_most_of_a_nearly_complete_graph_is_found(device):
    # 4 of 40,000 pairs are left: draws alone would miss them.
    pairs = torch.cartesian_prod(torch.arange(200), torch.arange(200)).t()
    left = torch.tensor([17, 4000, 20_123, 39_999])
    edges = pairs[:, ~torch.isin(torch.arange(40_000), left)]

    found = sample_negative_edges(edges.to(device), (200, 200), 10)

    assert sorted(list_pairs(found)) == list_pairs(pairs[:, left])


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("num_nodes", [6, (5, 6)])
@pytest.mark.parametrize("below", [8, 0])
def test_each_negative_is_drawn_as_often(device, monkeypatch, undirected, num_nodes, below):
    # With 0 pairs are drawn one by one, however few there are.
    monkeypatch.setattr(negative_links, "_LIST_BELOW", below)
    edges = to_undirected(torch.tensor([[0, 1, 2, 2], [1, 3, 4, 2]]))
    counts = torch.zeros(6, 6)

    for _ in range(600):
        for row, col in list_pairs(sample_negative_edges(edges.to(device), num_nodes, 4, force_undirected=undirected)):
            counts[row, col] += 1

    drawn = counts[counts > 0]
    assert drawn.numel() == (30 - 7 if isinstance(num_nodes, tuple) else 30 - 6)
    assert drawn.sum() == 2400
    # Five standard deviations of a binomial count.
    expected = 2400 / drawn.numel()
    assert (drawn - expected).abs().max() < 5 * expected**0.5


def test_a_second_round_fills_up_what_is_missing(device, monkeypatch):
    monkeypatch.setattr(negative_links, "_LIST_BELOW", 0)
    monkeypatch.setattr(negative_links, "_SPARE", 0)
    monkeypatch.setattr(negative_links, "_EXCESS", 0.1)
    edges = draw_edges(30, 100)

    found = sample_negative_edges(edges.to(device), 30, 500)

    assert found.shape == (2, 500)
    assert_negative(found, edges)


def test_a_seed_repeats_them_and_no_seed_does_not(device):
    edges = draw_edges(300, 1000).to(device)
    before = edges.clone()

    def draw(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        return sample_negative_edges(edges, 300)

    first, second, again = draw(3), draw(), draw(3)

    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(edges, before)


def test_ids_of_many_nodes_fit(device):
    # 4.6e18 pairs, below 2**62; undirected ones need roots of such numbers.
    edges = draw_edges(2**31, 50).to(device)

    for undirected in (False, True):
        found = sample_negative_edges(edges, 2**31, 1000, force_undirected=undirected)
        assert found.shape == (2, 1000)
        assert (found >= 0).all()
        assert (found < 2**31).all()
        assert (found[0] != found[1]).all()
        assert float(found.double().mean() / 2**30) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("requested", [None, 2.5, 20, 4000])
def test_graphs_of_a_batch_have_as_many_as_from_pyg(device, undirected, requested):
    edges, batch = make_batch(undirected)

    found = sample_batched_negative_edges(edges.to(device), batch.to(device), requested, force_undirected=undirected)

    expected = batched_negative_sampling(edges, batch, requested, force_undirected=undirected)
    assert_negative(found, edges)
    graphs = batch[found.cpu()]
    assert torch.equal(graphs[0], graphs[1])
    assert torch.equal(graphs[0], batch[expected[0]])


def test_graphs_of_two_types_of_nodes(device):
    sources, targets = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    edges = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])

    found = sample_batched_negative_edges(edges.to(device), (sources.to(device), targets.to(device)))

    assert_negative(found, edges)
    assert torch.equal(sources[found[0].cpu()], targets[found[1].cpu()])
    assert torch.bincount(sources[found[0].cpu()]).tolist() == [4, 4, 4]


def test_graphs_of_a_batch_without_edges_or_pairs(device):
    # One node, no edge, and a last graph without edges, which PyG passes over.
    batch = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3, 3])
    edges = torch.tensor([[0, 4], [0, 5]])

    found = sample_batched_negative_edges(edges.to(device), batch.to(device), 4)

    assert torch.bincount(batch[found[0].cpu()], minlength=4).tolist() == [0, 4, 4, 0]
    assert_negative(found, edges)
