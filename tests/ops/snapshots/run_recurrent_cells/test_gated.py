"""A gated step gives the reference's state, and the gradients of torch's functions, once and again."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from pyg_direct.ops.aggregate import products
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.ops.snapshots.run_recurrent_cells import step_by_torch, step_gated, suits_gpu
from tests.poison import poisoned_memory
from tests.reference import gated as reference

# Nodes, features and channels; the last have features of which a product is made first.
SHAPES = [(7, 4, 5), (1, 1, 1), (3, 2, 16), (12, 1, 3), (5, 17, 4)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)


def make(shape, dtype=torch.float64, device="cpu", seed=0):
    nodes, features, channels = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(nodes, features), (nodes, channels), (3 * channels, features), (3 * channels,), (channels, 2 * channels),
             (channels, channels)]  # fmt: skip
    return [torch.randn(size, generator=generator, dtype=dtype).to(device).requires_grad_() for size in sizes]


def step(x, state, weight, bias, *right):
    """Step by kernels if there are some."""
    assert suits_gpu(x, state, weight) == runs_on_gpu(x)
    return step_gated(x, state, weight, bias, *right) if runs_on_gpu(x) else by_torch(x, state, weight, bias, *right)


def by_torch(x, state, weight, bias, *right):
    return step_by_torch(F.linear(x, weight, bias), state, *right)


@shapes
@dtypes
def test_matches_reference(device, shape, dtype, apart):
    values = make(shape, dtype, device)
    expected = reference.step(*(value.detach().cpu().double().numpy() for value in values))

    with poisoned_memory():
        got = step(*values)

    assert got.dtype == dtype
    torch.testing.assert_close(got.detach().cpu().double(), torch.from_numpy(expected), rtol=apart, atol=apart)


@given(nodes=st.integers(1, 9), features=st.integers(1, 20), channels=st.integers(1, 9), seed=st.integers(0, 99))
def test_gradients_are_those_of_torch(device, nodes, features, channels, seed):
    values = make((nodes, features, channels), device=device, seed=seed)
    grad = torch.randn(nodes, channels, dtype=torch.float64).to(device)

    with poisoned_memory():
        got = torch.autograd.grad(step(*values), values, grad)

    for mine, expected in zip(got, torch.autograd.grad(by_torch(*values), values, grad), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wanted", range(6))
def test_what_needs_no_gradient_gets_none(device, wanted):
    values = [value.detach() for value in make(SHAPES[0], device=device)]
    values[wanted].requires_grad_()
    (expected,) = torch.autograd.grad(by_torch(*values).sum(), values[wanted : wanted + 1])

    step(*values).sum().backward()

    torch.testing.assert_close(values[wanted].grad, expected)
    assert [value.grad is None for value in values] == [place != wanted for place in range(6)]


def test_gradients_have_gradients(device):
    assert torch.autograd.gradgradcheck(step, make((3, 2, 2), device=device))


def test_gradients_of_rows_between_which_others_lie_have_gradients(device):
    def step_columns(*values):
        return step(*(value.mT if value.dim() == 2 else value for value in values))

    values = [value.detach().mT.contiguous().requires_grad_() if value.dim() == 2 else value
              for value in make((3, 2, 2), device=device)]  # fmt: skip
    assert not values[1].mT.is_contiguous()

    assert torch.autograd.gradgradcheck(step_columns, values)


def test_many_gradients_at_once_are_those_one_by_one(device):
    values = make(SHAPES[0], device=device)
    grads = torch.randn(3, 7, 5, dtype=torch.float64).to(device)
    out = step(*values)

    got = torch.autograd.grad(out, values, grads, is_grads_batched=True, retain_graph=True)

    each = [torch.autograd.grad(out, values, grad, retain_graph=True) for grad in grads]
    for mine, expected in zip(got, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(expected))


def test_input_and_state_may_be_one_tensor(device):
    values = make((4, 3, 3), device=device)
    values[0] = values[1]
    expected = torch.autograd.grad(by_torch(*values).sum(), values[1:])

    for mine, theirs in zip(torch.autograd.grad(step(*values).sum(), values[1:]), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_rows_between_which_others_lie(device):
    values = make((4, 3, 2), device=device)
    spread = [torch.stack([value, torch.zeros_like(value)], -1)[..., 0] for value in values]
    assert not spread[1].is_contiguous()

    torch.testing.assert_close(step(*spread), by_torch(*values))


@pytest.mark.parametrize("nodes", [12, 13, 15, 5])
def test_products_of_many_rows_are_added_up_from_pieces(device, monkeypatch, nodes):
    monkeypatch.setattr(products, "_PIECES", 4)
    monkeypatch.setattr(products, "_LEAST_ROWS", 3)
    values = make((nodes, 3, 2), device=device)
    expected = torch.autograd.grad(by_torch(*values).sum(), values)

    for mine, theirs in zip(torch.autograd.grad(step(*values).sum(), values), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("why", ["half", "features", "nodes", "dtype", "empty", "batch", "autocast", "vmap", "forward"])
def test_what_kernels_do_not_take_is_left_to_torch(device, why):
    x, state, weight, *_ = (value.detach() for value in make(SHAPES[0], torch.float32, device))
    assert suits_gpu(x, state, weight) == runs_on_gpu(x)
    given = {
        "half": lambda: (x.half(), state.half(), weight.half()),
        "features": lambda: (x[:, :3], state, weight),
        "nodes": lambda: (x[:3], state, weight),
        "dtype": lambda: (x.double(), state, weight),
        "empty": lambda: (x[:0], state[:0], weight),
        "batch": lambda: (x[None], state[None], weight),
    }

    if why == "autocast":
        with torch.autocast(x.device.type, torch.bfloat16):
            assert not suits_gpu(x, state, weight)
    elif why == "vmap":
        seen = []
        torch.func.vmap(lambda row: seen.append(suits_gpu(x, state, weight)) or row)(x)
        assert seen == [False]
    elif why == "forward":
        with torch.autograd.forward_ad.dual_level():
            assert not suits_gpu(x, state, weight)
    else:
        assert not suits_gpu(*given[why]())
