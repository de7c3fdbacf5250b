"""Parameters of T-GCN are folded into weights of a step, and narrow steps by them are torch's in double precision."""

import pytest
import torch

from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.ops.snapshots.run_recurrent_cells import (
    fits,
    fold_by_torch,
    fold_gates,
    is_narrow,
    step_folded,
    step_folded_by_torch,
    suits_folded,
)
from tests.poison import poisoned_memory

# Nodes, features and channels for one kernel: nodes of several blocks, and the bounds of all widths; and more.
NARROW = [(200, 4, 16), (64, 8, 16), (65, 3, 17), (130, 8, 32), (33, 0, 32), (1, 1, 1), (5000, 7, 9), (9100, 4, 31)]
WIDER = [(70, 9, 16), (70, 4, 33)]
sizes = pytest.mark.parametrize("size", [(5, 3), (1, 1), (32, 8), (7, 0)], ids=str)


def make(shape, dtype=torch.float32, device="cpu"):
    nodes, features, channels = shape
    generator = torch.Generator().manual_seed(0)
    shapes = [(nodes, features), (nodes, channels), (channels + features + 1, 3 * channels)]
    return [torch.randn(size, generator=generator, dtype=dtype).to(device).requires_grad_() for size in shapes]


def make_parameters(size, dtype=torch.float32, device="cpu"):
    channels, features = size
    generator = torch.Generator().manual_seed(1)
    shapes = [(channels, features), (channels,), (channels, 2 * channels), (channels,)]
    return [torch.randn(shape, generator=generator, dtype=dtype).to(device).requires_grad_()
            for shape in shapes for _ in range(3)]  # fmt: skip


def fold(parameters):
    """Fold by kernels if there are some."""
    assert fits(parameters, *parameters[0].shape, parameters[0])
    return fold_gates(parameters) if runs_on_gpu(parameters[0]) else fold_by_torch(parameters)


def step(*values):
    return step_folded(*values) if is_narrow(*values[:2]) else step_folded_by_torch(*values)


def pull(way, values, grad):
    return torch.autograd.grad(way(*values), values, grad)


def assert_near(got, expected):
    """Check closeness within the rounding of fp32 sums of as many numbers."""
    largest = max([1, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=3e-6 * largest)


@sizes
def test_folded_weights_are_what_layers_compute_one_after_the_other(device, size):
    parameters = make_parameters(size, device=device)
    channels, features = size
    x, state = torch.randn(6, features, device=device), torch.randn(6, channels, device=device)

    with poisoned_memory():
        weights = fold(parameters)

    for gate in range(3):
        conv, conv_bias, linear, linear_bias = parameters[gate::3]
        expected = torch.cat([x @ conv.t() + conv_bias, state], 1) @ linear.t() + linear_bias
        columns = weights[:, gate * channels : (gate + 1) * channels]
        got = state @ columns[:channels] + x @ columns[channels:-1] + columns[-1]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@sizes
def test_gradients_come_back_to_the_parameters(device, size):
    parameters, grad = make_parameters(size, device=device), torch.randn(sum(size) + 1, 3 * size[0]).to(device)
    exact = [parameter.detach().double().requires_grad_() for parameter in parameters]

    with poisoned_memory():
        got = torch.autograd.grad(fold(parameters), parameters, grad)

    for mine, expected in zip(got, torch.autograd.grad(fold_by_torch(exact), exact, grad.double()), strict=True):
        assert_near(mine, expected)


@pytest.mark.parametrize("wanted", range(12))
def test_parameters_that_need_no_gradient_get_none(device, wanted):
    parameters = [parameter.detach() for parameter in make_parameters((4, 3), device=device)]
    parameters[wanted].requires_grad_()

    fold(parameters).square().sum().backward()

    assert [parameter.grad is None for parameter in parameters] == [place != wanted for place in range(12)]


def test_parameters_between_whose_numbers_others_lie(device):
    parameters = make_parameters((4, 3), device=device)
    spread = [torch.stack([parameter, parameter], -1)[..., 0] for parameter in parameters]
    assert not spread[0].is_contiguous()

    torch.testing.assert_close(fold(spread), fold_by_torch(parameters))


def test_gradients_of_folded_weights_have_gradients(device):
    parameters = make_parameters((3, 2), device=device)

    def twice(way):
        first = torch.autograd.grad(way(parameters).square().sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), parameters)

    for mine, expected in zip(twice(fold), twice(fold_by_torch), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-3)


def test_what_gradients_have_come_back_through_says_so(device):
    if not runs_on_gpu(torch.empty(0, device=device)):
        return
    is_spent = [False]
    weights = fold_gates(make_parameters((3, 2), device=device), is_spent)
    assert is_spent == [False]

    weights.sum().backward()

    assert is_spent == [True]


def test_torch_keeps_nothing_for_folding(device):
    if not runs_on_gpu(torch.empty(0, device=device)):
        return
    kept = []

    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        fold_gates(make_parameters((3, 2), device=device))

    assert kept == []


