import pickle

import pytest
import torch
from hypothesis import given
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, IdError, PlacementWarning
from pyg_direct.graph import csr_topo
from pyg_direct.graph.csr_topo import CSRTopo
from tests.graphs import GRAPHS, Graph, make_graph, odd_graphs
from tests.reference.compress import compress

GRAPH = GRAPHS["self loops"]
# The in-neighbors of GRAPH, written out: every way to describe the same graph must give these.
INDPTR, INDICES, EDGE_IDS = [0, 2, 5, 5, 6], [0, 1, 1, 1, 2, 3], [0, 1, 2, 3, 4, 5]


def read_rows(topo):
    """Return (indptr, indices, edge ids) in lists; the position of an edge if it is its id."""
    positions = torch.arange(topo.edge_count)
    return tuple(array.tolist() for array in (topo.indptr, topo.indices, positions if topo.eid is None else topo.eid))


def make_rows(dtype=torch.int32):
    return torch.tensor(INDPTR), torch.tensor(INDICES, dtype=dtype)


@pytest.mark.parametrize("name", GRAPHS)
def test_edges_become_rows_of_in_neighbors(device, name):
    graph = GRAPHS[name]

    topo = CSRTopo(graph.edge_index.to(device), num_nodes=graph.num_nodes)

    assert read_rows(topo) == graph.in_rows()
    assert (topo.node_count, topo.edge_count) == (graph.num_nodes, graph.edge_index.shape[1])
    assert (topo.indptr.dtype, topo.indices.dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("name", GRAPHS)
def test_direction_out_lists_the_targets(name):
    graph = GRAPHS[name]
    sources, targets = graph.edge_index.tolist()

    topo = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes, direction="out")

    assert read_rows(topo) == compress(sources, targets, graph.num_nodes)


@given(graph=odd_graphs())
def test_no_edge_is_lost(graph):
    topo = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)

    indptr, indices, edge_ids = read_rows(topo)
    rows = [row for row in range(graph.num_nodes) for _ in range(indptr[row], indptr[row + 1])]
    edges = dict(zip(edge_ids, zip(indices, rows, strict=True), strict=True))
    assert [edges[edge] for edge in range(topo.edge_count)] == [tuple(edge) for edge in graph.edge_index.t().tolist()]


def test_numpy_arrays_are_taken_as_they_come():
    rows = tuple(array.numpy() for array in make_rows())
    for array in rows:
        # As a memory map that is only read.
        array.flags.writeable = False

    of_rows, of_edges = CSRTopo(indptr=rows[0], indices=rows[1]), CSRTopo(GRAPH.edge_index.numpy())

    assert read_rows(of_rows) == (INDPTR, INDICES, EDGE_IDS)
    assert read_rows(of_edges) == GRAPH.in_rows()


def test_numpy_may_count_nodes_and_give_bytes_in_another_order():
    edges = GRAPH.edge_index.numpy()

    topo = CSRTopo(edges.astype(edges.dtype.newbyteorder()), num_nodes=edges.max() + 1)

    assert read_rows(topo) == GRAPH.in_rows()


def test_nodes_are_counted_from_the_ids():
    topo = CSRTopo(make_graph(9, [(0, 3), (6, 1)]).edge_index)

    assert topo.node_count == 7


def test_no_edges_and_no_count_make_no_nodes():
    topo = CSRTopo(torch.empty(2, 0, dtype=torch.int64))

    assert (topo.node_count, topo.edge_count, topo.indptr.tolist()) == (0, 0, [0])


def test_strided_edges_are_read_as_they_look():
    edges = GRAPH.edge_index.t().contiguous().t()

    topo = CSRTopo(edges, num_nodes=4)

    assert not edges.is_contiguous()
    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)


def test_rows_are_made_beside_the_edges_whatever_device_is_the_default():
    with torch.device("meta"):
        topo = CSRTopo(GRAPH.edge_index, num_nodes=4)

    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_taken_as_they_are(dtype):
    indptr, indices = make_rows(dtype)

    topo = CSRTopo(indptr=indptr, indices=indices)

    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)
    assert topo.indices.dtype == torch.int32
    assert topo.eid is None


def test_rows_keep_their_edge_ids():
    indptr, indices = make_rows()
    eid = torch.tensor([10, 11, 5, 4, 3, 2])

    topo = CSRTopo(indptr=indptr, indices=indices, eid=eid)

    assert read_rows(topo) == (INDPTR, INDICES, eid.tolist())


