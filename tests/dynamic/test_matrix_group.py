"""Groups of snapshots: which mode their weights take, and that every mode is exact."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.dynamic.matrix_group import FORMS, build_group, choose_values, describe_edges, lay_apart
from pyg_direct.dynamic.sequence_edges import GCN, Chebyshev, Factors, Mean, Sum
from pyg_direct.dynamic.snapshot import join_edges
from pyg_direct.errors import ArgumentError
from pyg_direct.ops.snapshots.aggregate import aggregate_snapshots
from tests.reference import snapshots as reference
from tests.snapshots import drawn_snapshots, make_snapshots, order_snapshots


def factorise(snapshots, num_nodes=12):
    return [Sum().factorise(s) for s in order_snapshots(snapshots, num_nodes)]


@given(drawn=drawn_snapshots(), form=st.sampled_from(FORMS), values=st.sampled_from([None, "stacked", "move"]))
def test_every_mode_is_exact(drawn, form, values):
    num_nodes, snapshots = drawn
    x = torch.rand(num_nodes, len(snapshots), 2)
    values = None if (form, values) == ("mask", "move") else values

    got = aggregate_snapshots(x, build_group(factorise(snapshots, num_nodes), num_nodes, form, values))

    matrices = [reference.matrix(*s, num_nodes) for s in snapshots]
    torch.testing.assert_close(got.double(), torch.from_numpy(reference.aggregate(matrices, x.double().numpy())))


@pytest.mark.parametrize("operator", [Sum(), GCN(), Mean(), Chebyshev("rw")], ids=str)
@given(drawn=drawn_snapshots())
def test_snapshots_apart_are_those_one_by_one(drawn, operator):
    num_nodes, snapshots = drawn
    x = torch.rand(len(snapshots), num_nodes, 2)
    factors = [operator.factorise(s) for s in order_snapshots(snapshots, num_nodes)]

    got = aggregate_snapshots(x.view(-1, 1, 2), lay_apart(factors, num_nodes)).view_as(x)

    for rows, f, mine in zip(x, factors, got, strict=True):
        torch.testing.assert_close(mine, aggregate_snapshots(rows.unsqueeze(1), build_group([f], num_nodes)).squeeze(1))


@pytest.mark.parametrize("operator", [Sum(), GCN(), GCN(True), GCN(False, False), Mean(), Chebyshev("rw", 3)], ids=str)
@given(drawn=drawn_snapshots(), weighted=st.booleans())
def test_a_graph_of_all_snapshots_has_their_factors(operator, drawn, weighted):
    num_nodes, snapshots = drawn
    edges = [torch.from_numpy(e) for e, _ in snapshots]
    weights = [torch.arange(e.shape[1]) / 2 for e in edges] if weighted else [None] * len(edges)
    joined = join_edges(edges, weights, num_nodes)
    x = torch.rand(len(edges) * num_nodes, 1, 2)

    assert operator.is_local
    got = aggregate_snapshots(x, lay_apart([operator.factorise(joined.graph)], joined.graph.num_nodes))

    apart = lay_apart([operator.factorise(part) for part in joined.split()], num_nodes)
    torch.testing.assert_close(got, aggregate_snapshots(x, apart), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_equal_weights_are_held_once(weighted):
    edges, weight = make_snapshots(count=1, weighted=weighted)[0]
    again = [(edges, weight)] * 4

    (overlap,) = build_group(factorise(again), 12, values=None).pieces

    assert overlap.snapshot is None
    # Parallel edges without weights add up to some.
    assert overlap.weight.shape[1] == 1


@pytest.mark.parametrize(("factor", "values", "expected"), [
    (None, None, "weights of one"), (1, None, "a weight an edge"), (2, "stacked", "a weight an edge and snapshot"),
])  # fmt: skip
def test_weights_are_told_in_words(factor, values, expected):
    keys, weight = torch.arange(10), torch.rand(10)
    weights = [None, None] if factor is None else [weight, factor * weight]

    group = build_group([Factors(keys, weight, None, None, None) for weight in weights], 10, "split", values)

    assert describe_edges(group) == f"split, {expected}, {group.num_bytes:,} bytes"


def test_snapshots_without_weights_hold_none():
    edges = torch.tensor([[0, 1], [1, 2]]).numpy()

    pieces = build_group(factorise([(edges, None)] * 2), 12).pieces

    assert all(piece.weight is None for piece in pieces)


def test_unequal_weights_move_to_the_exclusives_only_where_they_are_few():
    keys = torch.arange(10)
    first = torch.ones(10)
    for changed, stays_shared in ((2, False), (7, True)):
        second = torch.where(keys < changed, 2.0, 1.0)
        factors = [Factors(keys, weight, None, None, None) for weight in (first, second)]

        counts = [piece.num_edges for piece in build_group(factors, 10).pieces]

        assert counts == ([10] if stays_shared else [10 - changed, 2 * changed])


def test_modes_are_chosen_by_bytes():
    assert [choose_values(q, True) for q in (1.0, 0.7, 0.5, 0.4, 0.0)] == ["shared", "move", "move", "stacked",
                                                                           "stacked"]  # fmt: skip
    assert choose_values(0.0, False) == "ones"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "union"}, "split, mask"),
        ({"values": "equal"}, "ones, shared"),
        ({"values": "ones"}, "have weights"),
        ({"values": "shared"}, "weigh the same"),
        ({"form": "mask", "values": "move"}, "no exclusives"),
    ],
)
def test_modes_that_cannot_hold_the_weights_are_refused(options, message):
    keys = torch.arange(3)
    factors = [Factors(keys, weight, None, None, None) for weight in (torch.rand(3), torch.rand(3))]

    with pytest.raises(ArgumentError, match=message):
        build_group(factors, 3, **options)


@pytest.mark.parametrize(("change", "count"), [(0.0, 1), (0.5, 2)])
def test_structures_without_edges_are_left_out(change, count):
    snapshots = make_snapshots(count=2, change=change)

    assert len(build_group(factorise(snapshots), 12).pieces) == count


def test_a_group_without_edges_has_a_structure():
    nothing = [(np.empty((2, 0), dtype=np.int64), None)] * 2

    assert [piece.num_edges for piece in build_group(factorise(nothing), 12).pieces] == [0]