def test_parameters_that_change_before_their_gradients_come_are_told(device):
    parameters = make_parameters((3, 2), device=device)
    if not runs_on_gpu(parameters[0]):
        return
    loss = fold_gates(parameters).square().sum()

    with torch.no_grad():
        parameters[7].add_(1)

    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


@pytest.mark.parametrize("shape", NARROW + WIDER, ids=str)
def test_steps_have_the_gradients_of_torch_in_double_precision(real_device, shape):
    values, grad = make(shape, device=real_device), torch.randn(shape[0], shape[2]).to(real_device)
    assert is_narrow(*values[:2]) == (shape in NARROW and values[0].is_cuda)
    exact = [value.detach().double().requires_grad_() for value in values]

    with poisoned_memory():
        out = step(*values)
        got = torch.autograd.grad(out, values, grad)

    torch.testing.assert_close(out.double(), step_folded_by_torch(*exact), rtol=1e-5, atol=1e-5)
    for mine, expected in zip(got, pull(step_folded_by_torch, exact, grad.double()), strict=True):
        assert_near(mine, expected)


def test_a_step_gives_the_same_bits_each_time(real_device):
    values, grad = make((3000, 4, 16), device=real_device), torch.randn(3000, 16).to(real_device)

    first, second = pull(step, values, grad), pull(step, values, grad)

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("wanted", range(3))
def test_what_needs_no_gradient_gets_none(real_device, wanted):
    values = [value.detach() for value in make((70, 3, 5), device=real_device)]
    values[wanted].requires_grad_()
    (expected,) = torch.autograd.grad(step_folded_by_torch(*values).sum(), values[wanted : wanted + 1])

    step(*values).sum().backward()

    torch.testing.assert_close(values[wanted].grad, expected, rtol=1e-4, atol=1e-4)
    assert [value.grad is None for value in values] == [place != wanted for place in range(3)]


def test_gradients_of_steps_have_gradients(real_device):
    values = make((7, 4, 5), device=real_device)

    def twice(way):
        first = torch.autograd.grad(way(*values).sum(), values, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), values)

    for mine, expected in zip(twice(step), twice(step_folded_by_torch), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_many_gradients_at_once_are_those_one_by_one(real_device):
    values, grads = make((7, 4, 5), device=real_device), torch.randn(3, 7, 5).to(real_device)
    out = step(*values)

    got = torch.autograd.grad(out, values, grads, is_grads_batched=True, retain_graph=True)

    each = [torch.autograd.grad(out, values, grad, retain_graph=True) for grad in grads]
    for mine, expected in zip(got, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_input_and_state_may_be_one_tensor(real_device):
    values = make((40, 3, 3), device=real_device)
    values[0] = values[1]
    expected = torch.autograd.grad(step_folded_by_torch(*values).sum(), values[1:])

    for mine, theirs in zip(torch.autograd.grad(step(*values).sum(), values[1:]), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_rows_between_which_others_lie(real_device):
    values = make((40, 3, 2), device=real_device)
    spread = [torch.stack([value, torch.zeros_like(value)], -1)[..., 0] for value in values]
    assert not spread[1].is_contiguous()

    torch.testing.assert_close(step(*spread), step_folded_by_torch(*values), rtol=1e-4, atol=1e-5)


def test_a_node_whose_numbers_are_infinite_leaves_others_alone(real_device):
    values = [value.detach() for value in make((40, 3, 9), device=real_device)]
    expected = step(*values)
    values[1][7], values[1][8], values[0][9] = float("inf"), float("nan"), float("-inf")

    got = step(*values)

    others = torch.tensor([n for n in range(40) if n not in (7, 8, 9)], device=real_device)
    assert torch.equal(got[others], expected[others])
    torch.testing.assert_close(got, step_folded_by_torch(*values), equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_nothing_is_kept_for_the_gradient_of_a_narrow_step():
    values = make((4096, 4, 16), device="cuda")
    state = step_folded(*values)
    before = torch.cuda.memory_allocated()

    after = step_folded(values[0], state, values[2])

    assert torch.cuda.memory_allocated() - before == 4 * after.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("why", [None, "half", "wide", "nodes", "parameters", "device", "empty", "autocast"])
def test_what_kernels_do_not_take_is_left_to_torch(why):
    x, state, _ = (value.detach() for value in make((7, 3, 5), device="cuda"))
    parameters = make_parameters((5, 3), device="cuda")
    given = {
        None: lambda: (x, state, parameters),
        "half": lambda: (x.half(), state.half(), [parameter.half() for parameter in parameters]),
        "wide": lambda: (x.repeat(1, 3), state, make_parameters((5, 9), device="cuda")),
        "nodes": lambda: (x[:3], state, parameters),
        "parameters": lambda: (x, state, [*parameters[:-1], parameters[-1].double()]),
        "device": lambda: (x, state, [*parameters[:-1], parameters[-1].cpu()]),
        "empty": lambda: (x[:0], state[:0], parameters),
    }

    if why == "autocast":
        with torch.autocast("cuda", torch.bfloat16):
            assert not suits_folded(x, state, parameters)
    else:
        assert suits_folded(*given[why]()) == (why is None)
