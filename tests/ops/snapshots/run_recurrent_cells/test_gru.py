"""A small GRU's step on a GPU equals torch's in double precision, forward and backward."""

import pytest
import torch

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.ops.snapshots.run_recurrent_cells import pull_gru, step_gru

pytestmark = pytest.mark.sim if SIMULATED else pytest.mark.gpu


@pytest.fixture
def device():
    """Where the kernels run: on a GPU, or in the simulator on CPU tensors."""
    return torch.device("cpu" if SIMULATED else "cuda")


SIZES = [(1, 1, 1), (5, 3, 7), (6, 6, 6), (33, 17, 40)]


def make_inputs(rows, width, size, spread=1.0, device="cpu"):
    torch.manual_seed(rows)
    shapes = ((rows, width), (rows, size), (3 * size, width), (3 * size, size), (3 * size,), (3 * size,))
    return [(spread * torch.randn(shape)).to(device) for shape in shapes]


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0])
@pytest.mark.parametrize(("rows", "width", "size"), SIZES)
@pytest.mark.full
def test_states_and_gradients_are_those_of_torch(device, rows, width, size, spread):
    x, state, *parameters = make_inputs(rows, width, size, spread, device)
    grad = torch.randn(rows, size).to(device)
    exact = [value.double().requires_grad_() for value in (x, state, *parameters)]
    expected = torch.gru_cell(*exact)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())

    got, kept = step_gru(x, state, parameters)
    got_grads = pull_gru(grad, x, state, parameters, kept)

    torch.testing.assert_close(got, expected.detach().float(), rtol=1e-5, atol=3e-6)
    for mine, theirs in zip(got_grads, expected_grads, strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(mine / scale, theirs.float() / scale, rtol=1e-4, atol=1e-5)


def test_rows_that_are_not_contiguous_are_read(device):
    x, state, *parameters = make_inputs(6, 6, 6, device=device)
    turned = [value.t().contiguous().t() if value.dim() == 2 else value for value in (x, state, *parameters)]

    got, kept = step_gru(turned[0], turned[1], turned[2:])
    got_grads = pull_gru(turned[0], turned[0], turned[1], turned[2:], kept)

    expected, expected_kept = step_gru(x, state, parameters)
    assert torch.equal(got, expected)
    for mine, theirs in zip(got_grads, pull_gru(x, x, state, parameters, expected_kept), strict=True):
        assert torch.equal(mine, theirs)


def test_no_rows_give_no_rows_and_gradients_of_zero(device):
    x, state, *parameters = make_inputs(0, 3, 4, device=device)

    got, kept = step_gru(x, state, parameters)
    grads = pull_gru(got, x, state, parameters, kept)

    assert got.shape == (0, 4)
    assert [grad.shape for grad in grads] == [value.shape for value in (x, state, *parameters)]
    assert not any(grad.any() for grad in grads)


def test_what_is_no_number_stays_so(device):
    x, state, *parameters = make_inputs(4, 3, 5, device=device)
    x[2, 1] = torch.nan

    got, _ = step_gru(x, state, parameters)

    assert got.isnan().any(1).tolist() == [False, False, True, False]
