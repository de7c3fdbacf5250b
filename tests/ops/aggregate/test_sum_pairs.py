"""Sums of functions of both ends' rows, item by item: results and gradients of torch's functions in float64."""

import pytest
import torch
from torch.nn.functional import leaky_relu
from torch_geometric.utils import softmax

from pyg_direct.ops.aggregate.sum_pairs import Pairs, sum_affine, sum_gated, sum_softmax
from pyg_direct.ops.aggregate.sum_rows import Transposed
from pyg_direct.ops.run_kernel import SIMULATED

NODES, TARGETS = 12, 9
SLOPE = 0.25
# Edges of one target, and of one source: more than a row that is not cut into slices.
HUB = 20 if SIMULATED else 300


def draw_edges(device, num_edges=40):
    """(Edges of which a target and a source have many, source and target of each); the last target has none."""
    generator = torch.Generator().manual_seed(3)
    row = torch.randint(0, NODES, (num_edges,), generator=generator)
    target = torch.randint(0, TARGETS - 1, (num_edges,), generator=generator)
    if num_edges > 1:
        row = torch.cat([row, torch.randint(0, NODES, (HUB,), generator=generator), torch.full((HUB,), 4)])
        target = torch.cat([target, torch.full((HUB,), 2), torch.randint(0, TARGETS - 1, (HUB,), generator=generator)])
    target, order = target.sort(stable=True)
    row, target = row[order].to(device), target.to(device)
    indptr = torch.searchsorted(target, torch.arange(TARGETS + 1, device=device))
    by_source = Transposed.of(row, target, NODES)
    return Pairs(indptr, row, target, TARGETS, -1, by_source.indptr, by_source.target), row, target


def add_up(messages, target):
    return messages.new_zeros(TARGETS, messages.shape[1]).index_add(0, target, messages)


# Each: rows of (targets, sources) that it takes, the sum, and the same by torch's functions.
SUMS = {
    "gated": ((1, 2), sum_gated,
              lambda own, rows, values, row, target: add_up((own[target] + rows[row]).sigmoid() * values[row], target)),
    "affine": ((2, 1), lambda *args: sum_affine(*args, SLOPE),
               lambda factor, shift, rows, row, target: add_up(
                   leaky_relu(factor[target] * rows[row] + shift[target], SLOPE), target)),
    "softmax": ((0, 2), sum_softmax,
                lambda scores, rows, row, target: add_up(
                    softmax(scores[row], target, num_nodes=TARGETS) * rows[row], target)),
}  # fmt: skip
each = pytest.mark.parametrize("name", SUMS)


def draw_rows(name, device, width, dtype=torch.float64):
    torch.manual_seed(1)
    of_targets, of_sources = SUMS[name][0]
    counts = [TARGETS] * of_targets + [NODES] * of_sources
    return [torch.randn(count, width, dtype=dtype).to(device).requires_grad_() for count in counts]


@each
@pytest.mark.parametrize("width", [1, 7, 40])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_equals_torch_and_its_gradients(device, name, width, dtype, near):
    (pairs, *ends), given = draw_edges(device), draw_rows(name, device, width, dtype)
    exact = [part.detach().double().requires_grad_() for part in given]
    expected = SUMS[name][2](*exact, *ends)
    grad = torch.randn_like(expected).to(dtype)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())

    out = SUMS[name][1](*given, pairs)

    assert out.dtype == dtype
    for one, other in zip((out, *torch.autograd.grad(out, given, grad)), (expected, *expected_grads), strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= near * other.norm()


@each
@pytest.mark.parametrize("num_edges", [0, 1])
def test_few_edges(device, name, num_edges):
    (pairs, *ends), given = draw_edges(device, num_edges), draw_rows(name, device, 5)
    expected = SUMS[name][2](*given, *ends)

    out = SUMS[name][1](*given, pairs)

    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(part.sum(), given, allow_unused=True, materialize_grads=True)
             for part in (out, expected)]  # fmt: skip
    torch.testing.assert_close(*grads)


@each
def test_second_gradients(name):
    (pairs, *_), given = draw_edges("cpu", 10), draw_rows(name, "cpu", 2)

    assert torch.autograd.gradgradcheck(lambda *parts: SUMS[name][1](*parts, pairs), given)


@each
def test_equal_calls_give_equal_bits(real_device, name):
    (pairs, *_), given = draw_edges(real_device), draw_rows(name, real_device, 33, torch.float32)
    first, second = (torch.autograd.grad(SUMS[name][1](*given, pairs).square().sum(), given) for _ in range(2))

    assert all(map(torch.equal, first, second))


def test_scores_far_apart(device):
    (pairs, row, target), (scores, rows) = draw_edges(device), draw_rows("softmax", device, 3, torch.float32)
    scores = scores.detach() * 200
    weights = softmax(scores.double()[row], target, num_nodes=TARGETS)

    out = sum_softmax(scores, rows, pairs)

    expected = add_up(weights * rows.detach().double()[row], target)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
