"""Edges of a batch in places of fixed size: equal to the reference, sorted, and separate from the padding."""

import pytest
import torch

from pyg_direct.ops.aggregate.build_edge_layout import Targets, fits, write_places
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
        write_places(edge_index, NODES, EDGES, node_places, edge_places, out)

    got = list(zip(*out.tolist(), strict=True))
    assert [edge for edge, known in zip(got, expected, strict=True) if known] == [edge for edge in expected if edge]
    assert bool((out[1].diff() >= 0).all())
    real = set(reference.place_nodes(NODES, node_places))
    spare = [edge for edge, known in zip(got, expected, strict=True) if not known]
    assert all(source == target and target not in real for source, target in spare)
    first, second = node_places[0], sum(node_places[:2])
    assert all(target < first for target in out[1, : edge_places[0]].tolist())
    assert all(first <= target < second for target in out[1, edge_places[0] :].tolist())


SOURCES, TARGETS = [2, 5, 6], [3, 4, 0]


def make_relation(device, dtype=torch.int64):
    """Edges of a relation between two types: to hop after hop of the targets, from sources known by then."""
    first, second = torch.randint(3, (EDGES[0],)).sort().values, torch.randint(3, 7, (EDGES[1],)).sort().values
    source = torch.cat([torch.randint(7, (EDGES[0],)), torch.randint(13, (EDGES[1],))])
    return torch.stack([source, torch.cat([first, second])]).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("source_places", "target_places", "edge_places"), [
    ([2, 6, 7], [4, 5, 0], [20, 37]), (SOURCES, TARGETS, EDGES), ([3, 8, 9], [5, 4, 2], [18, EDGES[1]]),
], ids=["more", "as many", "more in one hop"])  # fmt: skip
def test_edges_between_two_types_match_reference(device, source_places, target_places, edge_places, dtype):
    edge_index, targets = make_relation(device, dtype), Targets(TARGETS, target_places)
    expected = reference.pad_edges(*edge_index.tolist(), SOURCES, EDGES, source_places, edge_places, targets)

    with poisoned_memory():
        out = torch.empty(2, sum(edge_places), dtype=dtype, device=device)
        write_places(edge_index, SOURCES, EDGES, source_places, edge_places, out, targets)

    got = list(zip(*out.tolist(), strict=True))
    assert [edge for edge, known in zip(got, expected, strict=True) if known] == [edge for edge in expected if edge]
    assert bool((out[1].diff() >= 0).all())
    real_sources = set(reference.place_nodes(SOURCES, source_places))
    real_targets = set(reference.place_nodes(TARGETS, target_places))
    spare = [edge for edge, known in zip(got, expected, strict=True) if not known]
    assert not any(source in real_sources or target in real_targets for source, target in spare)
    for hop, edges in enumerate((got[: edge_places[0]], got[edge_places[0] :])):
        assert all(source < sum(source_places[: hop + 2]) for source, _ in edges)
        assert all(sum(target_places[:hop]) <= target < sum(target_places[: hop + 1]) for _, target in edges)


def test_edges_between_two_types_that_are_left_over_need_both_ends():
    places = {"node_places": [2, 6, 7], "edge_places": [20, 37]}

    assert fits(SOURCES, EDGES, **places, targets=Targets(TARGETS, [4, 5, 0]))
    assert not fits(SOURCES, EDGES, **places, targets=Targets(TARGETS, [4, 4, 0]))
    assert not fits(SOURCES, EDGES, **places, targets=Targets(TARGETS, [2, 5, 0]))
    assert not fits(SOURCES, EDGES, **places, targets=Targets(TARGETS, [4, 5, 0]), most_edges=3)
    assert not fits(SOURCES, EDGES, [3, 5, 7], [20, 37], targets=Targets(TARGETS, [4, 5, 0]))


def test_what_is_left_is_shared_out_evenly(device):
    out = torch.empty(2, sum(PLACES["more"][1]), dtype=torch.int64, device=device)

    write_places(Batch(device).edge_index, NODES, EDGES, *PLACES["more"], out)

    assert out[1, EDGES[0] : 20].bincount().tolist() == [0, 0, 0, 0, 2, 2]
    assert sorted(out[1, 20 + EDGES[1] :].bincount().tolist()[-3:]) == [2, 2, 3]


@pytest.mark.parametrize(("node_places", "edge_places", "most", "expected"), [
    (NODES, EDGES, None, True), ([4, 9, 11], EDGES, None, False), ([5, 9, 12], [17, 30], None, True),
    (NODES, [17, 30], None, False), ([5, 9, 12], [20, 30], 3, False), ([6, 9, 12], [20, 30], 3, True),
])  # fmt: skip
def test_room_is_told(node_places, edge_places, most, expected):
    assert fits(NODES, EDGES, node_places, edge_places, most) is expected
