"""Single steps of recurrent layers equal torch's, forward and backward."""

import copy

import pytest
import torch

from pyg_direct.dynamic.nn import recurrent_step
from pyg_direct.dynamic.nn.recurrent_step import run_lstm, step_gates, step_gates_backward, step_gru

pytestmark = pytest.mark.usefixtures("full_precision")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_first_steps_are_those_of_the_layer(device, dtype):
    torch.manual_seed(0)
    layer = torch.nn.LSTM(7, 5).to(device, dtype)
    x = torch.randn(1, 50, 7, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(1, 50, 5, device=device, dtype=dtype)
    expected, (last, _) = layer(x)
    expected_grads = torch.autograd.grad(expected, [x, *layer.parameters()], grad)

    got, state = run_lstm(layer, x)

    assert torch.equal(got[0], state)
    torch.testing.assert_close(state, last[0], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(torch.autograd.grad(got, [x, *layer.parameters()], grad), expected_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gates_are_those_of_the_layer(device, dtype):
    torch.manual_seed(0)
    layer = torch.nn.GRU(6, 6).to(device, dtype)
    x, state = (torch.randn(6, 6, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    of_input, of_state, bias, state_bias = layer.parameters()
    grad = torch.randn(6, 6, device=device, dtype=dtype)
    expected = torch.gru_cell(x, state, of_input, of_state, bias, state_bias)
    expected_grads = torch.autograd.grad(expected, [x, state], grad)

    with torch.no_grad():
        # Parts of one product, as they are used.
        from_input, from_state = torch.cat([x @ of_input.t(), state @ of_state.t()], 1).chunk(2, 1)
        got, kept = step_gates(from_input, from_state, state, bias, state_bias)
        of_gates, of_state_gates, back = step_gates_backward(grad, kept)

    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_gates @ of_input, expected_grads[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(back + of_state_gates @ of_state, expected_grads[1], rtol=1e-4, atol=1e-5)


@pytest.fixture
def gru():
    torch.manual_seed(0)
    return torch.nn.GRU(6, 6)


@pytest.mark.parametrize("same", [False, True], ids=["", "input is state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_are_those_of_the_layer(device, gru, dtype, same):
    layer = gru.to(device, dtype)
    x, state = (torch.randn(1, 6, 6, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    x = state if same else x
    grad = torch.randn(1, 6, 6, device=device, dtype=dtype)
    leaves = [x, *([] if same else [state]), *layer.parameters()]
    # In single precision cuDNN's own are off by more than a few units in the last place.
    exact = copy.deepcopy(layer).double()
    exact_x = x.detach().double().requires_grad_()
    exact_state = exact_x if same else state.detach().double().requires_grad_()
    expected = exact(exact_x, exact_state)[1]
    exact_leaves = [exact_x, *([] if same else [exact_state]), *exact.parameters()]
    expected_grads = torch.autograd.grad(expected, exact_leaves, grad.double())

    got = step_gru(layer, x, state)

    torch.testing.assert_close(got, expected.to(dtype), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(torch.autograd.grad(got, leaves, grad), expected_grads, strict=True):
        torch.testing.assert_close(mine, theirs.to(dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("same", [False, True], ids=["", "input is state"])
def test_steps_have_gradients_of_gradients(device, gru, same):
    gru = gru.to(device)
    x, state = (torch.randn(1, 6, 6, device=device, requires_grad=True) for _ in range(2))
    x = state if same else x
    leaves = [*({x, state}), *gru.parameters()]
    twice = []
    for step in (lambda: step_gru(gru, x, state), lambda: torch.gru_cell(x[0], state[0], *gru.parameters())[None]):
        out = step()
        first = torch.autograd.grad((out * out).sum(), leaves, create_graph=True)
        twice.append([*first, *torch.autograd.grad(sum((value * value).sum() for value in first), leaves)])

    for mine, theirs in zip(*twice, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_first_steps_have_gradients_of_gradients():
    layer, x = torch.nn.LSTM(6, 5), torch.randn(7, 6, requires_grad=True)
    leaves, zeros, twice = [x, *layer.parameters()], torch.zeros(7, 5), []
    for step in (lambda: run_lstm(layer, x[None])[1], lambda: torch.lstm_cell(x, (zeros, zeros), *leaves[1:])[0]):
        first = torch.autograd.grad(step().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(value.square().sum() for value in first), leaves, allow_unused=True)
        twice.append([*first, *second])

    for mine, theirs in zip(*twice, strict=True):
        assert mine.count_nonzero() == 0 if theirs is None else torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_parameters_that_ask_for_no_gradient_get_none(device, gru):
    gru.to(device).weight_hh_l0.requires_grad_(False)
    x, state = torch.randn(1, 6, 6, device=device), torch.randn(1, 6, 6, device=device, requires_grad=True)

    out = step_gru(gru, x, state)
    (twice,) = torch.autograd.grad(out.sum(), state, create_graph=True)
    out.sum().backward()

    assert gru.weight_hh_l0.grad is None
    torch.testing.assert_close(state.grad, twice, rtol=1e-4, atol=1e-5)


def test_transforms_of_functions_and_large_states_go_through_torch(monkeypatch, gru):
    x, state = torch.randn(1, 6, 6), torch.randn(1, 6, 6)
    expected = gru(x, state)[1]
    monkeypatch.setattr(recurrent_step, "step_small_gru", None)

    pulled = torch.func.grad(lambda rows: step_gru(gru, rows, state).sum())(x)
    _, moved = torch.func.jvp(lambda rows: step_gru(gru, rows, state), (x,), (torch.zeros_like(x),))
    monkeypatch.setattr(recurrent_step, "_SMALL", 5)
    large = step_gru(gru, x, state)

    x.requires_grad_()
    torch.testing.assert_close(pulled, torch.autograd.grad(gru(x, state)[1].sum(), x)[0], rtol=1e-4, atol=1e-5)
    assert not moved.any()
    torch.testing.assert_close(large, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 5, 6), (1, 7, 6), (1, 6, 5), (1, 6, 7)], ids=str)
def test_what_does_not_fit_a_gru_is_refused_by_torch(gru, shape):
    state = torch.randn(1, 6, 6)

    with pytest.raises(RuntimeError):
        step_gru(gru, torch.randn(shape), state)


def test_gradients_of_a_gru_come_in_batches(device, gru):
    gru = gru.to(device)
    x, state = (torch.randn(1, 6, 6, device=device, requires_grad=True) for _ in range(2))
    inputs, grads = [x, state, *gru.parameters()], torch.randn(3, 1, 6, 6).to(device)
    out = step_gru(gru, x, state)
    expected = [torch.autograd.grad(out, inputs, grad, retain_graph=True) for grad in grads]

    got = torch.autograd.grad(out, inputs, grads, is_grads_batched=True)

    for number, part in enumerate(got):
        torch.testing.assert_close(part, torch.stack([one[number] for one in expected]), rtol=1e-4, atol=1e-5)