def test_direction_leaves_rows_alone():
    indptr, indices = make_rows()

    topo = CSRTopo(indptr=indptr, indices=indices, direction="out")

    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)


def test_torch_csr_gives_its_rows():
    adjacency = torch.sparse_csr_tensor(torch.tensor(INDPTR), torch.tensor(INDICES), torch.ones(6), (4, 4))

    topo = CSRTopo(adjacency)

    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)


def test_torch_csc_gives_its_columns():
    adjacency = torch.sparse_csc_tensor(
        torch.tensor(INDPTR, dtype=torch.int32), torch.tensor(INDICES, dtype=torch.int32), torch.ones(6), (4, 4)
    )

    topo = CSRTopo(adjacency)

    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)
    assert topo.indptr.dtype == torch.int64


@pytest.mark.sparse
def test_sparse_tensor_gives_its_rows():
    from torch_sparse import SparseTensor

    sources, targets = GRAPH.edge_index
    adj_t = SparseTensor(row=targets, col=sources, sparse_sizes=(4, 4))

    topo = CSRTopo(adj_t)

    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)


@pytest.mark.sparse
def test_sparse_tensor_that_is_not_square_is_refused():
    from torch_sparse import SparseTensor

    adj_t = SparseTensor(row=torch.tensor([0]), col=torch.tensor([4]), sparse_sizes=(2, 5))

    with pytest.raises(ArgumentError, match="a sparse adjacency must be square, got 2 x 5"):
        CSRTopo(adj_t)


@pytest.mark.parametrize("order", [None, "row", "col"])
def test_edge_index_of_pyg_knows_its_nodes(order):
    edges = EdgeIndex(GRAPHS["trailing"].edge_index, sparse_size=(40, 40))
    edges = edges if order is None else edges.sort_by(order).values

    topo = CSRTopo(edges)

    assert topo.node_count == 40
    assert read_rows(topo) == Graph(edges.as_tensor(), 40).in_rows()


def test_data_knows_its_nodes():
    graph = GRAPHS["trailing"]

    topo = CSRTopo(Data(edge_index=graph.edge_index, num_nodes=40))

    assert topo.node_count == 40
    assert read_rows(topo) == graph.in_rows()


def test_data_counts_its_features():
    topo = CSRTopo(Data(x=torch.zeros(11, 2), edge_index=GRAPH.edge_index))

    assert topo.node_count == 11


def test_data_with_adj_t_gives_its_rows():
    adj_t = torch.sparse_csr_tensor(torch.tensor(INDPTR), torch.tensor(INDICES), torch.ones(6), (4, 4))

    topo = CSRTopo(Data(adj_t=adj_t))

    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)


def test_properties_follow_quiver():
    topo = CSRTopo(GRAPH.edge_index, num_nodes=4)

    topo.feature_order = torch.tensor([3, 2, 1, 0])

    assert topo.degree.tolist() == [2, 3, 0, 1]
    assert topo.feature_order.tolist() == [3, 2, 1, 0]
    assert topo.num_bytes == 5 * 8 + 6 * 4 + 6 * 4
    assert repr(topo) == "CSRTopo(4 nodes, 6 edges)"


def test_feature_order_is_none_at_first():
    topo = CSRTopo(GRAPH.edge_index, num_nodes=4)

    assert topo.feature_order is None


def test_shared_memory_holds_the_same_rows():
    topo = CSRTopo(GRAPH.edge_index, num_nodes=4)

    got = topo.share_memory_()

    assert got is topo
    assert all(array.is_shared() for array in (topo.indptr, topo.indices, topo.eid))
    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)


def test_pickle_holds_the_same_rows():
    topo = CSRTopo(GRAPH.edge_index, num_nodes=4)
    topo.feature_order = torch.arange(4)
    topo.place("cpu", "cpu")

    copy = pickle.loads(pickle.dumps(topo))

    assert read_rows(copy) == (INDPTR, INDICES, EDGE_IDS)
    assert copy.feature_order.tolist() == [0, 1, 2, 3]
    assert copy.place("cpu", "cpu").num_edges == 6


def test_placed_rows_are_the_topologys_own_on_the_cpu():
    topo = CSRTopo(GRAPH.edge_index, num_nodes=4)

    placed = topo.place("auto", "cpu")

    assert placed is topo.place("cpu", "cpu")
    assert placed.placement == topo.choose_placement("cpu") == "cpu"
    assert placed.indices.data_ptr() == topo.indices.data_ptr()
    assert (placed.num_nodes, placed.num_edges, placed.device) == (4, 6, torch.device("cpu"))


