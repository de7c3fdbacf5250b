"""Chances of nodes to be in a batch equal the formula, and are near the counts of sampling."""

import pytest
import torch
from hypothesis import given, strategies as st

from benchmarks.features.hot_rows import make_skewed_graph
from pyg_direct import CSRTopo, GraphSageSampler, count_reads, expected_edge_reads, expected_reads
from pyg_direct.datasets import synthetic_graph
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.features.hot_rows import ListedRows, choose_hottest, count_listings, follow_chances
from tests.reference import expected as reference

edges = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=60)


@given(edges=edges, fanouts=st.lists(st.sampled_from([-1, 0, 1, 2, 5]), max_size=3), batch_size=st.integers(1, 9))
def test_matches_reference(device, edges, fanouts, batch_size):
    topo = CSRTopo(torch.tensor(edges, dtype=torch.int64).view(-1, 2).t(), num_nodes=12)
    seeds = torch.tensor([0, 3, 4, 7, 3])

    got = expected_reads(topo.indptr.to(device), topo.indices.to(device), seeds, fanouts, batch_size)

    wanted = reference.expected_reads(topo.indptr.tolist(), topo.indices.tolist(), seeds.tolist(), fanouts, batch_size)
    torch.testing.assert_close(got.cpu(), torch.tensor(wanted), atol=2e-5, rtol=1e-4)


@given(edges=edges, fanouts=st.lists(st.sampled_from([-1, 0, 1, 2, 5]), max_size=3), batch_size=st.integers(1, 9))
def test_chances_of_edges_match_the_reference(device, edges, fanouts, batch_size):
    topo = CSRTopo(torch.tensor(edges, dtype=torch.int64).view(-1, 2).t(), num_nodes=12)
    seeds, eid = torch.tensor([0, 3, 4, 7, 3]), torch.randperm(len(edges))

    got = expected_edge_reads(topo.indptr.to(device), topo.indices.to(device), seeds, fanouts, batch_size, eid)

    wanted = reference.expected_edge_reads(topo.indptr.tolist(), topo.indices.tolist(), eid.tolist(), seeds.tolist(),
                                           fanouts, batch_size)  # fmt: skip
    torch.testing.assert_close(got.cpu(), torch.tensor(wanted), atol=5e-5, rtol=1e-4)


@given(edges=edges, more=edges, replace=st.booleans(),
       fanouts=st.lists(st.tuples(*[st.sampled_from([-1, 0, 1, 2, 5])] * 2), max_size=3))  # fmt: skip
def test_chances_follow_several_relations(device, edges, more, fanouts, replace):
    # Five nodes of a type list the seven of another, which list all twelve.
    lists = []
    for number, (links, first, count) in enumerate([(edges, 0, 5), (more, 5, 7)]):
        kept = [(source if number else 5 + source % 7, target % count) for source, target in links]
        topo = CSRTopo(torch.tensor(kept, dtype=torch.int64).view(-1, 2).t(), num_nodes=12)
        lists.append((topo.indptr[: count + 1], topo.indices, first, [fanout[number] for fanout in fanouts]))
    chance = torch.rand(12)

    rows = [ListedRows(indptr.to(device), indices.to(device), slice(first, first + len(indptr) - 1), own)
            for indptr, indices, first, own in lists]  # fmt: skip
    got, _ = follow_chances(rows, chance.to(device), replace)

    wanted = reference.follow_chances([(indptr.tolist(), indices.tolist(), first, own)
                                       for indptr, indices, first, own in lists], chance.tolist(), replace)  # fmt: skip
    torch.testing.assert_close(got.cpu(), torch.tensor(wanted), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("eid", "error", "words"), [
    (torch.tensor([0]), ArgumentError, "eid must hold an id for each of the 2 edges, got 1"),
    (torch.tensor([0, 2]), IdError, r"eid must lie in \[0, 2\), got 2"),
    ([0, 1], ArgumentTypeError, "eid must be a tensor, got list"),
])  # fmt: skip
def test_what_are_no_ids_of_the_edges_is_refused(real_device, eid, error, words):
    topo = CSRTopo(torch.tensor([[0, 1], [1, 2]]), num_nodes=4)
    eid = eid if isinstance(eid, list) else eid.to(real_device)

    with pytest.raises(error, match=words):
        expected_edge_reads(topo.indptr.to(real_device), topo.indices.to(real_device), torch.tensor([0]), [2], 1, eid)


def test_it_ranks_nearly_as_well_as_hindsight():
    target = torch.randint(3000, (30_000,))
    topo = CSRTopo(torch.stack([(torch.rand(30_000) ** 3 * 3000).long(), target]), num_nodes=3000)
    train = torch.randperm(3000)[:1000]
    sampler = GraphSageSampler(topo, [5, 5], device="cpu", seed=0)
    reads = count_reads((sampler.sample(seeds)[0] for _ in range(5) for seeds in train.split(50)), 3000)

    scores = expected_reads(topo.indptr, topo.indices, train, [5, 5], 50)

    best = reads.sort(descending=True).values[:600].sum()
    assert reads[choose_hottest(scores, 3000, 600).ids].sum() >= 0.97 * best


