"""`HeteroTopo`: one id space, rows of all relations, sorted by time; invalid graphs are refused."""

import pickle
from itertools import pairwise

import pytest
import torch

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.graph import placed_topology
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import HeteroTopo
from tests.hetero_graphs import make_parts, make_topo

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
NUM_NODES = {"paper": 3, "author": 2}
EDGES = {WRITES: torch.tensor([[0, 1, 1, 0], [2, 0, 2, 2]]), CITES: torch.tensor([[2, 1], [0, 0]])}


def read_rows(topo, edge_type):
    """[(neighbors, edge ids)] of the rows of a relation, ids within the types."""
    number = topo.edge_types.index(edge_type)
    first_row, end_row = topo.row_starts[number : number + 2]
    indptr = topo.indptr[first_row : end_row + 1].tolist()
    start = int(topo.type_starts[topo.reached[number]])
    return [([int(n) - start for n in topo.indices[a:b]], topo.edge_ids[a:b].tolist())
            for a, b in pairwise(indptr)]  # fmt: skip


def test_types_and_relations_share_one_space():
    topo = HeteroTopo(NUM_NODES, EDGES)

    assert topo.type_starts.tolist() == [0, 1024, 2048]
    assert topo.num_edges == {WRITES: 4, CITES: 2}
    assert read_rows(topo, WRITES) == [([1], [1]), ([], []), ([0, 1, 0], [0, 2, 3])]
    assert read_rows(topo, CITES) == [([2, 1], [0, 1]), ([], []), ([], [])]


def test_rows_are_the_sources_in_the_other_direction():
    topo = HeteroTopo(NUM_NODES, EDGES, direction="out")

    assert read_rows(topo, WRITES) == [([2, 2], [0, 3]), ([0, 2], [1, 2])]


@pytest.mark.parametrize("form", ["rows", "topology"])
def test_rows_are_taken_as_they_are(form):
    indptr, indices, edge_ids = torch.tensor([0, 1, 1, 4]), torch.tensor([1, 0, 1, 0]), torch.tensor([1, 0, 2, 3])
    rows = (indptr, indices, edge_ids) if form == "rows" else CSRTopo(indptr=indptr, indices=indices, eid=edge_ids)

    topo = HeteroTopo(NUM_NODES, {WRITES: rows, CITES: EDGES[CITES]})

    assert read_rows(topo, WRITES) == read_rows(HeteroTopo(NUM_NODES, EDGES), WRITES)


def test_rows_are_sorted_by_the_times_of_edges():
    topo = HeteroTopo(NUM_NODES, EDGES, edge_time={WRITES: torch.tensor([7, 1, 3, 3])})

    assert read_rows(topo, WRITES)[2] == ([1, 0, 0], [2, 3, 0])
    assert topo.timed.tolist() == [True, False]


def test_rows_are_sorted_by_the_times_of_neighbors():
    topo = HeteroTopo(NUM_NODES, EDGES, node_time={"author": torch.tensor([5, 4])})

    assert read_rows(topo, WRITES)[2] == ([1, 0, 0], [2, 0, 3])


def test_weights_follow_their_edges():
    weight = torch.tensor([0.5, 1.5, 2.5, 3.5])

    topo = HeteroTopo(NUM_NODES, EDGES, edge_weight={WRITES: weight}, edge_time={WRITES: torch.tensor([7, 1, 3, 3])})

    assert topo.edge_weight[:4].tolist() == weight[topo.edge_ids[:4].long()].tolist()


@pytest.mark.parametrize(("weight", "dtype"), [
    (torch.tensor([0.5, 1e-40, 2, 3]), torch.float32),
    (torch.tensor([0.5, 1.5, 2, 3], dtype=torch.float64), torch.float32),
    (torch.tensor([0.5, 1e-50, 2, 3], dtype=torch.float64), torch.float64),
    (torch.tensor([0.5, 1e300, 2, 3], dtype=torch.float64), torch.float64),
    (torch.tensor([1, 2**24 + 1, 2, 3]), torch.float64),
    (torch.tensor([1, 2**30, 2, 0]), torch.float32),
    (torch.tensor([0.5, 1.5, 2, 3], dtype=torch.bfloat16), torch.float32),
    (torch.tensor([True, False, True, True]), torch.float32),
])  # fmt: skip
def test_weights_keep_their_values(weight, dtype):
    topo = HeteroTopo(NUM_NODES, EDGES, edge_weight={WRITES: weight})

    assert topo.edge_weight.dtype == dtype
    assert topo.edge_weight[:4].tolist() == weight.double()[topo.edge_ids[:4].long()].tolist()


