"""Generated dynamic graphs change as much as asked, and are drawn again by their seed."""

import pytest
import torch

from benchmarks.dynamic.snapshots import measure_overlap
from pyg_direct.datasets.dynamic_graphs import DynamicShape, draw_snapshots, synthetic_dtdg
from pyg_direct.dynamic.snapshot import order_edges
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.snapshots.slice_csr import unite


@pytest.mark.parametrize("change", [0.0, 0.1, 1.0])
def test_edges_change_as_asked(change):
    snapshots = draw_snapshots(DynamicShape(2000, 5000, 3, change))

    assert all(edges.shape == (2, 5000) for edges in snapshots)
    found = measure_overlap(unite([order_edges(edges, None, 2000).keys for edges in snapshots]))
    assert found.change_rate == pytest.approx([change] * 2, abs=0.02)


def test_equal_seeds_give_equal_graphs():
    first, again, other = (synthetic_dtdg(50, 200, 3, weighted=True, seed=seed) for seed in (3, 3, 4))

    assert all(torch.equal(a[key], b[key]) for a, b in zip(first, again, strict=True) for key in a.keys())  # noqa: SIM118
    assert not torch.equal(first[0].x, other[0].x)


def test_degrees_are_skewed():
    edges = draw_snapshots(DynamicShape(1000, 20_000, 1))[0]

    degree = torch.bincount(edges[1], minlength=1000).sort(descending=True).values
    assert degree[:100].sum() > 0.25 * degree.sum()


@pytest.mark.parametrize("shape", [DynamicShape(0, 1), DynamicShape(1, 0), DynamicShape(5, 5, 2, 1.5)])
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(ArgumentError, match="shape"):
        draw_snapshots(shape)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"num_features": 0}, "num_features must be at least 1, got 0"),
    ({"num_nodes": 2.5}, "shape.num_nodes must be an integer, got 2.5"),
    ({"change": "some"}, "shape.change must be a number, got 'some'"),
])  # fmt: skip
def test_arguments_that_are_none_are_named(arguments, message):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        synthetic_dtdg(**arguments)
