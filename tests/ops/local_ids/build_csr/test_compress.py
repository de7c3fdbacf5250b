import pytest
import torch
from hypothesis import given

from pyg_direct.compiler.jit import get_cpu_threads, set_cpu_threads
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, MemoryLimitError
from pyg_direct.ops.local_ids import build_csr as compress_module
from pyg_direct.ops.local_ids.build_csr import compress
from tests.graphs import GRAPHS, make_random_graph, odd_graphs
from tests.poison import poisoned_memory
from tests.reference import compress as reference


def check_against_reference(graph, device):
    """Check that all arrays equal the reference."""
    rows, columns = graph.edge_index.to(device).flip(0)
    indptr, indices, edge_ids = reference.compress(rows.tolist(), columns.tolist(), graph.num_nodes)

    with poisoned_memory():
        got = compress(rows, columns, graph.num_nodes)

    assert got.indptr.tolist() == indptr
    assert got.indices.tolist() == indices
    assert got.edge_ids.tolist() == edge_ids
    assert [array.dtype for array in got] == [torch.int64, torch.int32, torch.int32]
    assert {array.device for array in got} == {rows.device}


@pytest.mark.parametrize("name", GRAPHS)
def test_matches_reference(device, name):
    check_against_reference(GRAPHS[name], device)


@given(graph=odd_graphs())
def test_matches_reference_on_any_graph(device, graph):
    check_against_reference(graph, device)


def test_rows_do_not_depend_on_threads():
    graph = make_random_graph(300, 5000)
    before = set_cpu_threads(1)

    alone = compress(*graph.edge_index, graph.num_nodes)
    set_cpu_threads(before)
    together = compress(*graph.edge_index, graph.num_nodes)

    assert get_cpu_threads() == before
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_many_edges_are_numbered_in_64_bits(device, monkeypatch):
    monkeypatch.setattr(compress_module, "_MOST", 100)
    graph = GRAPHS["random"]
    rows, columns = graph.edge_index.to(device).flip(0)
    assert graph.num_nodes < 100 <= rows.numel()

    got = compress(rows, columns, graph.num_nodes)

    indptr, indices, edge_ids = reference.compress(rows.tolist(), columns.tolist(), graph.num_nodes)
    assert [array.dtype for array in got] == [torch.int64, torch.int32, torch.int64]
    assert [array.tolist() for array in got] == [indptr, indices, edge_ids]
    offsets, order = compress_module.order_rows(rows.cpu(), graph.num_nodes)
    assert (order.dtype, order.tolist(), offsets.tolist()) == (torch.int64, edge_ids, indptr)


def test_more_nodes_than_memory_holds_are_refused_before_any_is_touched(monkeypatch):
    # As on a system that overcommits memory.
    monkeypatch.setattr(compress_module.torch, "empty", lambda *args, **options: pytest.fail("allocated"))
    rows, columns = torch.tensor([10**12, 0]), torch.tensor([0, 1])

    with pytest.raises(MemoryLimitError, match=r"num_nodes must be at most \d+, .* got 1000000000001: nodes are"):
        compress(rows, columns, 10**12 + 1)


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_pieces_that_a_gpu_sorts_apart_are_one_list(device, monkeypatch, size):
    monkeypatch.setattr(compress_module, "_SORTED", size)
    for graph in (GRAPHS["random"], make_random_graph(5, 20), make_random_graph(3, 0)):
        rows, columns = (ids[:200] for ids in graph.edge_index.to(device).flip(0))

        # Operations of torch alone, which a CPU does too.
        got = compress_module._compress_on_gpu(rows, columns, graph.num_nodes, torch.int32, torch.int64)

        assert [array.dtype for array in got] == [torch.int64, torch.int32, torch.int64]
        expected = reference.compress(rows.tolist(), columns.tolist(), graph.num_nodes)
        assert [array.tolist() for array in got] == list(expected)


def test_swapped_arguments_give_the_transpose(device):
    sources, targets = GRAPHS["random"].edge_index.to(device)

    got = compress(sources, targets, 70)

    assert got.indptr.diff().tolist() == torch.bincount(sources, minlength=70).tolist()
    assert torch.equal(targets[got.edge_ids], got.indices.long())


@pytest.mark.parametrize(("rows", "columns", "error", "words"), [
    ([0, 5], [0, 0], IdError, r"rows must lie in \[0, 5\) \(num_nodes\), got 5"),
    ([0, 1], [0, -1], IdError, r"columns must lie in \[0, 5\) \(num_nodes\), got -1"),
    ([0.5], [0], ArgumentTypeError, "rows must have dtype int64 or int32, got torch.float32"),
    ([0], [True], ArgumentTypeError, "columns must have dtype int64 or int32, got torch.bool"),
    ([0, 1], [0], ArgumentError, r"columns must have shape \[E\] = \(2,\), got \(1,\)"),
    ([[0]], [[0]], ArgumentError, r"rows must have shape \[E\]"),
])  # fmt: skip
def test_bad_edges_are_refused(device, rows, columns, error, words):
    edges = [torch.tensor(values, device=device) for values in (rows, columns)]

    with pytest.raises(error, match=words):
        compress(*edges, 5)


@pytest.mark.gpu
def test_edges_on_two_devices_are_refused():
    ids = torch.tensor([0])

    with pytest.raises(ArgumentError, match=r"columns must be on the device of rows \(cpu\), got cuda:0"):
        compress(ids, ids.cuda(), 1)
