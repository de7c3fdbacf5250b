"""Single steps of recurrent layers equal those of torch, forwards and backwards."""

import pytest
import torch

from pyg_direct.dynamic.nn.recurrence import run_lstm, step_gates, step_gates_backward


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


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
