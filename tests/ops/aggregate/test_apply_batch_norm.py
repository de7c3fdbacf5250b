"""Normalized rows, moments and running statistics after ReLU equal torch's in double precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.ops.aggregate.apply_batch_norm import normalise_on_gpu, pull_normalised, suits_grid
from tests.poison import poisoned_memory

EPS = 1e-5
pytestmark = pytest.mark.sim if SIMULATED else pytest.mark.gpu


@pytest.fixture
def device():
    """Where the kernels run: on a GPU, or in the simulator on CPU tensors."""
    return torch.device("cpu" if SIMULATED else "cuda")


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
    expected, mean, inverse = normalise_slowly(rows, layer)
    given = rows.clone()

    with poisoned_memory():
        out, moments = normalise_on_gpu(rows, layer.weight, layer.bias, EPS)

    torch.testing.assert_close(out, expected.float(), **tolerances)
    torch.testing.assert_close(moments, torch.stack([mean, inverse]).float(), **tolerances)
    assert torch.equal(rows, given)


SHAPES = [(2, 1, 1), (5, 3, 5), (70, 1, 9), (129, 8, 32)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_gradients_are_those_of_torch_wherever_they_live(device, shape):
    torch.manual_seed(0)
    rows, layer = (3 * torch.randn(shape)).to(device), make_layer(shape[2]).to(device)
    check(rows, layer, rtol=1e-5, atol=1e-5)
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
    rows = mean + spread * torch.randn(100, 1, 5)
    check(rows.to(device), make_layer(5).to(device), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_nodes", [2, 100])
def test_running_statistics_see_each_snapshot(device, num_nodes):
    torch.manual_seed(0)
    size = 9
    layer, twin = make_layer(size).to(device), make_layer(size).to(device).double()
    twin.load_state_dict(layer.state_dict())

    for rows in torch.randn(3, num_nodes, 1, size).to(device):
        twin(rows[:, 0].double().relu())
        normalise_on_gpu(rows, layer.weight, layer.bias, EPS, layer)

    torch.testing.assert_close(layer.running_mean, twin.running_mean.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.running_var, twin.running_var.float(), rtol=1e-6, atol=1e-6)
    assert int(layer.num_batches_tracked) == 3


# The simulator warns of infinity minus infinity.
@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_what_is_no_number_stays_in_its_column_of_its_snapshot(device, value):
    torch.manual_seed(0)
    rows, layer = torch.randn(70, 3, 5).to(device), make_layer(5).to(device)
    expected, _ = normalise_on_gpu(rows, layer.weight, layer.bias, EPS)
    rows[65, 1, 2] = value

    out, moments = normalise_on_gpu(rows, layer.weight, layer.bias, EPS)

    assert moments[1].isnan().nonzero().tolist() == [[1, 2]]
    assert out[:, 1, 2].isnan().all()
    out[:, 1, 2] = expected[:, 1, 2]
    assert torch.equal(out, expected)


def test_few_nodes_suit_a_gpu(device):
    like = torch.empty(3, device=device)

    assert suits_grid(like, (4096, 8, 32))
    assert not suits_grid(like, (4097, 1, 1))
    assert not suits_grid(like, (0, 1, 32))
    assert not suits_grid(like.double(), (10, 1, 32))
