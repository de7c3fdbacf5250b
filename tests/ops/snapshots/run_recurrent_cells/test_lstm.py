"""An LSTM's first step equals torch's in double precision, for gates with and without the forget gate."""

import pytest
import torch

from pyg_direct.ops.snapshots.run_recurrent_cells import open_gates, open_two, pull_gates, pull_two, suits_two
from tests.poison import poisoned_memory

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


def make_two(num_nodes, window, size, features):
    """Both halves of the rows, the features, and parameters of two layers, on a GPU."""
    torch.manual_seed(num_nodes)
    layers = [torch.nn.LSTM(2 * size, size), torch.nn.LSTM(size, size)]
    parameters = [parameter.detach().cuda() for layer in layers for parameter in layer.parameters()]
    halves = [torch.randn(num_nodes, window, size, device="cuda") for _ in range(2)]
    return *halves, torch.randn(window, num_nodes, features, device="cuda"), parameters


def open_two_slowly(first, second, x, parameters):
    """`[N, W, 2 * H + F]`, by torch's own layers."""
    rows = torch.cat([first, second], 2).flatten(0, 1)
    states, parts = rows, []
    for layer in (parameters[:4], parameters[4:]):
        zeros = states.new_zeros(len(rows), first.shape[2])
        states = torch.lstm_cell(states, (zeros, zeros), *layer)[0]
        parts.append(states.view(first.shape))
    return torch.cat([*parts, x.transpose(0, 1)], 2)


TWO = [(1, 1, 1, 1), (7, 3, 5, 4), (129, 1, 16, 0), (70, 2, 17, 33), (1000, 8, 32, 8), (40_000, 1, 32, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TWO, ids=str)
def test_two_layers_are_those_of_torch(shape):
    first, second, x, parameters = make_two(*shape)
    assert suits_two(first, first.shape)
    exact = [value.double().requires_grad_() for value in (first, second, *parameters)]
    expected = open_two_slowly(exact[0], exact[1], x.double(), exact[2:])
    # Of the snapshots in the middle.
    begin, end = shape[1] // 3, shape[1] - shape[1] // 4
    grad = torch.randn(shape[0], end - begin, expected.shape[2], device="cuda")
    expected_grads = torch.autograd.grad(expected[:, begin:end], exact, grad.double())

    with poisoned_memory():
        out = torch.empty(shape[1], shape[0], expected.shape[2], device="cuda")
        open_two(first, second, x, parameters, out)
        pulled = pull_two(grad, first, second, parameters, begin)

    torch.testing.assert_close(out.transpose(0, 1), expected.detach().float(), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip((pulled.first, pulled.second), expected_grads[:2], strict=True):
        torch.testing.assert_close(mine, theirs[:, begin:end].float(), rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(pulled.layers, expected_grads[2:], strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(mine / scale, theirs.float() / scale, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [5, 32])
def test_rows_of_two_layers_keep_what_is_no_number_to_themselves(size):
    first, second, x, parameters = make_two(70, 1, size, 3)
    expected, out = (torch.empty(1, 70, 2 * size + 3, device="cuda") for _ in range(2))
    open_two(first, second, x, parameters, expected)
    first[3, 0, 2], second[40, 0, size - 1] = torch.nan, torch.inf

    open_two(first, second, x, parameters, out)

    assert out[0, 3, : 2 * size].isnan().all()
    assert out[0, 40].isfinite().all()
    others = [place for place in range(70) if place not in (3, 40)]
    assert torch.equal(out[:, others], expected[:, others])


@pytest.mark.gpu
def test_wide_states_and_other_dtypes_are_left_to_torch():
    like = torch.empty(4, device="cuda")

    assert not suits_two(like, (10, 1, 33))
    assert not suits_two(like, (0, 1, 32))
    assert not suits_two(like.double(), (10, 1, 32))
    assert not suits_two(like.cpu(), (10, 1, 32))
