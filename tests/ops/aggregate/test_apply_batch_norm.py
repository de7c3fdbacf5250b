"""Normalized rows, moments and running statistics after ReLU equal torch's in double precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyg_direct.ops.aggregate.apply_batch_norm import (
    normalise,
    normalise_on_gpu,
    pull_normalised,
    suits_grid,
    suits_loop,
)
from pyg_direct.ops.run_kernel import runs_on_gpu
from tests.poison import poisoned_memory

EPS = 1e-5


def make_layer(size):
    """A layer whose parameters and statistics are not those that layers begin with."""
    layer = nn.BatchNorm1d(size, eps=EPS, momentum=0.3)
    with torch.no_grad():
        for part in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
            part.copy_(torch.rand(size) + 0.5)
    return layer


def normalise_slowly(rows, layer):
    """Rows `[N, W, H]`, mean and 1 / standard deviation `[W, H]`, in double precision."""
    exact = rows.double().relu()
    scale, shift = layer.weight.detach().double(), layer.bias.detach().double()
    out = torch.stack([F.batch_norm(part, None, None, scale, shift, True, 0.0, EPS) for part in exact.unbind(1)], 1)
    return out, exact.mean(0), (exact.var(0, unbiased=False) + EPS) ** -0.5


def run(rows, layer, norm=None):
    """Return normalized rows, means and 1 / standard deviations, on any device."""
    if runs_on_gpu(rows):
        return normalise_on_gpu(rows, layer.weight, layer.bias, EPS, norm)
    num_nodes, window, size = rows.shape
    beside = torch.empty(window, num_nodes, size)
    moments = normalise(rows, layer.weight, layer.bias, EPS, beside, 0, norm)
    return beside.transpose(0, 1), moments


def check(rows, layer, **tolerances):
    expected, mean, inverse = normalise_slowly(rows, layer)
    given = rows.clone()

    with poisoned_memory():
        out, moments = run(rows, layer)

    torch.testing.assert_close(out, expected.float(), **tolerances)
    torch.testing.assert_close(moments, torch.stack([mean, inverse]).float(), **tolerances)
    assert torch.equal(rows, given)


def check_beside(rows, layer, **tolerances):
    num_nodes, window, size = rows.shape
    given, beside, out = rows.clone(), torch.full((window, num_nodes, size + 3), 7.0), torch.empty_like(rows)
    expected, mean, inverse = normalise_slowly(rows, layer)

    moments = normalise(rows, layer.weight, layer.bias, EPS, beside, 2, out=out)

    torch.testing.assert_close(out, expected.float(), **tolerances)
    torch.testing.assert_close(moments, torch.stack([mean, inverse]).float(), **tolerances)
    assert torch.equal(beside[:, :, 2:-1].transpose(0, 1), out)
    assert (beside[:, :, [0, 1, -1]] == 7).all()
    assert torch.equal(rows, given)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 63, 64, 65, 130, 1000])
@pytest.mark.parametrize(("window", "size"), [(1, 1), (1, 5), (1, 32), (1, 33), (8, 32), (3, 5), (1, 256)], ids=str)
def test_rows_of_any_shape_are_those_of_torch(num_nodes, window, size):
    torch.manual_seed(0)
    rows, layer = 3 * torch.randn(num_nodes, window, size), make_layer(size)
    if num_nodes == 1:
        # Torch refuses this case: only the shift remains.
        beside = torch.empty(window, 1, size)
        normalise(rows, layer.weight, layer.bias, EPS, beside, 0)
        torch.testing.assert_close(beside, layer.bias.detach().expand_as(beside))
        return

    check_beside(rows, layer, rtol=1e-5, atol=1e-5)


SHAPES = [(2, 1, 1), (5, 3, 5), (70, 1, 9), (129, 8, 32)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_gradients_are_those_of_torch_wherever_they_live(device, shape):
    torch.manual_seed(0)
    rows, layer = (3 * torch.randn(shape)).to(device), make_layer(shape[2]).to(device)
    check(rows, layer, rtol=1e-5, atol=1e-5)
    if not runs_on_gpu(rows):
        return
    begin, seen = shape[1] // 3, max(1, shape[1] // 2)
    grad, more = (torch.randn(shape[0], seen, shape[2]).to(device) for _ in range(2))
    exact = rows.double().requires_grad_()
    twin = make_layer(shape[2]).to(device).double()
    twin.load_state_dict(layer.state_dict())
    parts = exact.relu()[:, begin : begin + seen].unbind(1)
    scales, shifts = ([value.detach().clone().requires_grad_() for _ in parts] for value in (twin.weight, twin.bias))
    out = [F.batch_norm(*each[:1], None, None, *each[1:], True, 0.0, EPS) for each in
           zip(parts, scales, shifts, strict=True)]  # fmt: skip
    moments = normalise_on_gpu(rows, layer.weight, layer.bias, EPS)[1]

    for other in (None, more):
        whole = grad if other is None else grad + other
        expected = torch.autograd.grad(
            torch.stack(out, 1), [exact, *scales, *shifts], whole.double(), retain_graph=True
        )
        with poisoned_memory():
            of_rows, sums = pull_normalised(grad, other, rows, moments, layer.weight, begin)
        torch.testing.assert_close(of_rows, expected[0][:, begin : begin + seen].float(), rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(sums[:2].flatten(0, 1), expected[1:], strict=True):
            torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sums[2], of_rows.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mean", "spread"), [(1e4, 1e-1), (1e3, 1e-2), (0.0, 1e-4), (3.0, 0.0), (-3.0, 0.1)])
def test_rows_far_from_zero_and_close_to_each_other_are_as_exact(device, mean, spread):
    torch.manual_seed(0)
    rows = mean + spread * torch.randn(100 if runs_on_gpu(torch.empty(0)) else 1000, 1, 5)
    check(rows.to(device), make_layer(5).to(device), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_nodes", [2, 100])
def test_running_statistics_see_each_snapshot(device, num_nodes):
    torch.manual_seed(0)
    size = 9
    layer, twin = make_layer(size).to(device), make_layer(size).to(device).double()
    twin.load_state_dict(layer.state_dict())

    for rows in torch.randn(3, num_nodes, 1, size).to(device):
        twin(rows[:, 0].double().relu())
        run(rows, layer, layer)

    torch.testing.assert_close(layer.running_mean, twin.running_mean.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.running_var, twin.running_var.float(), rtol=1e-6, atol=1e-6)
    # On a CPU the caller counts them.
    assert int(layer.num_batches_tracked) == (3 if runs_on_gpu(rows) else 0)


# The simulator warns of infinity minus infinity.
@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_what_is_no_number_stays_in_its_column_of_its_snapshot(device, value):
    torch.manual_seed(0)
    rows, layer = torch.randn(70, 3, 5).to(device), make_layer(5).to(device)
    expected, _ = run(rows, layer)
    rows[65, 1, 2] = value

    out, moments = run(rows, layer)

    assert moments[1].isnan().nonzero().tolist() == [[1, 2]]
    assert out[:, 1, 2].isnan().all()
    out[:, 1, 2] = expected[:, 1, 2]
    assert torch.equal(out, expected)


def test_only_few_numbers_of_single_precision_suit():
    assert suits_loop(torch.empty(4000, 1, 32))
    assert not suits_loop(torch.empty(1000, 8, 32))
    assert not suits_loop(torch.empty(2000, 1, 32, dtype=torch.float64))


def test_few_nodes_suit_a_gpu(device):
    like = torch.empty(3, device=device)

    assert suits_grid(like, (4096, 8, 32)) == runs_on_gpu(like)
    assert not suits_grid(like, (4097, 1, 1))
    assert not suits_grid(like, (0, 1, 32))
    assert not suits_grid(like.double(), (10, 1, 32))
