"""An LSTM's first step equals that of torch in double precision, for gates with and without the one that forgets."""

import pytest
import torch

from pyg_direct.ops.lstm import open_gates, pull_gates

SIZE = 5


def make_gates(width, spread):
    gates = spread * torch.randn(70, width * SIZE)
    return gates, 0.3 * torch.randn(4 * SIZE), 0.3 * torch.randn(4 * SIZE)


def open_slowly(gates, bias, state_bias):
    """With torch's own layer, whose weights let the gates pass."""
    cell = torch.nn.LSTMCell(4 * SIZE, SIZE).double()
    whole = torch.zeros(len(gates), 4 * SIZE, dtype=torch.float64)
    whole[:, :SIZE] = gates[:, :SIZE]
    whole[:, 2 * SIZE :] = gates[:, -2 * SIZE :]
    with torch.no_grad():
        cell.weight_ih.copy_(torch.eye(4 * SIZE))
        cell.bias_ih.copy_(bias)
        cell.bias_hh.copy_(state_bias)
    return cell(whole)[0]


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_states_and_gradients_are_those_of_torch(width, spread):
    gates, bias, state_bias = make_gates(width, spread)
    exact = gates.double().requires_grad_()
    expected = open_slowly(exact, bias, state_bias)
    grad = torch.randn(expected.shape)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    got = open_gates(gates, bias, state_bias)
    got_grad = pull_gates(grad, gates, bias, state_bias)

    torch.testing.assert_close(got, expected.detach().float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_grad, expected_grad.float(), rtol=1e-5, atol=2e-6)


def test_what_is_no_number_stays_so_and_infinities_saturate():
    gates, bias, state_bias = make_gates(3, 1.0)
    gates[3, 2], gates[4, SIZE], gates[5] = torch.nan, torch.nan, torch.inf

    got = open_gates(gates, bias, state_bias)

    assert got.isnan().nonzero().tolist() == [[3, 2], [4, 0]]
    torch.testing.assert_close(got[5], torch.tensor(1.0).tanh().expand(SIZE))


@pytest.mark.parametrize("width", [3, 4])
def test_states_go_to_columns_and_leave_the_others(width):
    gates, bias, state_bias = make_gates(width, 1.0)
    out = torch.full((len(gates), SIZE + 4), 7.0)

    got = open_gates(gates, bias, state_bias, out, 3)

    assert got.data_ptr() == out[:, 3:].data_ptr()
    torch.testing.assert_close(out[:, 3:-1], open_gates(gates, bias, state_bias), rtol=0, atol=0)
    assert (out[:, [0, 1, 2, -1]] == 7).all()
