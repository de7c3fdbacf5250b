"""Gradients of reductions: equal to the reference, right by finite differences, also second ones; unused ones are not
computed.
"""

import pytest
import torch

from pyg_direct.errors import IdError
from pyg_direct.ops.aggregate import operators
from pyg_direct.ops.aggregate.sum_rows import REDUCES, Transposed, aggregate
from tests.aggregates import NUM_ROWS, NUM_TARGETS, Graph, assert_near, hub_edges, make_rows
from tests.poison import poisoned_memory
from tests.reference import aggregate as reference


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hub", [False, True], ids=["even", "hub"])
def test_gradients_match_reference(device, reduce, deterministic, hub):
    graph, x = Graph(device, hub_edges() if hub else 40, hub), make_rows(8, device=device).requires_grad_()
    grad = make_rows(8, device=device, num_rows=NUM_TARGETS)
    expected = reference.gradient(
        grad.cpu().double().numpy(), x.detach().cpu().double().numpy(), *graph.numpy(), reduce
    )

    with poisoned_memory():
        aggregate(x, graph.indptr, graph.row, reduce=reduce, deterministic=deterministic).backward(grad)

    assert_near(x.grad / len(graph.row), expected / len(graph.row))


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("hub", [False, True], ids=["even", "hub"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_many_rows_are_sums_by_source(device, reduce, hub, heads, monkeypatch):
    compare_sums_by_source(device, 12, reduce, hub, torch.float32, heads, monkeypatch)


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hub", [False, True], ids=["even", "hub"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_many_wide_rows_are_sums_by_source(real_device, reduce, hub, dtype, heads, monkeypatch):
    compare_sums_by_source(real_device, 32, reduce, hub, dtype, heads, monkeypatch)


def compare_sums_by_source(device, width, reduce, hub, dtype, heads, monkeypatch):
    monkeypatch.setattr(operators, "GATHERED_BYTES", 0)
    graph = Graph(device, hub_edges() if hub else 40, hub)
    num_edges = graph.row.numel()
    x = make_rows(width, dtype, device).requires_grad_()
    grad = make_rows(width, dtype, device, NUM_TARGETS)
    weight = None if heads is None else torch.rand(num_edges, heads, device=device)
    values = [None if t is None else t.detach().cpu().double().numpy() for t in (grad, x, weight)]
    expected = reference.gradient(*values[:2], *graph.numpy(), reduce, values[2])

    with poisoned_memory():
        aggregate(x, graph.indptr, graph.row, reduce=reduce, weight=weight, deterministic=False).backward(grad)

    # Rounded once at the end, but the rounded number grows with the hub.
    scale = max(1, abs(expected).max())
    assert_near(x.grad / scale, expected / scale, dtype)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_weights_match_reference(device, reduce):
    compare_weights(device, reduce, torch.float32, 12, 4)


@pytest.mark.parametrize(("width", "heads"), [(32, 1), (32, 4), (160, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_weights_of_wide_rows_match_reference(real_device, reduce, dtype, width, heads):
    compare_weights(real_device, reduce, dtype, width, heads)


def compare_weights(device, reduce, dtype, width, heads):
    graph = Graph(device, 41)
    x, weight = make_rows(width, dtype, device), torch.rand(41, heads, device=device).to(dtype).requires_grad_()
    grad = make_rows(width, dtype, device, NUM_TARGETS)
    values = [t.detach().cpu().double().numpy() for t in (grad, x, weight)]

    aggregate(x, graph.indptr, graph.row, reduce=reduce, weight=weight).backward(grad)

    expected = reference.weight_gradient(*values[:2], *graph.numpy(), reduce, values[2])
    assert_near(weight.grad, expected, dtype)


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradcheck(reduce):
    graph = Graph()
    # Neither equals, which leave a maximum without a derivative, nor zero, which torch counts twice.
    x = (1 + torch.randperm(NUM_ROWS * 4)).view(NUM_ROWS, 4).double().requires_grad_()

    def compute(t):
        return aggregate(t, graph.indptr, graph.row, reduce=reduce)

    assert torch.autograd.gradcheck(compute, (x,))
    assert torch.autograd.gradgradcheck(lambda t: compute(t).square(), (x,))


@pytest.mark.parametrize("row", ["sources", "edges"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradcheck_of_weights(reduce, row):
    graph = Graph()
    x = torch.rand(NUM_ROWS if row == "sources" else 40, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(40, 2, dtype=torch.float64, requires_grad=True)
    row = graph.row if row == "sources" else None

    def compute(t, w):
        return aggregate(t, graph.indptr, row, reduce=reduce, weight=w)

    assert torch.autograd.gradcheck(compute, (x, weight))
    assert torch.autograd.gradgradcheck(compute, (x, weight))


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("row", ["sources", "edges"])
def test_gradients_with_a_graph_are_those_without(device, reduce, row):
    graph = Graph(device)
    x = make_rows(8, device=device, num_rows=NUM_ROWS if row == "sources" else 40).requires_grad_()
    out = aggregate(x, graph.indptr, graph.row if row == "sources" else None, reduce=reduce)
    grad = torch.rand_like(out)

    (expected,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    (got,) = torch.autograd.grad(out, x, grad, create_graph=True)

    torch.testing.assert_close(got, expected)


def test_nothing_is_computed_for_inputs_without_gradient(device):
    graph, x = Graph(device), make_rows(8, device=device)
    weight = torch.rand(40, device=device, requires_grad=True)

    aggregate(x, graph.indptr, graph.row, weight=weight).sum().backward()

    assert x.grad is None
    assert weight.grad is not None
    assert not aggregate(x, graph.indptr, graph.row).requires_grad


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_edges", [0, 1, 40])
def test_edges_are_ordered_by_source_as_a_sort_does(num_edges, index):
    # Not in one piece, as a row of `edge_index.t()` is.
    row, target = torch.randint(7, (num_edges, 2), dtype=index).t()

    got = Transposed.of(row, target, 9)

    order = torch.sort(row, stable=True).indices
    counts = torch.bincount(row, minlength=9)
    assert torch.equal(got.indptr, torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(index))
    assert torch.equal(got.edge, order)
    assert torch.equal(got.target, target[order])
    assert (got.indptr.dtype, got.target.dtype, got.edge.dtype) == (index, index, torch.int64)


def test_a_source_that_is_not_there_is_refused_before_edges_are_ordered():
    with pytest.raises(IdError, match=r"row must lie in \[0, 3\), got 3"):
        Transposed.of(torch.tensor([0, 3]), torch.tensor([0, 0]), 3)
