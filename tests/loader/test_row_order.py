"""Rows of a file packed for the epochs of a loader."""

import time

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_direct import (
    ClusterData,
    ClusterLoader,
    CSRTopo,
    Feature,
    FeatureStore,
    GraphStore,
    LinkNeighborLoader,
    NeighborLoader,
    order_by_reads,
    pack_rows,
    save_rows,
)
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features import device_reader, range_reader
from pyg_direct.features.disk_rates import DiskRates
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.tiers.window import RowWindow
from pyg_direct.loader import sampler_loader
from pyg_direct.loader.prefetch.foresight import Foresight

NODES, WIDTH = 6000, 128
EDGES = torch.randint(NODES, (2, 30_000), generator=torch.Generator().manual_seed(0))
X = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1))
QUARTER = f"{NODES * WIDTH}B"


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    monkeypatch.setattr(range_reader, "available_bytes", lambda: 1000)
    # A disk of a cloud.
    monkeypatch.setattr(range_reader, "find_rates", lambda file: DiskRates(1e9, 6e4))
    return save_rows(tmp_path / "x.npy", X)


@pytest.fixture
def device(real_device):
    """CPU and GPU: threads launch kernels at once here, which the simulator cannot."""
    return real_device


def open_loader(path, device, ahead=QUARTER, kind=NeighborLoader, **options):
    feature, store = Feature(device=device).from_file(path), FeatureStore(device=device)
    store[None if kind is NeighborLoader else "n", "x", None] = feature
    graph, seeds = Data(edge_index=EDGES, num_nodes=NODES), {"input_nodes": torch.arange(0, NODES, 4)}
    if kind is LinkNeighborLoader:
        relation = ("n", "to", "n")
        graph = HeteroData({"n": {"num_nodes": NODES}, relation: {"edge_index": EDGES}})
        seeds = {"edge_label_index": (relation, EDGES[:, :700]), "neg_sampling": "binary"}
    loader = kind((store, graph), [4, 2], device=device, ahead=ahead, **{
        "batch_size": 16, "shuffle": True, "seed": 3, **seeds, **options})  # fmt: skip
    return loader, feature


def look(batches):
    return [[{key: value.cpu().numpy().tobytes() for key, value in part.items() if isinstance(value, torch.Tensor)}
             for part in batch.stores] for batch in batches]  # fmt: skip


def read_all(path, device, **options):
    """Batches of an epoch, and the reads of the file."""
    loader, _ = open_loader(path, device, **options)
    batches = look(loader)
    return batches, loader.tell().disk[0]


# Batches of links have more rows: with less memory, so small a table has hardly two rows of the same windows.
@pytest.mark.parametrize(("kind", "ahead"), [(NeighborLoader, QUARTER), (LinkNeighborLoader, f"{2 * NODES * WIDTH}B")])
def test_an_epoch_over_rows_packed_for_it_is_equal_and_reads_few_bytes_beside_its_rows(path, device, kind, ahead):
    order = order_by_reads(*open_loader(path, device, ahead, kind))
    packed = pack_rows(path, path.with_name("packed.safetensors"), order)

    (expected, before), (batches, reads) = (read_all(own, device, kind=kind, ahead=ahead)
                                           for own in (path, packed))  # fmt: skip

    assert batches == expected
    assert sorted(order.tolist()) == [*range(NODES)]
    assert reads.num_pages * reads.page_bytes <= 1.3 * reads.num_rows * WIDTH * 4
    assert reads.num_pages * reads.page_bytes < before.num_pages * before.page_bytes
    assert reads.num_requests < before.num_requests / 2


def test_several_epochs_have_an_order_together(path, device):
    order = order_by_reads(*open_loader(path, device), num_epochs=3)
    packed = pack_rows(path, path.with_name("packed.safetensors"), order)
    num_bytes = []
    for own in (path, packed):
        loader, _ = open_loader(own, device)
        epochs = [look(loader) for _ in range(3)]
        (reads,) = loader.tell().disk
        num_bytes.append(reads.num_pages * reads.page_bytes)
        assert epochs == [look(batches) for batches in [open_loader(path, device, 0)[0]] for _ in range(3)]

    assert num_bytes[1] < 0.8 * num_bytes[0]


def test_a_loader_goes_on_where_it_was_with_files_for_each_epoch(path, device):
    loader, feature = open_loader(path, device)
    expected, _ = open_loader(path, device, 0)
    for epoch in range(3):
        target = path.with_name(f"{epoch}.safetensors")
        pack_rows(path if epoch == 0 else path.with_name(f"{epoch - 1}.safetensors"), target,
                  order_by_reads(loader, feature))  # fmt: skip
        feature = Feature(device=device).from_file(target)
        loader.data[0][None, "x", None] = feature

        assert look(loader) == look(expected)
        (reads,) = loader.tell().disk
        assert reads.path == str(target)
        assert reads.num_pages * reads.page_bytes <= 1.3 * reads.num_rows * WIDTH * 4


def test_the_rest_of_an_epoch_has_an_order(path, device):
    loader, feature = open_loader(path, device, shuffle=False, input_nodes=torch.arange(3200))
    batches = iter(loader)
    for _ in range(100):
        next(batches)
    state = loader.state_dict()
    batches.close()
    loader.load_state_dict(state)

    order = order_by_reads(loader, feature)

    # Seeds of batches that are over are read no more, unless a neighbor is one.
    place = order.argsort()
    assert place[1600:3200].float().mean() < place[:1600].float().mean()
    assert len(look(loader)) == 100


