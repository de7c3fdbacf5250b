"""Aggregation of several snapshots at once: equal to dense products, whatever the form, the mode and the kernel."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.dynamic.matrix_group import build_group
from pyg_direct.dynamic.sequence_edges import GCN, Sum
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.snapshots import aggregate as ops
from pyg_direct.ops.snapshots.aggregate import aggregate_snapshots
from tests.poison import poisoned_memory
from tests.reference import snapshots as reference
from tests.snapshots import drawn_snapshots, make_snapshots, order_snapshots

NUM_NODES = 12
# Below, at and above the size of a warp; with and without pieces of 16 bytes.
CHANNELS = [1, 2, 3] if SIMULATED else [1, 2, 3, 4, 8, 16, 33]
FORMS = [("split", False), ("split", True), ("mask", False), ("mask", True)]


def build(snapshots, device, form="split", operator=None, num_nodes=NUM_NODES, **options):
    ordered = order_snapshots(snapshots, num_nodes, device)
    return build_group([(operator or GCN()).factorise(s) for s in ordered], num_nodes, form, **options)


def make_rows(count, channels, device, num_nodes=NUM_NODES):
    return torch.randint(-4, 5, (num_nodes, count, channels), device=device).div(4)


def dense(snapshots, num_nodes=NUM_NODES):
    return [reference.gcn(*snapshot, num_nodes) for snapshot in snapshots]


def assert_near(got, expected):
    torch.testing.assert_close(got.double().cpu(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("count", [1, 3] if SIMULATED else [1, 2, 4, 8])
@pytest.mark.parametrize(("form", "weighted"), FORMS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.full
def test_matches_reference_in_both_directions(device, channels, count, form, weighted, deterministic):
    snapshots = make_snapshots(count=count, weighted=weighted, hub=True, num_edges=90)
    matrices = build(snapshots, device, form)
    x, grad = (make_rows(count, channels, device) for _ in range(2))
    x.requires_grad_()

    with poisoned_memory():
        got = aggregate_snapshots(x, matrices, deterministic=deterministic)
        got.backward(grad)

    expected = dense(snapshots)
    assert_near(got.detach(), reference.aggregate(expected, x.detach().cpu().double().numpy()))
    assert_near(x.grad, reference.aggregate([m.T for m in expected], grad.cpu().double().numpy()))


@given(drawn=drawn_snapshots(), form=st.sampled_from(["split", "mask"]), channels=st.integers(1, 3))
def test_any_snapshots_match_reference(device, drawn, form, channels):
    num_nodes, snapshots = drawn
    x = make_rows(len(snapshots), channels, device, num_nodes)

    got = aggregate_snapshots(x, build(snapshots, device, form, num_nodes=num_nodes))

    assert_near(got, reference.aggregate(dense(snapshots, num_nodes), x.cpu().double().numpy()))


@pytest.mark.parametrize("kernel", ["narrow", "plain"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["split", "mask"])
def test_each_gpu_kernel_adds_the_same(device, monkeypatch, kernel, channels, form):
    snapshots = make_snapshots(count=2, weighted=True, hub=True, num_edges=90)
    x = make_rows(2, channels, device)
    monkeypatch.setattr(ops, "choose_kernel", lambda *args: kernel)

    got = aggregate_snapshots(x, build(snapshots, device, form))

    assert_near(got, reference.aggregate(dense(snapshots), x.cpu().double().numpy()))


@pytest.mark.parametrize("form", ["split", "mask"])
def test_gradients_match_the_reference(device, form):
    snapshots = make_snapshots(count=4, weighted=True)
    x, grad = make_rows(4, 3, device).requires_grad_(), make_rows(4, 3, device)

    aggregate_snapshots(x, build(snapshots, device, form)).backward(grad)

    assert_near(x.grad, reference.aggregate([m.T for m in dense(snapshots)], grad.cpu().double().numpy()))


@pytest.mark.parametrize("form", ["split", "mask"])
def test_gradients_have_gradients(device, form):
    snapshots = make_snapshots(count=2, weighted=True)
    matrices, x = build(snapshots, device, form), make_rows(2, 2, device).requires_grad_()
    scale = make_rows(2, 2, device).requires_grad_()

    out = aggregate_snapshots(x, matrices)
    (grad,) = torch.autograd.grad((out * scale).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad((grad * grad).sum(), scale)

    both = [m @ m.T for m in dense(snapshots)]
    assert_near(again, reference.aggregate(both, 2 * scale.detach().cpu().double().numpy()))


def test_symmetric_matrices_are_held_once(device):
    pairs = np.array([[0, 1, 1, 2, 4], [1, 0, 2, 1, 4]])
    matrices = build([(pairs, None)] * 2, device)

    assert matrices.by_source() is matrices.pieces
    assert build(make_snapshots(count=2), device).by_source() is not matrices.pieces


@pytest.mark.parametrize("form", ["split", "mask"])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 3), (2, 4), (0, 4)])
def test_part_of_a_group_is_exact(device, form, low, high):
    snapshots = make_snapshots(count=4, weighted=True)
    x = make_rows(high - low, 3, device).requires_grad_()

    got = aggregate_snapshots(x, build(snapshots, device, form), low)
    got.sum().backward()

    part = dense(snapshots)[low:high]
    assert_near(got.detach(), reference.aggregate(part, x.detach().cpu().double().numpy()))
    assert_near(x.grad, reference.aggregate([m.T for m in part], np.ones(tuple(x.shape))))


@pytest.mark.parametrize("form", ["split", "mask"])
def test_what_is_not_a_number_stays_in_its_snapshot(device, form):
    only_first = [(np.array([[0], [1]]), None), (np.array([[2], [1]]), None)]
    x = torch.ones(3, 2, 1, device=device)
    x[0, 1] = float("nan")

    got = aggregate_snapshots(x, build(only_first, device, form, Sum(), num_nodes=3))

    assert got[1].view(-1).tolist() == [1, 1]


def test_double_precision_is_kept(device):
    snapshots = make_snapshots(count=2)
    x = torch.rand(NUM_NODES, 2, 3, dtype=torch.float64, device=device)

    got = aggregate_snapshots(x, build(snapshots, device, operator=Sum()))

    expected = reference.aggregate([reference.matrix(*s, NUM_NODES) for s in snapshots], x.cpu().numpy())
    torch.testing.assert_close(got.cpu(), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


def test_deterministic_calls_are_equal(device):
    snapshots = make_snapshots(count=4, weighted=True, hub=True, num_edges=300)
    matrices, x = build(snapshots, device), torch.rand(NUM_NODES, 4, 3, device=device)

    first, *others = (aggregate_snapshots(x, matrices, deterministic=True) for _ in range(4))

    assert all(torch.equal(first, other) for other in others)


def test_wrong_rows_are_refused():
    matrices = build(make_snapshots(count=2), "cpu")

    with pytest.raises(ArgumentTypeError, match="fp32 or float64"):
        aggregate_snapshots(torch.ones(NUM_NODES, 2, 1).half(), matrices)
    with pytest.raises(ArgumentError, match="group of 2"):
        aggregate_snapshots(torch.ones(NUM_NODES, 2, 1), matrices, low=1)
    with pytest.raises(ArgumentError, match="12 nodes"):
        aggregate_snapshots(torch.ones(3, 2, 1), matrices)


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_several_groups_are_those_of_each(device, transposed):
    split = build(make_snapshots(count=4, weighted=True), device, "split")
    mask = build(make_snapshots(count=2, weighted=True), device, "mask")
    x = make_rows(4, 3, device)

    got = ops.multiply_parts(x, iter([ops.Part(split, 1, 3), ops.Part(mask, 0, 1)]), transposed)

    expected = [ops.multiply_snapshots(x[:, :3].contiguous(), split, 1, transposed),
                ops.multiply_snapshots(x[:, 3:].contiguous(), mask, 0, transposed)]  # fmt: skip
    torch.testing.assert_close(got, torch.cat(expected, 1))
