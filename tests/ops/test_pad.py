"""Edges of a batch in places of fixed size: equal to the reference, sorted, and apart from what fills the rest."""

import pytest
import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.ops.pad import fits, pad_edges
from tests.nn.convolutions import EDGES, NODES, Batch
from tests.poison import poisoned_memory
from tests.reference import pad as reference

PLACES = {"more": ([6, 12, 13], [20, 37]), "as many": (NODES, EDGES), "more nodes": ([5, 10, 12], EDGES),
          "many for one": ([5, 10, 12], [30, 60])}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", PLACES)
def test_matches_reference(device, case, dtype):
    node_places, edge_places = PLACES[case]
    edge_index = Batch(device).edge_index.to(dtype)
    expected = reference.pad_edges(*edge_index.tolist(), NODES, EDGES, node_places, edge_places)

    with poisoned_memory():
        out = torch.empty(2, sum(edge_places), dtype=dtype, device=device)
        pad_edges(edge_index, NODES, EDGES, node_places, edge_places, out)

    got = list(zip(*out.tolist(), strict=True))
    assert [edge for edge, known in zip(got, expected, strict=True) if known] == [edge for edge in expected if edge]
    assert bool((out[1].diff() >= 0).all())
    real = set(reference.place_nodes(NODES, node_places))
    spare = [edge for edge, known in zip(got, expected, strict=True) if not known]
    assert all(source == target and target not in real for source, target in spare)
    first, second = node_places[0], sum(node_places[:2])
    assert all(target < first for target in out[1, : edge_places[0]].tolist())
    assert all(first <= target < second for target in out[1, edge_places[0] :].tolist())


def test_what_is_left_is_shared_out_evenly(device):
    out = torch.empty(2, sum(PLACES["more"][1]), dtype=torch.int64, device=device)

    pad_edges(Batch(device).edge_index, NODES, EDGES, *PLACES["more"], out)

    assert out[1, EDGES[0] : 20].bincount().tolist() == [0, 0, 0, 0, 2, 2]
    assert sorted(out[1, 20 + EDGES[1] :].bincount().tolist()[-3:]) == [2, 2, 3]


@pytest.mark.parametrize(("node_places", "edge_places", "most", "expected"), [
    (NODES, EDGES, None, True), ([4, 9, 11], EDGES, None, False), ([5, 9, 12], [17, 30], None, True),
    (NODES, [17, 30], None, False), ([5, 9, 12], [20, 30], 3, False), ([6, 9, 12], [20, 30], 3, True),
])  # fmt: skip
def test_room_is_told(node_places, edge_places, most, expected):
    assert fits(NODES, EDGES, node_places, edge_places, most) is expected


def test_arguments_are_checked():
    edge_index, out = Batch().edge_index, torch.empty(2, 57, dtype=torch.int64)
    node_places, edge_places = PLACES["more"]

    with pytest.raises(ArgumentError, match=r"one number more than edges .* got 2, 3, 2 and 2"):
        pad_edges(edge_index, NODES[:2], EDGES, node_places, edge_places, out)
    with pytest.raises(ArgumentError, match=r"must hold \[4, 9, 12\] nodes"):
        pad_edges(edge_index, NODES, EDGES, NODES, edge_places, out)
    with pytest.raises(ArgumentError, match=r"must be \[2, 46\] and \[2, 57\]"):
        pad_edges(edge_index, NODES, EDGES, node_places, edge_places, out[:, :3])
    with pytest.raises(ArgumentError, match=r"out must be torch\.int64 on cpu, got torch\.int32"):
        pad_edges(edge_index, NODES, EDGES, node_places, edge_places, out.int())
