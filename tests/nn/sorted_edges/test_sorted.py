"""Edges that are recognized as sorted, and their properties."""

import gc

import pytest
import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.nn import sorted_edges as module
from pyg_direct.nn.sorted_edges import find_batch, find_sorted, register_sorted

# Two seeds, then one new node, then one.
EDGES = torch.tensor([[1, 2, 2, 0, 3], [0, 0, 1, 2, 2]])
NODES, COUNTS = [2, 1, 1], [3, 2]


def make_edges(device="cpu"):
    edge_index = EDGES.to(device, copy=True)
    register_sorted(edge_index, NODES, COUNTS, max_degree=2)
    return edge_index


def test_registered_edges_have_offsets(device):
    edge_index = make_edges(device)

    edges = find_sorted(edge_index)

    assert edges.indptr.tolist() == [0, 2, 3, 5, 5]
    assert (edges.row.tolist(), edges.target.tolist()) == (EDGES[0].tolist(), EDGES[1].tolist())
    assert (edges.least_sources, edges.least_targets, edges.max_degree) == (4, 3, 2)


@pytest.mark.parametrize(("num_edges", "sources", "targets"), [(5, 4, 3), (4, 4, 3), (3, 3, 2), (1, 3, 2), (0, 2, 0)])
@pytest.mark.parametrize("first", [0, 3, 5])
def test_views_of_the_first_edges_are_recognised(device, num_edges, sources, targets, first):
    edge_index = make_edges(device)
    find_sorted(edge_index[:, :first])

    edges = find_sorted(edge_index.narrow(1, 0, num_edges))

    assert edges.indptr.clamp(max=num_edges).tolist() == [min(n, num_edges) for n in [0, 2, 3, 5, 5]]
    assert edges.row.tolist() == EDGES[0, :num_edges].tolist()
    assert (edges.least_sources, edges.least_targets) == (sources, targets)


@pytest.mark.parametrize("change", [
    lambda e: e.clone(), lambda e: e.flip(0), lambda e: e[:, 1:], lambda e: e[:, ::2], lambda e: e[0], lambda e: e.t(),
    lambda e: e[:1], lambda e: e.add_(0), lambda e: e[:, :3].fill_(0), lambda e: e.to(torch.int32),
    lambda e: e.view(torch.float64), lambda e: torch.nn.Parameter(e, requires_grad=False),
], ids=["copy", "flip", "last", "strided", "row", "transposed", "one row", "written", "part written", "int32", "floats",
        "subclass"])  # fmt: skip
def test_other_tensors_are_not_recognised(device, change):
    edge_index = make_edges(device)

    assert find_sorted(edge_index) is not None
    assert find_sorted(change(edge_index)) is None


def test_memory_that_is_used_again_is_not_recognised():
    memory = EDGES.numpy().copy()
    edge_index = torch.from_numpy(memory)
    register_sorted(edge_index, NODES, COUNTS)
    del edge_index

    again = torch.from_numpy(memory)

    assert find_sorted(again) is None