@pytest.mark.parametrize("cached", [0.05, 0.2])
def test_of_few_training_nodes_it_serves_more_than_degrees(cached):
    draws = torch.Generator().manual_seed(1)
    topo = CSRTopo(make_skewed_graph(5000, 50_000), num_nodes=5000)
    train, count = torch.randperm(5000, generator=draws)[:150], int(cached * 5000)
    sampler = GraphSageSampler(topo, [10, 5], device="cpu", seed=0)
    reads = count_reads((sampler.sample(seeds)[0] for _ in range(5) for seeds in train.split(32)), 5000)

    chances, degrees = expected_reads(topo.indptr, topo.indices, train, [10, 5], 32), count_listings(topo, 5000)

    shares = [reads[choose_hottest(scores, 5000, count).ids].sum() / reads.sum() for scores in (chances, degrees)]
    assert shares[0] >= 1.1 * shares[1]


@pytest.mark.slow
@pytest.mark.parametrize("cached", [0.05, 0.2])
@pytest.mark.parametrize("name", ["skewed", "products"])
def test_on_graphs_of_both_kinds_it_ranks_nearly_as_well_as_hindsight(name, cached):
    if name == "skewed":
        num_nodes, fanouts = 20_000, [25, 10]
        topo = CSRTopo(make_skewed_graph(num_nodes, 200_000), num_nodes=num_nodes)
    else:
        graph, fanouts = synthetic_graph("products", scale=0.01, topology_only=True, device="cpu"), [15, 10, 5]
        num_nodes, topo = graph.num_nodes, CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
    train = torch.randperm(num_nodes)[: num_nodes // 10]
    sampler = GraphSageSampler(topo, fanouts, device="cpu", seed=0)
    reads = count_reads((sampler.sample(seeds)[0] for _ in range(8) for seeds in train.split(64)), num_nodes)
    count = int(cached * num_nodes)

    hottest = choose_hottest(expected_reads(topo.indptr, topo.indices, train, fanouts, 64), num_nodes, count).ids

    assert reads[hottest].sum() >= 0.97 * reads.sort(descending=True).values[:count].sum()


@pytest.mark.parametrize(("seeds", "fanouts", "batch_size", "error", "words"), [
    ([0], [2], 0, ArgumentError, "batch_size must be an integer of at least 1, got 0"),
    ([4], [2], 1, IdError, r"input_nodes must lie in \[0, 4\), got 4"),
    ([0], [-2], 1, ArgumentError, "num_neighbors must hold values of at least -1"),
])  # fmt: skip
def test_what_makes_no_sense_is_named(seeds, fanouts, batch_size, error, words):
    topo = CSRTopo(torch.tensor([[0, 1], [1, 2]]), num_nodes=4)

    with pytest.raises(error, match=words):
        expected_reads(topo.indptr, topo.indices, torch.tensor(seeds), fanouts, batch_size)


def test_without_seeds_nothing_is_read():
    topo = CSRTopo(torch.tensor([[0, 1], [1, 2]]), num_nodes=4)

    assert expected_reads(topo.indptr, topo.indices, torch.empty(0, dtype=torch.int64), [2], 1).tolist() == [0] * 4


@pytest.mark.parametrize(("indptr", "indices", "words"), [
    (torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1]), r"indptr must be int64 with shape \[N \+ 1\]"),
    (torch.empty(0, dtype=torch.int64), torch.tensor([0, 1]), r"indptr must be int64 with shape \[N \+ 1\]"),
    (torch.tensor([0, 1, 2]), torch.tensor([0.0, 1.0]), r"indices must be int32 or int64 with shape \[E\]"),
    (torch.tensor([0, 1, 2]), torch.tensor([[0, 1]]), r"indices must be int32 or int64 with shape \[E\]"),
])  # fmt: skip
def test_rows_of_other_kinds_are_refused(real_device, indptr, indices, words):
    with pytest.raises(ArgumentTypeError, match=words):
        expected_reads(indptr.to(real_device), indices.to(real_device), torch.tensor([0]), [2], 1)


@pytest.mark.gpu
def test_rows_in_two_places_are_refused():
    with pytest.raises(ArgumentError, match=r"indices must be on the device of indptr \(cuda:0\), got cpu"):
        expected_reads(torch.tensor([0, 1, 2], device="cuda"), torch.tensor([0, 1]), torch.tensor([0]), [2], 1)


@pytest.mark.parametrize(("indptr", "indices", "error", "words"), [
    ([0, 1, 2], [0, 2], IdError, r"indices must lie in \[0, 2\), got 2"),
    ([0, 1, 2], [0, -1], IdError, r"indices must lie in \[0, 2\), got -1"),
    ([0, 9, 2], [0, 1], ArgumentError, "indptr must not decrease, got 9 before 2"),
    ([0, 1, 3], [0, 1], ArgumentError, "indptr must run from 0 to the number of edges 2, got 0 to 3"),
])  # fmt: skip
def test_rows_that_list_no_nodes_are_refused(indptr, indices, error, words):
    with pytest.raises(error, match=words):
        expected_reads(torch.tensor(indptr), torch.tensor(indices), torch.tensor([0]), [2], 1)
