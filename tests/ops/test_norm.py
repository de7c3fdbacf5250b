"""Normalised rows, moments and running statistics equal those of torch in double precision, of what is rectified."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyg_direct.ops.norm import normalise, suits_loop

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


def check(rows, layer, **tolerances):
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
        # What torch refuses: nothing is left but the shift.
        beside = torch.empty(window, 1, size)
        normalise(rows, layer.weight, layer.bias, EPS, beside, 0)
        torch.testing.assert_close(beside, layer.bias.detach().expand_as(beside))
        return

    check(rows, layer, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mean", "spread"), [(1e4, 1e-1), (1e3, 1e-2), (0.0, 1e-4), (3.0, 0.0), (-3.0, 0.1)])
def test_rows_far_from_zero_and_close_to_each_other_are_as_exact(mean, spread):
    torch.manual_seed(0)
    check(mean + spread * torch.randn(1000, 1, 5), make_layer(5), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_nodes", [2, 100])
def test_running_statistics_see_each_snapshot(num_nodes):
    torch.manual_seed(0)
    layer, size = make_layer(33), 33
    twin = make_layer(size).double()
    twin.load_state_dict(layer.state_dict())
    beside = torch.empty(1, num_nodes, size)

    for rows in torch.randn(3, num_nodes, 1, size):
        twin(rows[:, 0].double().relu())
        normalise(rows, layer.weight, layer.bias, EPS, beside, 0, layer)

    torch.testing.assert_close(layer.running_mean, twin.running_mean.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.running_var, twin.running_var.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_what_is_no_number_stays_in_its_column_of_its_snapshot(value):
    torch.manual_seed(0)
    rows, layer = torch.randn(70, 3, 5), make_layer(5)
    beside, expected = torch.empty(3, 70, 5), torch.empty(3, 70, 5)
    normalise(rows, layer.weight, layer.bias, EPS, expected, 0)
    rows[65, 1, 2] = value

    moments = normalise(rows, layer.weight, layer.bias, EPS, beside, 0)

    assert moments[1].isnan().nonzero().tolist() == [[1, 2]]
    assert beside[1, :, 2].isnan().all()
    beside[1, :, 2] = expected[1, :, 2]
    assert torch.equal(beside, expected)


def test_only_few_numbers_of_single_precision_suit():
    assert suits_loop(torch.empty(4000, 1, 32))
    assert not suits_loop(torch.empty(1000, 8, 32))
    assert not suits_loop(torch.empty(2000, 1, 32, dtype=torch.float64))