WRITES = {
    "numpy, unsorted": lambda e: e.numpy().__setitem__((slice(None), slice(0, 3)), e.numpy()[:, [2, 1, 0]]),
    "numpy, sources alone": lambda e: e.numpy().__setitem__((0, 1), 1),
    "data": lambda e: e.data.__setitem__((0, 0), 2),
    "numpy, out of range": lambda e: e.numpy().__setitem__((0, 0), 4),
    "numpy, negative": lambda e: e.numpy().__setitem__((0, 0), -1),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("num_edges", [5, 2])
def test_writes_that_leave_no_trace_are_seen_on_a_cpu(write, num_edges):
    edge_index = make_edges()
    view = edge_index[:, :num_edges]

    assert find_sorted(view) is not None
    WRITES[write](edge_index)

    assert find_sorted(view) is None
    assert find_sorted(edge_index) is None


@pytest.mark.parametrize("write", ["numpy, unsorted", "numpy, out of range", "numpy, negative"])
def test_what_a_loader_told_is_checked_before_it_is_used_on_a_cpu(write):
    edge_index = make_edges()

    WRITES[write](edge_index)

    assert find_sorted(edge_index) is None
    assert find_sorted(edge_index[:, :3]) is None


def test_a_view_is_not_known_once_another_part_was_written_to_unseen():
    edge_index = make_edges()
    find_sorted(edge_index).indptr.tolist()

    # Sorted still, but with other offsets.
    edge_index.numpy()[1, 1] = 1

    assert find_sorted(edge_index[:, :4]) is None


def test_batches_are_forgotten_with_their_edges():
    gc.collect()
    edge_index = make_edges()
    view, alive = edge_index[:, :3], sum(not batch.storage.expired() for batch in module._BATCHES.values())
    del edge_index

    for _ in range(100):
        make_edges()

    assert find_sorted(view) is not None
    assert len(module._BATCHES) <= 2 * alive + 2


def test_offsets_are_made_once(device):
    edge_index = make_edges(device)

    first, second = find_sorted(edge_index), find_sorted(edge_index[:, :3])

    assert second.indptr is first.indptr


def test_edges_made_in_inference_mode_are_not_recognised():
    with torch.inference_mode():
        edge_index = make_edges()

        assert find_sorted(edge_index) is None


def test_loops_are_made_once(device):
    edge_index = make_edges(device)
    batch = find_batch(edge_index)

    first, weight = batch.add_loops(edge_index, 4, torch.float32)
    second, again = batch.add_loops(edge_index, 4, torch.float32)

    assert (second.row.data_ptr(), again.data_ptr()) == (first.row.data_ptr(), weight.data_ptr())
    assert (first.least_sources, first.least_targets, first.max_degree) == (4, 4, 3)


@pytest.mark.parametrize(("nodes", "edges"), [([2, 1], [3, 2]), ([2, 1, 1], [3, 1])])
def test_numbers_that_do_not_fit_are_refused(nodes, edges):
    with pytest.raises(ArgumentError, match=r"num_sampled_nodes must have one item more .* the 5 edges"):
        register_sorted(EDGES.clone(), nodes, edges)


def make_relations():
    """Make pairs in one block of memory: the second relation has none, the others as many as the hops say."""
    edges = {("a", "r", "b"): [2, 1], ("b", "s", "a"): [0, 0], ("a", "t", "a"): [1, 3]}
    nodes = {"a": [2, 2, 1], "b": [1, 3, 0]}
    memory = torch.zeros(2 * (3 + 1 + 4), dtype=torch.int64)
    parts = torch.unsafe_split_with_sizes(memory, [6, 2, 8])
    pairs = dict(zip(edges, (parts[0].view(2, 3), parts[1][:0].view(2, 0), parts[2].view(2, 4)), strict=True))
    return pairs, nodes, edges


def test_relations_that_share_memory_are_known_each():
    pairs, nodes, edges = make_relations()

    module.register_relations(pairs, nodes, edges, max_degree=3)

    for kind, pair in pairs.items():
        batch = find_batch(pair)
        view = batch.view(pair)
        assert (batch.shape, view.max_degree) == (pair.shape, 3)
        assert view.indptr.numel() == sum(nodes[kind[-1]]) + 1
        assert batch.fits(pair, sum(nodes[kind[0]]), sum(nodes[kind[-1]]))
        assert find_batch(pair) is batch
        assert find_batch(pair.clone()) is None
    edges = find_sorted(pairs["a", "t", "a"][:, :1])
    assert (edges.least_sources, edges.least_targets) == (4, 2)


def test_batches_that_share_memory_are_known_each():
    first, nodes, edges = make_relations()
    sizes = [pair.numel() or 2 for pair in first.values()]
    memory = torch.zeros(2 * sum(sizes), dtype=torch.int64)
    parts = iter(torch.unsafe_split_with_sizes(memory, sizes * 2))
    batches = [{kind: next(parts)[: pair.numel()].view(2, -1) for kind, pair in first.items()} for _ in range(2)]

    # The first again, as of a batch that is made twice.
    for pairs in (*batches, batches[0]):
        module.register_relations(pairs, nodes, edges, max_degree=3)

    for pairs in batches:
        assert all(find_batch(pair).shape == pair.shape for pair in pairs.values())
    batches[1]["a", "r", "b"].add_(1)
    assert find_batch(batches[1]["a", "r", "b"]) is None
    assert find_batch(batches[0]["a", "r", "b"]) is not None


def test_a_write_makes_one_relation_unknown():
    pairs, nodes, edges = make_relations()
    module.register_relations(pairs, nodes, edges)

    pairs["a", "r", "b"].add_(1)

    assert find_batch(pairs["a", "r", "b"]) is None
    assert find_batch(pairs["a", "t", "a"]) is not None


def test_a_write_to_a_relation_is_seen_on_a_cpu():
    pairs, nodes, edges = make_relations()
    module.register_relations(pairs, nodes, edges)

    pairs["a", "t", "a"].numpy()[1, 0] = 2
    assert find_batch(pairs["a", "t", "a"]) is None
    assert find_batch(pairs["a", "r", "b"]) is not None


def test_counts_that_a_program_changes_later_are_not_taken():
    pairs, nodes, edges = make_relations()
    module.register_relations(pairs, nodes, edges)

    edges["a", "r", "b"].pop()
    nodes["b"][0] = 7

    assert find_batch(pairs["a", "t", "a"]).shape == (2, 4)
    assert find_batch(pairs["a", "r", "b"]).fits(pairs["a", "r", "b"], 5, 4)


def test_relations_are_forgotten_with_their_edges():
    for _ in range(100):
        pairs, nodes, edges = make_relations()
        module.register_relations(pairs, nodes, edges)
        assert find_batch(pairs["a", "t", "a"]) is not None
        del pairs

    assert len(module._RELATIONS) <= 2 * sum(not r.storage.expired() for r in module._RELATIONS.values()) + 3
