"""Scalar products of the rows at the ends of edges."""

import pytest
import torch

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.ops.aggregate.products import dot
from tests.ops.aggregate.compute_softmax.test_softmax import NUM_NODES, NUM_TARGETS, Graph

HEADS = 2


def make_rows(graph, dtype=torch.float32, channels=5):
    return [torch.randn(n, HEADS, channels, dtype=dtype).to(graph.row.device).requires_grad_()
            for n in (NUM_NODES, NUM_TARGETS)]  # fmt: skip


dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10),
                                                          (torch.bfloat16, 3e-2)])  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@dtypes
def test_products_and_gradients_are_those_of_torch(device, deterministic, dtype, tolerance):
    compare(device, deterministic, dtype, tolerance, 5)


# Rows of 16 bytes, and of more than a warp reads at once.
@pytest.mark.parametrize("channels", [24, 136])
@dtypes
def test_products_of_wide_rows_are_those_of_torch(real_device, dtype, tolerance, channels):
    compare(real_device, False, dtype, tolerance, channels)


def compare(device, deterministic, dtype, tolerance, channels):
    graph = Graph(device)
    x, q = make_rows(graph, dtype, channels)
    grad = torch.rand(40, HEADS, device=device).to(dtype)
    expected = (x.double()[graph.row] * q.double()[graph.target]).sum(-1)
    expected_grads = torch.autograd.grad(expected, (x, q), grad.double())

    got = dot(x, q, graph.indptr, graph.row, graph.target, deterministic=deterministic)

    assert (got.dtype, got.shape) == (dtype, (40, HEADS))
    for one, other in zip((got, *torch.autograd.grad(got, (x, q), grad)), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=4 * tolerance)


def test_gradcheck():
    graph = Graph(num_edges=8)

    def compute(x, q):
        return dot(x, q, graph.indptr, graph.row, graph.target)

    assert torch.autograd.gradcheck(compute, make_rows(graph, torch.float64))
    assert torch.autograd.gradgradcheck(compute, make_rows(graph, torch.float64))


def test_gradients_without_edges_have_gradients_too():
    x, q = make_rows(Graph())
    none = torch.empty(0, dtype=torch.int64)

    scores = dot(x, q, torch.zeros(NUM_TARGETS + 1, dtype=torch.int64), none, none)

    assert not any(part.any() for part in torch.autograd.grad(scores.sum(), (x, q), create_graph=True))


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"x": torch.ones(12, 10)}, ArgumentError, r"x and q must be \[N, H, C\]"),
    ({"q": torch.ones(9, 2, 4)}, ArgumentError, r"x and q must be \[N, H, C\]"),
    ({"q": torch.ones(9, 2, 5).double()}, ArgumentTypeError, "x and q must be of one floating dtype"),
    ({"q": torch.ones(11, 2, 5)}, ArgumentError, "indptr must hold the 12 offsets of the rows of q, got 10"),
    ({"row": torch.zeros(3, dtype=torch.int64)}, ArgumentError, "row and target must be of one shape"),
    ({"row": torch.full((40,), 12)}, IdError, r"row must lie in \[0, 12\), got 12"),
])  # fmt: skip
def test_bad_arguments_are_refused(change, error, words):
    graph = Graph()
    arguments = {"x": torch.ones(12, 2, 5), "q": torch.ones(9, 2, 5), "indptr": graph.indptr, "row": graph.row,
                 "target": graph.target, **change}  # fmt: skip

    with pytest.raises(error, match=words):
        dot(**arguments)
