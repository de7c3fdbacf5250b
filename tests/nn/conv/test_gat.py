"""Attention over sorted edges: PyG's results in one launch on a GPU; scores that are found before the matrix."""

import copy

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv

from pyg_direct import accelerate
from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.nn.conv.gat import _Scores
from pyg_direct.ops.run_kernel import runs_on_gpu
from tests.launches import TWO_LAUNCHES, counted_launches, of_attention
from tests.nn.convolutions import WIDTH, Batch, assert_near

LAYERS = {
    "gat": lambda **options: GATConv(WIDTH, 8, heads=3, **options),
    "gat of 1 channel": lambda **options: GATConv(WIDTH, 1, heads=2, concat=False, **options),
    "gat of 3 channels": lambda **options: GATConv(WIDTH, 3, heads=2, residual=True, **options),
    "gat of one head, summed first": lambda **options: GATConv(WIDTH, 16, **options),
    "gat of two kinds of rows": lambda **options: GATConv((WIDTH, WIDTH), 8, heads=2, **options),
    "gatv2": lambda **options: GATv2Conv(WIDTH, 8, heads=2, **options),
    "gatv2 of 3 channels": lambda **options: GATv2Conv(WIDTH, 3, share_weights=True, **options),
}


def expected_launches(x, name):
    """Heads of 3 and 1 channels are no multiple of 16 bytes, of which the simulator knows none."""
    if runs_on_gpu(x) and not SIMULATED and "channel" not in name:
        return ["attend_rows_gpu"]
    place = "gpu" if runs_on_gpu(x) else "cpu"
    return TWO_LAUNCHES[place]


def give(conv, x):
    return (x, x[:13]) if isinstance(conv.in_channels, tuple) else x


def run_layer(conv, batch, x, grad):
    """Return (result, gradients of x and of the parameters, operators that ran forward)."""
    x = x.clone().requires_grad_()
    with counted_launches() as names:
        out = conv(give(conv, x), batch.edge_index)
    return [out, *torch.autograd.grad(out, [x, *conv.parameters()], grad[: len(out)])], names


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("given_loops", [False, True], ids=["no loops given", "loops given"])
@pytest.mark.parametrize("adds_loops", [False, True], ids=["none added", "loops added"])
def test_layers_equal_pyg_in_one_launch(device, name, given_loops, adds_loops):
    batch, conv = Batch(device, given_loops), LAYERS[name](add_self_loops=adds_loops).to(device)
    x = torch.randn(batch.num_nodes, WIDTH, device=device)
    grad = torch.randn(batch.num_nodes, 48, device=device)
    width = conv.out_channels * (conv.heads if conv.concat else 1)
    expected, _ = run_layer(conv, batch, x, grad[:, :width])

    accelerate(conv)
    got, names = run_layer(conv, batch, x, grad[:, :width])

    assert_near(got, expected)
    assert of_attention(names) == expected_launches(x, name)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_of_16_bits_equal_pyg(device, name, dtype):
    batch, conv = Batch(device), LAYERS[name]().to(device, dtype)
    # Rounding would decide on which side of its bend a score lies.
    conv.negative_slope = 1.0
    x, double = torch.randn(batch.num_nodes, WIDTH, device=device).to(dtype), copy.deepcopy(conv).double()
    grad = torch.ones(batch.num_nodes, conv.out_channels * (conv.heads if conv.concat else 1), device=device)
    expected, _ = run_layer(double, batch, x.double(), grad.double())

    accelerate(conv)
    got, names = run_layer(conv, batch, x, grad.to(dtype))

    # The rounding error grows with the largest item.
    scales = [max(1.0, float(item.detach().abs().max())) for item in expected]
    assert_near([g.double() / s for g, s in zip(got, scales, strict=True)],
                [e / s for e, s in zip(expected, scales, strict=True)], 2e-2, 2e-2)  # fmt: skip
    assert of_attention(names) == expected_launches(x, name)


def test_weights_that_are_dropped_take_two_launches(device):
    batch, conv = Batch(device), GATConv(WIDTH, 4, heads=2, dropout=1.0).to(device)
    x, names = torch.randn(batch.num_nodes, WIDTH, device=device), {}
    accelerate(conv)

    for is_training in (True, False):
        with counted_launches() as names[is_training]:
            got = conv.train(is_training)(x, batch.edge_index)
        assert torch.equal(got, conv.bias.expand_as(got)) == is_training

    assert of_attention(names[True]) == expected_launches(x, "1 channel")
    assert of_attention(names[False]) == expected_launches(x, "gat")


def test_autocast_takes_two_launches(device):
    batch, conv = Batch(device), GATConv(WIDTH, 4, heads=2).to(device)
    x = torch.randn(batch.num_nodes, WIDTH, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        expected = conv(x, batch.edge_index)
    accelerate(conv)

    with torch.autocast(device.type, torch.bfloat16), counted_launches() as names:
        got = conv(x, batch.edge_index)

    assert_near([got.float()], [expected.float()], 2e-2, 2e-2)
    assert of_attention(names) == expected_launches(x, "1 channel")


@pytest.mark.parametrize("num_targets", [0, 2, 5])
def test_scores_are_those_of_rows_behind_their_matrix(num_targets):
    rows, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (4, 3)))
    to_source, to_target = (torch.randn(1, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    source, target = _Scores.apply(rows, weight, to_source, to_target, num_targets)

    made = rows @ weight.t()
    torch.testing.assert_close(source, made @ to_source.view(4, 1))
    torch.testing.assert_close(target, made[:num_targets] @ to_target.view(4, 1))


def test_gradcheck():
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True)
             for shape in ((5, 3), (4, 3), (1, 1, 4), (1, 1, 4))]  # fmt: skip

    def compute(*args):
        return _Scores.apply(*args, 2)

    assert torch.autograd.gradcheck(compute, given)
    assert torch.autograd.gradgradcheck(compute, given)
