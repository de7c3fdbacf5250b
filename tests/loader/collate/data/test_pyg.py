"""What a batch takes from `Data`, attribute by attribute; what loaders over one `Data` share."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pyg_direct import NeighborLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader.collate import attributes as placed_rows, data as pyg
from pyg_direct.runtime.host.host_memory import parse_size
from tests.batches import assert_equal_batches, check_contract, make_data
from tests.graphs import make_random_graph

NODE_ATTRIBUTES = {
    "float16": lambda n: torch.randn(n, 3).half(),
    "bfloat16, one number": lambda n: torch.randn(n).bfloat16(),
    "mask": lambda n: torch.arange(n) % 3 == 0,
    "int8 images": lambda n: torch.arange(n * 12).view(n, 2, 3, 2).to(torch.int8),
    "complex": lambda n: torch.randn(n, 2, dtype=torch.complex64),
    "strided": lambda n: torch.randn(4, n).t(),
    "with gradient": lambda n: torch.randn(n, 3, requires_grad=True),
    "no width": lambda n: torch.empty(n, 0),
}
ARRAYS = {
    "float64": lambda n: np.arange(n * 3, dtype=np.float64).reshape(n, 3),
    "mask": lambda n: np.arange(n) % 3 == 0,
    "int16": lambda n: np.arange(n, dtype=np.int16),
    "backwards": lambda n: np.arange(n * 3.0).reshape(n, 3)[::-1, ::-1],
    "Fortran order": lambda n: np.asfortranarray(np.arange(n * 3.0).reshape(n, 3)),
}


def load_one(data, device, seeds=(5, 9), **options):
    """The single batch around the seeds."""
    (batch,) = NeighborLoader(data, [3, 2], torch.tensor(seeds), batch_size=99, seed=5, device=device, **options)
    return batch


@pytest.mark.parametrize("name", NODE_ATTRIBUTES)
def test_node_attributes_follow_the_nodes(real_device, name):
    data = make_data(extra=NODE_ATTRIBUTES[name](70))
    expected = data.extra.detach().clone()

    batch = load_one(data, real_device)

    assert torch.equal(batch.extra.cpu(), expected[batch.n_id.cpu()])
    assert (batch.extra.dtype, batch.extra.device.type) == (expected.dtype, real_device.type)


@pytest.mark.parametrize("name", NODE_ATTRIBUTES)
def test_edge_attributes_follow_the_edges(real_device, name):
    data = make_data(extra=NODE_ATTRIBUTES[name](600))
    expected = data.extra.detach().clone()

    batch = load_one(data, real_device)

    assert torch.equal(batch.extra.cpu(), expected[batch.e_id.cpu()])


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_arrays_become_tensors(real_device, name):
    data = make_data(extra=ARRAYS[name](70), edge_extra=ARRAYS[name](600))

    batch = load_one(data, real_device).cpu()

    assert torch.equal(batch.extra, torch.tensor(data.extra[batch.n_id.numpy()]))
    assert torch.equal(batch.edge_extra, torch.tensor(data.edge_extra[batch.e_id.numpy()]))


def test_sparse_rows_follow_the_nodes(real_device):
    data = make_data(words=torch.eye(70).to_sparse())

    batch = load_one(data, real_device)

    assert (batch.words.layout, batch.words.device.type) == (torch.sparse_coo, real_device.type)
    assert torch.equal(batch.words.to_dense().argmax(1), batch.n_id)


@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=repr)
def test_a_graph_without_edges_need_not_list_them(real_device, options):
    data = Data(x=torch.arange(9.0))

    batch = load_one(data, real_device, seeds=[5, 8], **options)

    assert batch.x.tolist() == [5, 8]
    assert (batch.num_sampled_nodes, batch.num_sampled_edges) == ([2, 0, 0], [0, 0])


def test_memory_mapped_features_are_read_from_their_file(real_device, tmp_path):
    rows = np.arange(70 * 4, dtype=np.float32).reshape(70, 4)
    np.save(tmp_path / "x.npy", rows)
    data = make_data(x=np.load(tmp_path / "x.npy", mmap_mode="r"))

    batch = load_one(data, real_device)

    assert isinstance(data.x, np.memmap)
    assert torch.equal(batch.x.cpu(), torch.from_numpy(rows)[batch.n_id.cpu()])


def test_a_list_of_a_value_for_each_node_is_sliced(real_device):
    data = make_data(names=[f"node {i}" for i in range(70)])

    batch = load_one(data, real_device)

    assert batch.names == [f"node {i}" for i in batch.n_id.tolist()]


def test_a_list_of_a_value_for_each_edge_is_sliced(real_device):
    data = make_data(names=[f"edge {i}" for i in range(600)])

    batch = load_one(data, real_device)

    assert batch.names == [f"edge {i}" for i in batch.e_id.tolist()]


def test_everything_else_passes_through(real_device):
    data = make_data(name="graph", scale=0.5, table=torch.arange(11), point=torch.tensor(3.0), words=["a", "b"])

    batch = load_one(data, real_device)

    assert (batch.name, batch.scale, batch.words) == ("graph", 0.5, ["a", "b"])
    assert batch.table.tolist() == list(range(11))
    assert float(batch.point) == 3.0


def test_pairs_of_ids_are_sliced_along_their_last_dimension(real_device):
    data = make_data(pair_index=torch.arange(1200).view(2, 600), twin_index=torch.arange(140).view(2, 70))

    batch = load_one(data, real_device)

    assert torch.equal(batch.pair_index.cpu(), data.pair_index[:, batch.e_id.cpu()])
    assert torch.equal(batch.twin_index.cpu(), data.twin_index[:, batch.n_id.cpu()])


def test_as_many_nodes_as_edges_are_told_apart_by_name(real_device):
    graph = make_random_graph(60, 60)
    data = make_data(graph, note=torch.arange(60), edge_note=torch.arange(60))

    batch = load_one(data, real_device)

    assert torch.equal(batch.note, batch.n_id)
    assert torch.equal(batch.edge_note, batch.e_id)


def test_the_graph_itself_stays_as_it_was(real_device):
    data = make_data(train_mask=torch.arange(70) < 9)
    before = data.clone()

    load_one(data, real_device)

    assert_equal_batches(data, before)
    assert data.x.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_graph_may_have_ids_of_either_width(real_device, dtype):
    data, wide = make_data(), make_data()
    data.edge_index = data.edge_index.to(dtype)

    batch = load_one(data, real_device)

    assert_equal_batches(batch, load_one(wide, real_device))


def test_a_graph_needs_no_attributes(real_device):
    data = Data(edge_index=make_random_graph(70, 600).edge_index, num_nodes=70)

    batch = load_one(data, real_device)

    check_contract(data, batch, [5, 9], [3, 2])
    assert set(batch.to_dict()) == {
        "edge_index", "num_nodes", "n_id", "e_id", "input_id", "batch_size", "num_sampled_nodes", "num_sampled_edges",
    }  # fmt: skip


class TestSharing:
    """Loaders over the same tensors share what is placed; edits between epochs take effect."""

    def test_loaders_share_topology_and_features(self, real_device):
        data = make_data()
        loaders = [NeighborLoader(data, [3], device=real_device), NeighborLoader(copy.copy(data), [2, 2],
                   device=real_device, input_nodes=[3])]  # fmt: skip

        placed = [loader._prepare() for loader in loaders]

        assert loaders[0]._plan.topology is loaders[1]._plan.topology
        for key in ("x", "edge_attr", "y"):
            assert placed[0].describe()[key] is placed[1].describe()[key]

    def test_an_epoch_places_nothing_again(self, real_device):
        loader = NeighborLoader(make_data(), [3], batch_size=32, device=real_device)
        list(loader)
        before = loader._plan.topology, loader._general.describe()

        list(loader)

        assert loader._plan.topology is before[0]
        assert loader._general.describe() == before[1]

    def test_placed_memory_goes_with_its_data(self, real_device):
        data = make_data()
        loader = NeighborLoader(data, [3], device=real_device)
        list(loader)
        placed = [weakref.ref(part) for part in (loader._plan.topology, loader._general.describe()["x"])]

        del data, loader
        gc.collect()

        assert [part() for part in placed] == [None, None]

    def test_features_taken_away_stay_away(self, real_device):
        """PyG's reddit example edits `loader.data` after the loader is made."""
        data = make_data()
        loader = NeighborLoader(copy.copy(data), [-1], batch_size=32, device=real_device)

        del loader.data.x, loader.data.y
        loader.data.num_nodes = data.num_nodes
        loader.data.n_id = torch.arange(70) + 1000

        for batch in loader:
            assert not {"x", "y"} & set(batch.keys())
            assert batch.n_id.tolist() == [1000 + int(i) for i in data.x[batch.n_id.cpu() - 1000, 0]]
        assert data.x is not None

    def test_features_replaced_between_epochs_are_read(self, real_device):
        loader = NeighborLoader(make_data(), [3], batch_size=32, device=real_device)
        list(loader)

        loader.data.x = loader.data.x + 1000

        for batch in loader:
            assert torch.equal(batch.x[:, 0].cpu(), batch.n_id.cpu() + 1000.0)

    def test_features_added_between_epochs_are_there(self, real_device):
        loader = NeighborLoader(make_data(), [3], batch_size=32, device=real_device)
        list(loader)

        loader.data.degree = torch.arange(70) * 2

        for batch in loader:
            assert torch.equal(batch.degree, batch.n_id * 2)

    def test_features_changed_in_place_are_read_anew(self, real_device):
        loader = NeighborLoader(make_data(), [3], batch_size=32, device=real_device)
        list(loader)

        loader.data.x.mul_(-1)

        for batch in loader:
            assert torch.equal(batch.x[:, 0].cpu(), -batch.n_id.cpu().float())

    def test_edges_changed_between_epochs_are_sampled(self, real_device):
        loader = NeighborLoader(make_data(), [-1, -1], batch_size=32, device=real_device)
        list(loader)

        loader.data.edge_index = make_random_graph(70, 600, seed=1).edge_index

        for batch in loader:
            check_contract(loader.data, batch, batch.input_id.tolist(), [-1, -1])

    def test_reports_where_everything_lives(self, real_device):
        loader = NeighborLoader(make_data(), [3], device=real_device)

        lines = str(loader.report()).splitlines()

        assert lines[0].startswith("topology: 70 nodes, 600 edges")
        assert {line.split(":")[0] for line in lines[1:-1]} == {"x", "y", "edge_attr"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(69, 2)}, r"data.x must have a row for each of the 70 nodes, got 69"),
        ({"x": np.zeros((71, 2))}, r"data.x must have a row for each of the 70 nodes, got 71"),
        ({"extra": np.array(["a"] * 70)}, "data.extra must have a dtype that torch knows, got <U1"),
        ({"num_nodes": 50, "x": None, "y": None}, r"edge_index must lie in \[0, 50\)"),
        ({"edge_index": torch.tensor([[0, -1], [1, 1]])}, r"must lie in \[0, 70\).*got -1"),
        ({"edge_index": torch.zeros(3, 4, dtype=torch.int64)}, r"edge_index must have shape \[2, E\].*strided$"),
        ({"edge_index": torch.zeros(4, 2, dtype=torch.int64)}, r"must have shape \[2, E\], .*: give its \.t\(\)"),
        ({"edge_index": torch.zeros(2, 4)}, r"edge_index must have dtype int64 .*float32: give its \.long\(\)"),
    ],
)  # fmt: skip
def test_data_that_does_not_fit_together_is_refused(real_device, change, words):
    data = make_data()
    for key, value in change.items():
        data[key] = value

    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        list(NeighborLoader(data, [2], input_nodes=[0], device=real_device))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_layouts_that_cannot_be_read_are_named(real_device):
    columns, rows = make_data(), make_data()
    del columns.edge_index
    columns.adj_t, rows.x = torch.eye(70).to_sparse_csc(), torch.eye(70).to_sparse_csr()

    with pytest.raises(ArgumentError, match=r"data.adj_t must be compressed by row; call to_sparse_csr\(\)"):
        list(NeighborLoader(columns, [2], device=real_device))
    with pytest.raises(ArgumentTypeError, match=r"data.x must be dense or of layout torch.sparse_coo, got torch.spa"):
        list(NeighborLoader(rows, [2], device=real_device))