def test_edge_ids_beyond_the_number_of_edges_are_kept():
    edges = {WRITES: CSRTopo(indptr=torch.tensor([0, 1, 2, 3]), indices=torch.tensor([1, 0, 0]),
                             eid=torch.tensor([2**40 + 1, 5, 2**31]))}  # fmt: skip

    topo = HeteroTopo(NUM_NODES, edges)

    assert topo.edge_ids.tolist() == [2**40 + 1, 5, 2**31]


def test_unsorted_rows_are_found_when_they_should_be_sorted():
    with pytest.raises(ArgumentError, match="is_sorted=True needs rows sorted by time, but row 2"):
        HeteroTopo(NUM_NODES, EDGES, edge_time={WRITES: torch.tensor([7, 1, 3, 3])}, is_sorted=True)


def test_sorted_rows_are_kept():
    edges = {WRITES: (torch.tensor([0, 0, 0, 3]), torch.tensor([1, 0, 0]), None)}

    topo = HeteroTopo(NUM_NODES, edges, edge_time={WRITES: torch.tensor([1, 1, 6])}, is_sorted=True)

    assert topo.edge_time.tolist() == [1, 1, 6]
    assert topo.edge_ids.numel() == 0


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"direction": "up"}, ArgumentError, "direction must be 'in' or 'out'"),
    ({"num_nodes": {"paper": 3, "author": -1}}, ArgumentError, "num_nodes must hold integers of at least 0, got -1"),
    ({"num_nodes": {"paper": 3}}, ArgumentError, "edges must join known node types"),
    ({"num_nodes": {"paper": 3, "author": 1}}, IdError, r"must lie in \[0, 1\) \(num_nodes\['author'\]\), got 1"),
    ({"edges": {WRITES: torch.zeros(3, 2)}}, ArgumentError, r"must have shape \[2, E\]"),
    ({"edges": {WRITES: [[0], [0]]}}, ArgumentTypeError, "must be an edge list, a CSRTopo or"),
    ({"edges": {WRITES: (torch.tensor([0, 1]), torch.tensor([0]), None)}}, ArgumentError, "must have 3 rows"),
    ({"edges": {WRITES: (torch.tensor([0, 2, 1, 1]), torch.tensor([0]), None)}}, ArgumentError, "not decrease"),
    ({"node_time": {"author": torch.zeros(2, dtype=torch.int64)}, "edge_time": {}}, ArgumentError, "not both"),
    ({"node_time": {"author": torch.zeros(3, dtype=torch.int64)}}, ArgumentError, r"must have shape \(2,\)"),
    ({"node_time": {"author": torch.zeros(2)}}, ArgumentTypeError, "must hold integers"),
    ({"node_time": {"venue": torch.zeros(2)}}, ArgumentError, "node_time must name known types"),
    ({"edge_time": {WRITES: torch.zeros(4)}}, ArgumentTypeError, "must hold integers"),
    ({"edge_time": {WRITES: torch.tensor([0, -1, 2, 3]).view(torch.uint64)}}, ArgumentError, r"below 2\*\*63, got 184"),
    ({"edge_time": {WRITES: torch.zeros(5, dtype=torch.int64)}}, ArgumentError, "edge_time.* must have shape"),
    ({"edge_weight": {WRITES: torch.tensor([1j, 1, 1, 1])}}, ArgumentTypeError, "must hold real numbers, got torch"),
    ({"edge_weight": {WRITES: torch.tensor([1.0, -1, 1, 1])}}, ArgumentError, "not negative, got -1.0"),
    ({"edge_weight": {WRITES: torch.tensor([1.0, float("nan"), 1, 1])}}, ArgumentError, "not negative, got nan"),
    ({"edge_weight": {WRITES: torch.tensor([1.0, float("inf"), 1, 1])}}, ArgumentError, "must be finite"),
    ({"edge_weight": torch.ones(4)}, ArgumentTypeError, "edge_weight must map types to tensors"),
])  # fmt: skip
def test_bad_arguments_are_refused(change, error, message):
    arguments = {"num_nodes": NUM_NODES, "edges": EDGES, **change}

    with pytest.raises(error, match=message):
        HeteroTopo(**arguments)


