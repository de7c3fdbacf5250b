"""Groups of snapshots that memory has no room for are aggregated in halves, in the first layer and in later ones."""

import pytest
import torch

from pyg_direct.dynamic import stream
from pyg_direct.dynamic.nn import TGCN
from pyg_direct.dynamic.sequence_edges import GCN
from pyg_direct.ops.snapshots import aggregate as ops
from tests.dynamic.stream.test_stream import CHANNELS, NODES, make_list


@pytest.mark.parametrize(
    ("most", "groups"), [(8, [8]), (4, [8, 4, 4]), (1, [8, 4, 2, 1, 1, 2, 1, 1, 4, 2, 1, 1, 2, 1, 1])]
)
def test_groups_that_memory_has_no_room_for_are_halved(monkeypatch, most, groups):
    calls = []

    def aggregate(x, *args):
        calls.append(x.shape[1])
        if x.shape[1] > most:
            raise torch.OutOfMemoryError("no room")
        return ops.aggregate_snapshots(x, *args)

    snapshots, layer = make_list(8), TGCN(CHANNELS, 5)
    given = stream(snapshots, "cpu", group_size=8)
    monkeypatch.setattr("pyg_direct.dynamic.snapshot_plan.aggregate_snapshots", aggregate)

    for got, plain in zip(given, snapshots, strict=True):
        expected = layer(plain.x, plain.edge_index, plain.edge_attr)
        torch.testing.assert_close(layer(got.x, got.edge_index, got.edge_attr), expected, rtol=1e-4, atol=1e-5)

    assert calls == groups
    told = [line for line in given.plan.decisions if "memory ran out" in line]
    assert len(told) == sum(size > most for size in groups)


@pytest.mark.parametrize("memory", [None, "1G"])
@pytest.mark.parametrize(("most", "groups"), [(8, [8]), (4, [4, 4]), (1, [1] * 8)])
def test_groups_of_later_layers_are_halved_too(monkeypatch, memory, most, groups):
    def multiply(x, parts, transposed=False):
        parts = list(parts)
        if max(part.matrices.num_snapshots for part in parts) > most:
            raise torch.OutOfMemoryError("no room")
        sizes.append([part.matrices.num_snapshots for part in parts])
        return ops.multiply_parts(x, parts, transposed)

    sizes = []
    plan = stream(make_list(8), "cpu", group_size=8, memory=memory).plan
    x = torch.rand(NODES, 8, CHANNELS)
    expected = plan.multiply_window(GCN(), x)
    monkeypatch.setattr("pyg_direct.dynamic.snapshot_plan.multiply_parts", multiply)

    torch.testing.assert_close(plan.multiply_window(GCN(), x), expected)
    plan.multiply_window(GCN(), x, first=0, transposed=True)

    assert sizes == [groups, groups]
    assert sum("memory ran out" in line for line in plan.decisions) == len(groups) - 1
    plan.visit(range(8))
    # The matrices of groups that had no room are gone.
    assert plan.describe()["matrix_bytes"] == plan.budget.used > 0


def test_later_layers_that_are_short_of_one_snapshot_are_an_error(monkeypatch):
    def multiply(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("pyg_direct.dynamic.snapshot_plan.multiply_parts", multiply)
    plan = stream(make_list(2), "cpu", group_size=2).plan

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        plan.multiply_window(GCN(), torch.rand(NODES, 2, CHANNELS))


def test_memory_that_is_short_of_one_snapshot_is_an_error(monkeypatch):
    def aggregate(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("pyg_direct.dynamic.snapshot_plan.aggregate_snapshots", aggregate)
    snapshot = stream(make_list(2), "cpu", group_size=2)[0]

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        TGCN(CHANNELS, 5)(snapshot.x, snapshot.edge_index, snapshot.edge_attr)