def test_ranks_have_an_order_together(path, device):
    orders = [order_by_reads(*open_loader(path, device, ranks=(rank, 2))) for rank in range(2)]
    packed = pack_rows(path, path.with_name("packed.safetensors"), orders[0])

    assert torch.equal(*orders)
    for rank in range(2):
        (expected, before), (batches, reads) = (read_all(own, device, ranks=(rank, 2)) for own in (path, packed))
        assert batches == expected
        # Windows of loaders that are not freed yet may have rows, so that fewer are read.
        assert reads.num_pages / reads.num_rows < before.num_pages / before.num_rows


def test_neighbor_lists_may_lie_in_files_too(path, device):
    topo = CSRTopo(EDGES, num_nodes=NODES)
    lists = [save_rows(path.with_name(f"{name}.npy"), getattr(topo, name).cpu()) for name in ("indptr", "indices")]

    def load(own, ahead):
        loader, feature = open_loader(own, device)
        graph = GraphStore(CSRTopo.from_file(*lists))
        return NeighborLoader((loader.data[0], graph), [4, 2], torch.arange(0, NODES, 4), batch_size=16, seed=3,
                              shuffle=True, device=device, ahead=ahead), feature  # fmt: skip

    packed = pack_rows(path, path.with_name("packed.safetensors"), order_by_reads(*load(path, QUARTER)))

    assert look(load(packed, QUARTER)[0]) == look(load(path, 0)[0])


@pytest.mark.parametrize(("options", "words"), [
    ({"seed": None}, "loader must have a seed"),
    ({"ahead": 0}, "feature must have rows in a file that the loader reads ahead"),
    ({"batch_sampler": [[0, 1], [2]], "batch_size": 1, "shuffle": False}, "loader must have a sampler of ours"),
])  # fmt: skip
def test_epochs_that_are_not_known_have_no_order(path, device, options, words):
    with pytest.raises(ArgumentError, match=words):
        order_by_reads(*open_loader(path, device, **options))


def test_a_file_that_is_read_in_an_order_of_the_program_is_refused(path, device):
    loader, _ = open_loader(path, device)
    feature = Feature(device=device).from_file(path, order=torch.arange(NODES).flip(0))
    loader.data[0][None, "x", None] = feature

    with pytest.raises(ArgumentError, match="feature must read its file without order="):
        order_by_reads(loader, feature)


def test_rows_of_a_graph_in_memory_have_no_order(path, device):
    _, feature = open_loader(path, device)
    loader = NeighborLoader(Data(x=X, edge_index=EDGES, num_nodes=NODES), [2], device=device, seed=0)

    with pytest.raises(ArgumentError, match="feature must have rows in a file that the loader reads ahead"):
        order_by_reads(loader, feature)


def test_wrong_arguments_are_named(path, device):
    loader, feature = open_loader(path, device)
    data = Data(edge_index=EDGES, num_nodes=NODES)

    with pytest.raises(ArgumentTypeError, match=r"loader must be a NeighborLoader.* got ClusterLoader"):
        order_by_reads(ClusterLoader(ClusterData(data, 2, log=False), device=device), feature)
    with pytest.raises(ArgumentTypeError, match="feature must be a Feature, got Tensor"):
        order_by_reads(loader, X)
    with pytest.raises(ArgumentError, match="feature must have rows in a file that the loader reads ahead"):
        order_by_reads(loader, Feature(device=device).from_file(path))
    with pytest.raises(ArgumentError, match="num_epochs must be an integer of at least 1, got 0"):
        order_by_reads(loader, feature, num_epochs=0)


@pytest.fixture
def give_device(monkeypatch):
    """Rows of files may have so many bytes of the device; on a CPU its memory stands for a GPU's."""

    def give(num_bytes):
        monkeypatch.setattr(device_reader, "find_device_room", lambda *args: num_bytes)
        monkeypatch.setattr(sampler_loader, "_SMALL_BYTES", 0)

    return give


def test_rows_are_ordered_for_host_memory_if_the_device_has_no_piece_for_them(path, device, give_device, monkeypatch):
    ahead, empty = "60M", torch.empty
    give_device(0)
    monkeypatch.setattr(RowWindow, "fit_rows", staticmethod(lambda *args: X.nbytes // 4))
    expected = order_by_reads(*open_loader(path, device, ahead))
    give_device(X.nbytes // 2)
    on_device = order_by_reads(*open_loader(path, device, ahead))

    def refuse(*size, **options):
        if options.get("dtype") is torch.uint8 and size == (X.nbytes // 2,):
            raise torch.OutOfMemoryError("no piece is large enough")
        return empty(*size, **options)

    loader = open_loader(path, device, ahead)
    monkeypatch.setattr(torch, "empty", refuse)

    assert torch.equal(order_by_reads(*loader), expected)
    assert not torch.equal(on_device, expected)


def test_rows_are_ordered_for_the_memory_that_an_earlier_epoch_has_taken(path, device, give_device, monkeypatch):
    monkeypatch.setattr(RowWindow, "fit_rows", staticmethod(lambda *args: X.nbytes // 4))
    give_device(X.nbytes // 2)
    loader, feature = open_loader(path, device, "60M")
    look(loader)
    other, rows = open_loader(path, device, "60M")
    other.load_state_dict(loader.state_dict())
    expected = order_by_reads(other, rows)
    # Less than the window of the loader has.
    give_device(X.nbytes // 4)

    assert torch.equal(order_by_reads(loader, feature), expected)
    assert not torch.equal(order_by_reads(other, rows), expected)


def test_the_last_window_is_listed_however_late_it_reads(path, device, monkeypatch):
    loader, feature = open_loader(path, device)
    expected = order_by_reads(loader, feature)
    read_rows = Foresight._read_rows

    def read_late(foresight, window):
        time.sleep(0.05)
        read_rows(foresight, window)

    monkeypatch.setattr(Foresight, "_read_rows", read_late)

    assert torch.equal(order_by_reads(loader, feature), expected)