def test_edges_of_another_dtype_are_refused(real_device):
    data = make_data()
    data.edge_index = data.edge_index.float()

    with pytest.raises(TypeError, match=r"edge_index must have dtype int64 or int32, got torch\.float32"):
        list(NeighborLoader(data, [2], device=real_device))


class RecordedFeature:
    """Remembers where it was told to put rows; stands for a GPU that this machine may lack."""

    whole = None

    def __init__(self, device_cache_size, **options):
        self.cache = parse_size(device_cache_size)

    def from_cpu_tensor(self, rows):
        self.is_on_gpu = self.cache >= rows.numel() * rows.element_size() > 0

    def reads_in_place(self, table):
        return False


def test_what_is_on_the_gpu_stays_there_when_less_is_free_in_the_next_epoch(monkeypatch):
    data = Data(x=torch.ones(100, 64), y=torch.ones(100), edge_index=torch.zeros(2, 0).long(), num_nodes=100)
    monkeypatch.setattr(placed_rows, "Feature", RecordedFeature)
    place = lambda: pyg.Attributes(data, None, torch.device("cuda", 0), "auto", None)  # noqa: E731
    monkeypatch.setattr(placed_rows, "free_bytes", lambda index: 10**9)
    first = place()

    monkeypatch.setattr(placed_rows, "free_bytes", lambda index: 0)
    second = place()

    assert all(feature.is_on_gpu for feature in first.describe().values())
    assert all(second.describe()[name] is feature for name, feature in first.describe().items())


def test_what_does_not_fit_the_gpu_goes_to_the_host(monkeypatch):
    data = Data(x=torch.ones(100, 64), y=torch.ones(100), edge_index=torch.zeros(2, 0).long(), num_nodes=100)
    monkeypatch.setattr(placed_rows, "Feature", RecordedFeature)
    # 128 MiB stay free.
    monkeypatch.setattr(placed_rows, "free_bytes", lambda index: (128 << 20) + 5000)
    monkeypatch.setattr(placed_rows, "choose_host_memory", lambda index: "unified")

    placed = pyg.Attributes(data, None, torch.device("cuda", 0), "auto", None).describe()

    assert {name: feature.is_on_gpu for name, feature in placed.items()} == {"x": False, "y": True}
