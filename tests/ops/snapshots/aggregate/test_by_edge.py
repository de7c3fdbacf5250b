"""Aggregation of snapshots edge by edge: equal to dense products both ways, and used for batches of gradients."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.ops.snapshots.aggregate import Part, aggregate_by_edge, aggregate_snapshots, multiply_parts
from tests.ops.snapshots.aggregate.test_snapshots import FORMS, NUM_NODES, assert_near, build, dense, make_rows
from tests.reference import snapshots as reference
from tests.snapshots import drawn_snapshots, make_snapshots


def pull(got, x, grads, way):
    """Gradients of `x`, many at once."""
    if way == "mapped":
        return torch.func.vmap(lambda grad: torch.autograd.grad(got, x, grad)[0])(grads)
    return torch.autograd.grad(got, x, grads, is_grads_batched=True)[0]


@given(drawn=drawn_snapshots(), form=st.sampled_from(["split", "mask"]), transposed=st.booleans())
def test_any_snapshots_match_reference(drawn, form, transposed):
    num_nodes, snapshots = drawn
    matrices = build(snapshots, "cpu", form, num_nodes=num_nodes)
    x = make_rows(len(snapshots), 2, "cpu", num_nodes)

    got = aggregate_by_edge(x, matrices.pieces, (matrices.row, matrices.column, matrices.diagonal), 0, transposed)

    expected = [m.T if transposed else m for m in dense(snapshots, num_nodes)]
    assert_near(got, reference.aggregate(expected, x.double().numpy()))


@pytest.mark.parametrize(("form", "weighted"), FORMS)
@pytest.mark.parametrize("way", ["batched", "mapped"])
def test_gradients_come_in_batches(real_device, form, weighted, way):
    snapshots = make_snapshots(count=4, weighted=weighted)
    matrices = build(snapshots, real_device, form)
    x, grads = make_rows(2, 3, real_device).requires_grad_(), torch.randn(5, NUM_NODES, 2, 3, device=real_device)
    out = aggregate_snapshots(x, matrices, low=1)
    expected = torch.stack([torch.autograd.grad(out, x, grad, retain_graph=True)[0] for grad in grads])

    got = pull(out, x, grads, way)

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_several_groups_may_be_a_batch(transposed):
    parts = [Part(build(make_snapshots(count=count, seed=count), "cpu"), 1, count - 1) for count in (2, 4)]
    rows = torch.randn(5, NUM_NODES, 4, 3)

    got = torch.func.vmap(lambda x: multiply_parts(x, parts, transposed))(rows)

    expected = torch.stack([multiply_parts(x, parts, transposed) for x in rows])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