def test_placing_twice_gives_one_copy(device):
    topo = make_topo(make_parts(times="node", weighted=True))

    first, second = topo.place("auto", device), topo.place("auto", device)

    assert first is second
    assert {array.device.type for array in first.rows} == {device.type}


def test_small_arrays_go_to_the_gpu_and_others_stay_with_the_neighbors(monkeypatch):
    monkeypatch.setattr(placed_topology, "free_bytes", lambda index: 8000)
    gpu = torch.device("cuda", 0)

    places = [
        placed_topology.prefer_gpu(torch.zeros(size, dtype=torch.int64), "unified", gpu) for size in (0, 125, 126)
    ]

    assert places == ["cuda", "cuda", "unified"]


@pytest.mark.gpu
def test_only_neighbors_are_read_from_the_host_where_the_rest_is_small():
    topo = make_topo(make_parts(times="node", weighted=True)).place("unified", "cuda")

    assert [block.placement for block in topo.blocks] == ["unified"]
    assert topo.rows.indices.data_ptr() == topo.blocks[0].view_on_gpu(torch.int32, (480,), topo.device).data_ptr()


def test_placement_that_a_cpu_cannot_read_is_refused():
    with pytest.raises(ArgumentError, match="placement must be one that device=cpu can read, got 'cuda'"):
        make_topo(make_parts()).place("cuda", "cpu")


def test_topology_can_be_sent():
    topo = make_topo(make_parts(times="edge", weighted=True))
    topo.place(device="cpu")

    copy = pickle.loads(pickle.dumps(topo))

    assert repr(copy) == repr(topo) == "HeteroTopo(4 types, 69 nodes, 5 relations, 480 edges)"
    for ours, theirs in zip(copy.place(device="cpu").rows, topo.place(device="cpu").rows, strict=True):
        assert torch.equal(ours, theirs)


def test_arrays_are_made_beside_the_edges_whatever_device_is_the_default():
    edges, times, weights = torch.tensor([[0, 1], [1, 1]]), torch.tensor([3, 4]), torch.tensor([1.0, 2])
    expected = HeteroTopo(2, edges, node_time=times, edge_weight=weights)
    with torch.device("meta"):
        topo = HeteroTopo(2, edges, node_time=times, edge_weight=weights)
        rows, other = (made.place("cpu", "cpu").with_running_weights() for made in (topo, expected))

    assert [array.tolist() for array in rows] == [array.tolist() for array in other]


def test_weights_may_stand_in_a_column():
    edges, weights = torch.tensor([[0, 1, 2], [1, 1, 0]]), torch.tensor([3.0, 1.0, 2.0])

    flat, column = (HeteroTopo(3, edges, edge_weight=w) for w in (weights, weights.view(-1, 1)))

    assert column.edge_weight.tolist() == flat.edge_weight.tolist() == [2.0, 3.0, 1.0]


def test_messages_about_a_graph_without_types_have_no_names_of_types():
    edges = torch.tensor([[0, 1], [1, 0]])

    with pytest.raises(ArgumentError, match=r"^edge_weight must have shape \(2,\), got \(3,\)"):
        HeteroTopo(2, edges, edge_weight=torch.ones(3))
    with pytest.raises(ArgumentError, match=r"^node_time must have shape \(2,\), got \(3,\)"):
        HeteroTopo(2, edges, node_time=torch.arange(3))
