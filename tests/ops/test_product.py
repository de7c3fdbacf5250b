"""Rows times small matrices: equal to sums of products, in both directions, for any size."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.kernels.jit import SIMULATED
from pyg_direct.ops import product
from pyg_direct.ops.launch import runs_on_gpu
from pyg_direct.ops.product import is_small, multiply_columns, multiply_rows, pull_matrix
from tests.poison import poisoned_memory
from tests.reference import product as reference

# Below, at and above tiles of four products; rows that end within a tile of four rows, and within a block's.
SIZES = (
    [(1, 1), (3, 5), (4, 4), (5, 9)] if SIMULATED else [(1, 1), (3, 5), (4, 96), (8, 8), (32, 32), (17, 30), (12, 96)]
)
ROWS = [1, 4, 19] if SIMULATED else [1, 4, 255, 1030]


@pytest.fixture(autouse=True)
def _any_number_of_rows(monkeypatch):
    monkeypatch.setattr(product, "_LEAST", 1)


def draw(*shape, device):
    # Sums of products of these are exact.
    return torch.randint(-4, 5, shape, device=device).div(4)


def assert_equal(got, expected):
    np.testing.assert_array_equal(got.detach().double().cpu().numpy(), expected)


@pytest.mark.parametrize("is_turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("depth", "width"), SIZES)
def test_matches_reference_in_both_directions(device, depth, width, rows, batches, has_bias, is_turned):
    x, grad = draw(batches, rows, depth, device=device), draw(batches, rows, width, device=device)
    weight = draw(batches, *((width, depth) if is_turned else (depth, width)), device=device)
    bias = draw(width, device=device) if has_bias else None
    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]

    with poisoned_memory():
        got = multiply_rows(x, weight, bias, is_turned=is_turned)
        grads = torch.autograd.grad(got, leaves, grad)

    plain = weight.detach().transpose(1, 2) if is_turned else weight.detach()
    rows_of, other, given = (t.detach().cpu().numpy() for t in (x, plain, grad))
    assert_equal(got, reference.multiply_rows(rows_of, other, None if bias is None else bias.detach().cpu().numpy()))
    assert_equal(grads[0], reference.multiply_rows(given, other.transpose(0, 2, 1)))
    of_weight = grads[1].transpose(1, 2) if is_turned else grads[1]
    assert_equal(of_weight, reference.multiply_columns(rows_of, given))
    if has_bias:
        assert_equal(grads[2], given.sum((0, 1)).astype(np.float64))


@given(shape=st.tuples(st.integers(1, 2), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9)))
def test_any_size_matches_reference(device, shape):
    batches, rows, depth, width = shape
    x, weight = draw(batches, rows, depth, device=device), draw(batches, depth, width, device=device)
    grad = draw(batches, rows, width, device=device)

    got = multiply_rows(x, weight)

    assert_equal(got, reference.multiply_rows(x.cpu().numpy(), weight.cpu().numpy()))
    if is_small(x, depth, width):
        assert_equal(
            multiply_columns(x, grad, False)[0], reference.multiply_columns(x.cpu().numpy(), grad.cpu().numpy())
        )


def test_rows_of_any_shape_are_those_of_a_linear_layer(device):
    layer = torch.nn.Linear(5, 7).to(device)
    x = torch.randn(3, 4, 5, device=device)

    got = multiply_rows(x.transpose(0, 1), layer.weight, layer.bias, is_turned=True)

    torch.testing.assert_close(got, layer(x.transpose(0, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "depth", "width"), [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_nothing_is_multiplied(device, rows, depth, width):
    got = multiply_rows(torch.ones(rows, depth, device=device), torch.ones(depth, width, device=device))

    assert got.tolist() == torch.zeros(rows, width).tolist()


def test_wide_matrices_and_other_dtypes_are_left_to_torch(device):
    x = torch.ones(4, 64, device=device)

    assert not is_small(x, 64, 64)
    assert not is_small(x, 4, 130)
    assert not is_small(x.double(), 4, 4)
    assert not is_small(x, 0, 4)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert not is_small(x, 4, 4)
    assert is_small(x, 4, 4) == runs_on_gpu(x)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_of_a_matrix_and_a_bias_are_sums(device, is_turned, has_bias):
    x, grad = draw(11, 3, device=device), draw(11, 6, device=device)

    of_weight, of_bias = pull_matrix(x, grad, is_turned=is_turned, has_bias=has_bias)

    expected = reference.multiply_columns(x.cpu().numpy()[None], grad.cpu().numpy()[None])[0]
    assert of_weight.is_contiguous()
    assert_equal(of_weight, expected.T if is_turned else expected)
    assert (of_bias is not None) == has_bias
    if has_bias:
        assert_equal(of_bias, grad.double().cpu().numpy().sum(0))


def test_only_what_asks_gets_a_gradient(device, monkeypatch):
    x, weight = draw(9, 4, device=device), draw(4, 4, device=device).requires_grad_()
    monkeypatch.setattr(product, "_multiply", _count(product._multiply, calls := []))

    multiply_rows(x, weight).sum().backward()

    assert len(calls) == (1 if is_small(x, 4, 4) else 0)
    assert_equal(weight.grad, reference.multiply_columns(x.cpu().numpy()[None], np.ones((1, 9, 4)))[0])


def _count(real, calls):
    return lambda *args: calls.append(1) or real(*args)


@pytest.mark.gpu
def test_equal_calls_give_equal_results():
    x, grad = torch.randn(1, 100_003, 12, device="cuda"), torch.randn(1, 100_003, 96, device="cuda")

    one, other = (multiply_columns(x, grad, True) for _ in range(2))

    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    expected = x[0].double().t() @ grad[0].double()
    torch.testing.assert_close(one[0][0].double(), expected, rtol=1e-4, atol=1e-2)