def test_a_topology_goes_to_the_host_if_gpu_memory_runs_out(monkeypatch):
    topo, place, tried = CSRTopo(GRAPH.edge_index, num_nodes=4), CSRTopo._place, []

    def run_out(self, placement, device):
        tried.append(placement)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")
        return place(self, placement, device)

    monkeypatch.setattr(CSRTopo, "_place", run_out)
    # What a GPU would choose, by the CPU.
    monkeypatch.setattr(csr_topo, "choose_host_memory", lambda index: "cpu")

    with pytest.warns(
        PlacementWarning, match="the topology goes to cpu memory, as GPU memory ran out: CUDA out of mem"
    ):
        placed = topo.place("auto", "cpu")

    assert placed.num_edges == 6
    assert len(tried) == 2


def test_a_chosen_place_without_room_is_an_error(monkeypatch):
    def run_out(self, placement, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CSRTopo, "_place", run_out)

    with pytest.raises(torch.OutOfMemoryError):
        CSRTopo(GRAPH.edge_index, num_nodes=4).place("cpu", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_placed_rows_are_readable_on_the_gpu(placement):
    topo = CSRTopo(GRAPH.edge_index, num_nodes=4)

    placed = topo.place(placement, "cuda")

    assert placed.placement == placement
    assert [placed.indptr.tolist(), placed.indices.tolist(), placed.edge_ids.tolist()] == [INDPTR, INDICES, EDGE_IDS]
    assert placed.device.type == placed.indices.device.type == "cuda"
    assert read_rows(topo) == (INDPTR, INDICES, EDGE_IDS)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_pickle_of_placed_rows_holds_the_same_rows(placement):
    topo = CSRTopo(GRAPH.edge_index, num_nodes=4)
    topo.place(placement, "cuda")

    copy = pickle.loads(pickle.dumps(topo))

    assert read_rows(copy) == (INDPTR, INDICES, EDGE_IDS)


@pytest.mark.gpu
def test_auto_prefers_gpu_memory():
    placed = CSRTopo(GRAPH.edge_index, num_nodes=4).place("auto", "cuda")

    assert placed.placement == "cuda"


@pytest.mark.gpu
def test_a_gpu_reads_no_ordinary_memory():
    topo = CSRTopo(GRAPH.edge_index, num_nodes=4)

    with pytest.raises(ArgumentError, match="placement must be one that device=cuda:0 can read, got 'cpu'"):
        topo.place("cpu", "cuda")


@pytest.mark.parametrize(("placement", "words"), [
    ("cuda", "one that device=cpu can read"), ("unified", "one that device=cpu can read"),
    ("mmap", "one of auto, cuda, unified, pinned, cpu, peer"),
    ("disk", "one of auto, cuda, unified, pinned, cpu, peer"),
])  # fmt: skip
def test_a_cpu_reads_ordinary_memory_only(placement, words):
    topo = CSRTopo(GRAPH.edge_index, num_nodes=4)

    with pytest.raises(ArgumentError, match=f"placement must be {words}, got '{placement}'"):
        topo.place(placement, "cpu")


def test_a_missing_gpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(DeviceError, match="device='cuda' asks for a GPU"):
        CSRTopo(GRAPH.edge_index, num_nodes=4).place("cuda", "cuda")


EDGES = GRAPH.edge_index


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({}, ArgumentError, "give either edge_index, or indptr and indices together"),
    ({"edge_index": EDGES, "indptr": EDGES[0]}, ArgumentError, "give either edge_index, or indptr and indices"),
    ({"indptr": EDGES[0]}, ArgumentError, "give either edge_index, or indptr and indices together"),
    ({"edge_index": EDGES, "direction": "both"}, ArgumentError, "direction must be 'in' or 'out', got 'both'"),
    ({"edge_index": EDGES, "num_nodes": 3}, IdError, r"must lie in \[0, 3\) \(num_nodes\), got 3"),
    ({"edge_index": EDGES, "num_nodes": -1}, ArgumentError, "num_nodes must be an integer of at least 0, got -1"),
    ({"edge_index": EDGES, "num_nodes": 4.0}, ArgumentError, r"num_nodes must be an integer of at least 0, got 4\.0"),
    ({"edge_index": -EDGES, "num_nodes": 4}, IdError, r"must lie in \[0, 4\) \(num_nodes\), got -3"),
    ({"edge_index": -1 - EDGES}, IdError, r"edge_index must lie in \[0, 0\) \(num_nodes\), got -4"),
    ({"edge_index": EDGES.float()}, ArgumentTypeError, "edge_index must have dtype int64 or int32, got torch.float32"),
    ({"edge_index": EDGES.t()}, ArgumentError, r"edge_index must have shape \[2, E\], got \(6, 2\)"),
    ({"edge_index": EDGES[0]}, ArgumentError, r"edge_index must have shape \[2, E\], got \(6,\)"),
    ({"edge_index": [[0], [1]]}, ArgumentTypeError, "edge_index must be a tensor .*, got list"),
    ({"edge_index": torch.eye(2).to_sparse()}, ArgumentError, "with layout torch.sparse_coo"),
    ({"edge_index": torch.ones(2, 3).to_sparse_csr()}, ArgumentError, "adjacency must be square, got 2 x 3"),
    ({"edge_index": torch.ones(2, 3, 3).to_sparse_csr()}, ArgumentError, "must be square, got 2 x 3 x 3"),
    ({"edge_index": Data()}, ArgumentError, "data must hold edge_index or adj_t, got neither"),
])  # fmt: skip
def test_bad_edges_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        CSRTopo(**arguments)


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"indptr": torch.tensor([0, 3, 2, 6])}, ArgumentError, "indptr must not decrease, got 3 before 2"),
    ({"indptr": torch.tensor([1, 2, 5, 5, 6])}, ArgumentError, "from 0 to the number of edges 6, got 1 to 6"),
    ({"indptr": torch.tensor([0, 2, 5, 5, 7])}, ArgumentError, "from 0 to the number of edges 6, got 0 to 7"),
    ({"indptr": torch.tensor([0, 2, 6])}, IdError, r"indices must lie in \[0, 2\), got 3"),
    ({"indptr": torch.tensor(INDPTR).int()}, ArgumentTypeError, r"indptr must be int64 .* got torch.int32"),
    ({"indptr": torch.empty(0, dtype=torch.int64)}, ArgumentTypeError, r"indptr must be int64 with shape \[N \+ 1\]"),
    ({"indices": torch.tensor(INDICES).float()}, ArgumentTypeError, "indices must be int32 or int64"),
    ({"indices": torch.tensor([0, 1, -1, 1, 2, 3])}, IdError, r"indices must lie in \[0, 4\), got -1"),
    ({"num_nodes": 5}, ArgumentError, r"num_nodes must equal len\(indptr\) - 1 = 4, got 5"),
    ({"eid": torch.arange(5)}, ArgumentError, r"eid must be int32 or int64 of shape \(6,\), got torch.int64 of \(5,\)"),
    ({"eid": torch.zeros(6)}, ArgumentError, "eid must be int32 or int64 .* got torch.float32"),
])  # fmt: skip
def test_bad_rows_are_refused(changes, error, words):
    indptr, indices = make_rows()

    with pytest.raises(error, match=words):
        CSRTopo(**({"indptr": indptr, "indices": indices} | changes))


def test_hetero_data_is_named_as_not_supported():
    data = HeteroData()
    data["paper"].num_nodes = 2

    with pytest.raises(NotImplementedError, match="data must have one node type and one relation; loaders take"):
        CSRTopo(data)


@pytest.mark.parametrize(
    ("name", "indptr", "indices"),
    [("indptr", [0, 1], torch.tensor([0])), ("indices", torch.tensor([0, 1]), [0]),
     ("eid", torch.tensor([0, 1]), torch.tensor([0]))],
)  # fmt: skip
def test_rows_that_are_no_tensors_are_refused(name, indptr, indices):
    with pytest.raises(ArgumentTypeError, match=f"{name} must be a tensor, got list"):
        CSRTopo(indptr=indptr, indices=indices, eid=[0])


@pytest.mark.parametrize("layout", [torch.sparse_csc, torch.sparse_coo])
def test_an_adjacency_that_is_not_compressed_by_row_is_refused_in_data(layout):
    data = Data(adj_t=torch.eye(3).to_sparse(layout=layout), num_nodes=3)

    with pytest.raises(ArgumentError, match=r"data.adj_t must be compressed by row; call to_sparse_csr\(\)"):
        CSRTopo(data)
