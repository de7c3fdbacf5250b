"""Rows in files, read once for many batches that are sampled ahead."""

import errno
import os
import threading

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_direct import Feature, FeatureStore, HGTLoader, LinkNeighborLoader, NeighborLoader, pack_rows, save_rows
from pyg_direct.errors import ArgumentError, FileError, LoaderWarning, PlacementWarning
from pyg_direct.features import device_reader, range_reader
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.tiers.window import RowWindow
from pyg_direct.loader import sampler_loader
from pyg_direct.runtime.host import host_memory
from tests.hetero_data import make_hetero

NODES = 3000


def make_graph():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, 20_000), generator=generator)
    return edges, torch.randn(NODES, 37, generator=generator)


EDGES, X = make_graph()


@pytest.fixture
def path(tmp_path, monkeypatch):
    # Files that were just written are cached.
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    return save_rows(tmp_path / "x.npy", X)


@pytest.fixture
def device(real_device):
    """CPU and GPU: threads launch kernels at once here, which the simulator cannot."""
    return real_device


@pytest.fixture(params=["host", "device"])
def memory(request, monkeypatch):
    """Memory of planned rows: of the host, or a part of the device's."""
    if request.param == "device":
        monkeypatch.setattr(RowWindow, "fit_rows", staticmethod(lambda *args: 1))
        monkeypatch.setattr(RowWindow, "fit_device_rows", staticmethod(lambda *args: X.nbytes // 3))


def open_store(path, device, kind=None):
    store = FeatureStore(device=device)
    store[kind, "x", None] = Feature(device=device, host_cache_size="10%").from_file(path)
    store[kind, "y", None] = torch.arange(NODES)
    return store


def open_loader(path, device, ahead, kind=NeighborLoader, **options):
    store = options.pop("store", None) or open_store(path, device, None if kind is NeighborLoader else "n")
    graph, seeds = Data(edge_index=EDGES, num_nodes=NODES), {"input_nodes": torch.arange(0, NODES, 4)}
    if kind is LinkNeighborLoader:
        relation = ("n", "to", "n")
        graph = HeteroData({"n": {"num_nodes": NODES}, relation: {"edge_index": EDGES}})
        seeds = {"edge_label_index": (relation, EDGES[:, :700]), "neg_sampling": "binary"}
    return kind((store, graph), [5, 3], device=device, ahead=ahead,
                **{"batch_size": 32, "shuffle": True, "seed": 3, **seeds, **options})  # fmt: skip


def look(batches):
    """All tensors of batches."""
    return [[{key: value.cpu().numpy().tobytes() for key, value in part.items() if isinstance(value, torch.Tensor)}
             for part in batch.stores] for batch in batches]  # fmt: skip


def reads_of(loader):
    return loader.tell().disk


@pytest.mark.parametrize(("kind", "prefetch", "ahead"), [
    *((NeighborLoader, 2, ahead) for ahead in (None, 1, 5, 1000, "60K", "300K")),
    *((LinkNeighborLoader, 0, ahead) for ahead in (5, "60K")),
])  # fmt: skip
def test_batches_equal_those_without_foresight(path, device, kind, prefetch, ahead):
    expected, loader = open_loader(path, device, 0, kind), open_loader(path, device, ahead, kind, prefetch=prefetch)

    for _ in range(2):
        assert look(loader) == look(expected)
    (reads,) = reads_of(loader)
    assert reads.num_rows < reads.num_asked
    assert not reads_of(expected)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_batches_are_equal_with_planned_rows_in_memory_of_the_device(path, device, monkeypatch, share):
    monkeypatch.setattr(device_reader, "find_device_room", lambda *args: int(share * X.nbytes))
    monkeypatch.setattr(sampler_loader, "_SMALL_BYTES", 0)
    expected, loader = open_loader(path, device, 0), open_loader(path, device, "60M")
    # Host memory that holds fewer rows, and their tables.
    monkeypatch.setattr(RowWindow, "fit_rows", staticmethod(lambda *args: 1))

    for _ in range(2):
        assert look(loader) == look(expected)

    ((_, window),) = loader._row_windows
    assert window.is_whole == (share == 1.0)
    assert isinstance(window._reader, device_reader.StagedReader)
    assert window._rows.nbytes <= share * X.nbytes
    assert window._rows.device == window.device
    (reads,) = reads_of(loader)
    assert reads.num_rows < reads.num_asked


def test_planned_rows_lie_in_host_memory_if_the_device_has_no_piece_for_them(path, device, monkeypatch):
    monkeypatch.setattr(device_reader, "find_device_room", lambda *args: X.nbytes)
    monkeypatch.setattr(sampler_loader, "_SMALL_BYTES", 0)
    init = RowWindow.__init__

    def refuse(window, *args, device_bytes=0, **options):
        if device_bytes > 0:
            raise torch.OutOfMemoryError("no piece is large enough")
        init(window, *args, **options)

    monkeypatch.setattr(RowWindow, "__init__", refuse)
    loader = open_loader(path, device, "60M")

    with pytest.warns(PlacementWarning, match=r"lie in host memory, .*: set PYG_DIRECT_AHEAD_GPU to fewer bytes"):
        batches = look(loader)

    assert batches == look(open_loader(path, device, 0))
    ((_, window),) = loader._row_windows
    assert not isinstance(window._reader, device_reader.StagedReader)


def test_batches_do_not_wait_for_rows_that_no_window_has(path, device, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(RowWindow, "read_rest", lambda window: go_on.wait(60) or pytest.fail("nobody went on"))
    batches = iter(open_loader(path, device, 8, prefetch=0))

    begun = [next(batches) for _ in range(2)]
    go_on.set()

    assert look(begun) + look(batches) == look(open_loader(path, device, 0))


def test_an_error_of_rows_that_no_window_has_is_one_of_the_next_window(path, device, monkeypatch):
    def fail(window):
        raise FileError("x.npy could not be read at byte 4096: Input/output error")

    monkeypatch.setattr(RowWindow, "read_rest", fail)
    batches = iter(open_loader(path, device, 8, prefetch=0))

    # The first window has a quarter of the batches of others.
    begun = [next(batches) for _ in range(2)]
    with pytest.raises(FileError, match="at byte 4096"):
        next(batches)

    assert look(begun) == look(open_loader(path, device, 0))[:2]


@pytest.mark.gpu
def test_rows_come_on_another_stream_than_training(path, monkeypatch):
    streams, read_ahead = [], RowWindow.read_ahead

    def note(window, *args):
        streams.append(torch.cuda.current_stream(window.device))
        return read_ahead(window, *args)

    monkeypatch.setattr(RowWindow, "read_ahead", note)
    look(open_loader(path, "cuda", 5))

    assert streams
    assert torch.cuda.default_stream() not in streams


def test_small_tables_are_held_whole_whatever_the_large_ones_leave(path, tmp_path, device):
    large = torch.zeros(40 * NODES, 128)
    stored = [Feature(device=device).from_file(file).stored for file in (path, save_rows(tmp_path / "l.npy", large))]
    loader = open_loader(path, device, f"{100 * X.nbytes}B")

    (small_bytes, _), (large_bytes, _) = loader._divide_memory(stored)

    assert small_bytes == X.nbytes
    assert 0 < large_bytes < large.nbytes


def test_many_small_tables_leave_memory_to_the_large_ones(path, tmp_path, device):
    large = Feature(device=device).from_file(save_rows(tmp_path / "l.npy", torch.zeros(40 * NODES, 128))).stored
    # Each is an 80th of the memory, and on a CPU a 70th of what samples leave.
    small, memory = Feature(device=device).from_file(path).stored, 80 * X.nbytes
    loader = open_loader(path, device, f"{memory}B")
    num_small = 100

    *held, (large_bytes, _) = loader._divide_memory([*[small] * num_small, large])

    # The tables that are held whole take no more than a quarter; the others have their shares of the rest.
    whole = sum(num_bytes == X.nbytes for num_bytes, _ in held)
    assert 0 < whole < num_small
    assert whole * X.nbytes <= memory // 4
    assert large_bytes > memory // 8
    assert sum(num_bytes for num_bytes, _ in held) + large_bytes <= memory


def test_samples_end_a_window_too(path, device, monkeypatch):
    number_of = []
    for share in (0.125, 1e-9):
        monkeypatch.setattr(sampler_loader, "_SAMPLES_SHARE", share)
        loader = open_loader(path, device, None)
        look(loader)
        ((_, window),) = loader._row_windows
        number_of.append(window.last_number + 1)

    # A quarter of the epoch, and first a quarter of this; a window for each batch.
    assert number_of == [5, len(loader)]


@pytest.mark.parametrize(("ahead", "is_planned"), [(None, False), (4, True)])
def test_a_cached_file_is_planned_only_where_batches_are_given(path, device, monkeypatch, ahead, is_planned):
    loader = open_loader(path, device, ahead)
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: True)

    assert look(loader) == look(open_loader(path, device, 0))
    assert bool(reads_of(loader)) == is_planned


def test_each_page_of_a_table_that_fits_is_read_once(path, device):
    loader = open_loader(path, device, 4)

    for _ in range(3):
        look(loader)
    (reads,) = reads_of(loader)
    pages = -(-path.stat().st_size // reads.page_bytes)
    assert reads.num_again <= 2
    assert reads.num_pages <= pages + 2


def test_memory_of_a_window_is_bounded(path, device):
    loader = open_loader(path, device, "60K")
    look(loader)

    ((_, window),) = loader._row_windows
    assert window.num_bytes <= 60 * 1024


def test_a_window_of_all_rows_has_its_tables_beside_them(path, device):
    loader = open_loader(path, device, "10M")
    look(loader)

    ((_, window),) = loader._row_windows
    assert window._rows.nbytes == X.nbytes


@pytest.mark.parametrize("options", [{"transform": lambda batch: batch}, {"replace": True}, {"disjoint": True},
                                     {"subgraph_type": "induced"}, {"drop_last": True}],
                         ids=lambda options: next(iter(options)))  # fmt: skip
def test_other_options_keep_their_batches(path, device, options):
    assert look(open_loader(path, device, 5, **options)) == look(open_loader(path, device, 0, **options))


def test_nodes_that_a_transform_adds_are_read_too(path, device):
    def add(out):
        out.node = torch.cat([out.node, out.node.new_tensor([17, 2999])])
        return out

    options = {"transform_sampler_output": add}
    assert look(open_loader(path, device, 5, **options)) == look(open_loader(path, device, 0, **options))


def test_named_rows_are_read_ahead(path, device):
    order = torch.randperm(NODES, generator=torch.Generator().manual_seed(1))

    def load(ahead):
        store = open_store(path, device)
        store._features[None, "x"].set_local_order(order)
        return open_loader(path, device, ahead, store=store)

    planned = load(5)
    assert look(planned) == look(load(0))
    assert reads_of(planned)[0].num_rows < reads_of(planned)[0].num_asked


def test_types_have_windows_of_their_own(tmp_path, device, monkeypatch):
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    data = make_hetero()
    files = {kind: save_rows(tmp_path / f"{kind}.npy", torch.arange(data[kind].num_nodes * 5.0).view(-1, 5))
             for kind in data.node_types}  # fmt: skip

    def load(ahead):
        store = FeatureStore(device=device)
        for kind, file in files.items():
            store[kind, "x", None] = Feature(device=device).from_file(file)
        graph = type(data)({name: {"edge_index": data[name].edge_index} for name in data.edge_types})
        for kind in data.node_types:
            graph[kind].num_nodes = data[kind].num_nodes
        return NeighborLoader((store, graph), [4, 3], "paper", batch_size=7, seed=1, device=device, ahead=ahead)

    planned = load(3)
    for batch, expected in zip(planned, load(0), strict=True):
        for kind in data.node_types:
            assert torch.equal(batch[kind].n_id, expected[kind].n_id)
            assert torch.equal(batch[kind].x, expected[kind].x)
    assert len(reads_of(planned)) == len(data.node_types)


def test_rows_of_edges_are_read_ahead(path, tmp_path, device):
    rows = torch.randn(EDGES.shape[1], 7)
    file = save_rows(tmp_path / "edges.npy", rows)

    def load(ahead):
        store = open_store(path, device)
        store[None, "edge_attr", None] = Feature(device=device, host_cache_size="10%").from_file(file)
        return open_loader(path, device, ahead, store=store)

    planned = load(5)
    batches = [*planned]
    assert look(batches) == look(load(0))
    assert all(torch.equal(batch.edge_attr.cpu(), rows[batch.e_id.cpu()]) for batch in batches)
    reads = {os.path.basename(own.path): own for own in reads_of(planned)}
    assert reads.keys() == {"x.npy", "edges.npy"}
    assert reads["edges.npy"].num_requests > 0
    # All rows that no memory holds were planned.
    assert reads["edges.npy"].num_rows <= reads["edges.npy"].num_claimed


def test_rows_of_typed_edges_are_read_ahead(tmp_path, device, monkeypatch):
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    data = make_hetero()
    files = {kind: save_rows(tmp_path / f"{number}.safetensors", torch.randn(data[kind].num_edges, 3))
             for number, kind in enumerate(data.edge_types)}  # fmt: skip
    graph = type(data)({name: {"edge_index": data[name].edge_index} for name in data.edge_types})
    for kind in data.node_types:
        graph[kind].num_nodes = data[kind].num_nodes

    def load(ahead):
        store = FeatureStore(device=device)
        for kind in data.node_types:
            store[kind, "number", None] = torch.arange(data[kind].num_nodes)
        for kind, file in files.items():
            store[kind, "edge_attr", None] = Feature(device=device).from_file(file)
        return NeighborLoader((store, graph), [4, 3], "paper", batch_size=7, seed=1, device=device, ahead=ahead)

    planned = load(3)
    for batch, expected in zip(planned, load(0), strict=True):
        for kind in data.edge_types:
            assert torch.equal(batch[kind].edge_attr, expected[kind].edge_attr)
            assert torch.equal(batch[kind].edge_attr.cpu(), RowFile(files[kind]).rows[batch[kind].e_id.cpu()])
    assert sum(reads.num_requests for reads in reads_of(planned)) > 0


@pytest.mark.parametrize("kind", ["safetensors", "packed", "parquet", "bare"])
def test_rows_of_any_file_are_read_ahead(path, tmp_path, device, kind):
    options = {}
    if kind == "safetensors":
        file = save_rows(tmp_path / "rows.safetensors", X)
    elif kind == "packed":
        order = torch.randperm(NODES, generator=torch.Generator().manual_seed(1))
        file = pack_rows(path, tmp_path / "packed.safetensors", order)
    elif kind == "parquet":
        from pyarrow import parquet, table

        parquet.write_table(table({f"c{number}": X[:, number].numpy() for number in range(X.shape[1])}),
                            tmp_path / "x.parquet")  # fmt: skip
        file = pack_rows(tmp_path / "x.parquet", tmp_path / "rows.safetensors")
    else:
        file, options = tmp_path / "x.bin", {"dtype": torch.float32, "shape": (-1, X.shape[1]), "offset": 12}
        file.write_bytes(bytes(12) + X.numpy().tobytes())

    def load(ahead):
        store = open_store(path, device)
        store[None, "x", None] = Feature(device=device, host_cache_size="10%").from_file(file, **options)
        return open_loader(path, device, ahead, store=store)

    planned = load(5)
    assert look(planned) == look(open_loader(path, device, 0))
    assert 0 < reads_of(planned)[0].num_rows < reads_of(planned)[0].num_asked


def test_layers_of_hgt_are_read_ahead(tmp_path, device, monkeypatch):
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    data = make_hetero()
    store, options = FeatureStore(device=device), {"batch_size": 7, "seed": 1, "device": device}
    kinds = [kind for kind in data.node_types if "x" in data[kind]]
    for kind in kinds:
        rows = save_rows(tmp_path / f"{kind}.npy", data[kind].x)
        store[kind, "x", None] = Feature(device=device).from_file(rows)

    planned = HGTLoader((store, data), [4, 3], "paper", ahead=3, **options)

    for batch, expected in zip(planned, HGTLoader(data, [4, 3], "paper", **options), strict=True):
        for kind in kinds:
            assert torch.equal(batch[kind].n_id, expected[kind].n_id)
            assert torch.equal(batch[kind].x, expected[kind].x)
        for name in data.edge_types:
            assert torch.equal(batch[name].edge_index, expected[name].edge_index)
    papers = next(reads for reads in reads_of(planned) if reads.path.endswith("paper.npy"))
    assert 0 < papers.num_rows < papers.num_asked


@pytest.mark.usefixtures("memory")
def test_an_epoch_is_resumed_inside_a_window(path, device):
    whole = look(open_loader(path, device, 0))
    loader = open_loader(path, device, 5)
    batches = iter(loader)
    begun = [next(batches) for _ in range(8)]
    state = loader.state_dict()
    batches.close()
    resumed = open_loader(path, device, 7)
    resumed.load_state_dict(state)

    assert look(begun) + look(resumed) == whole


# Memory for few rows: windows wait for rows of batches that nobody asks for.
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("ahead", [5, "100K"])
def test_an_epoch_that_is_left_early_leaves_the_next_one_whole(path, device, ahead):
    before = threading.enumerate()
    loader, expected = open_loader(path, device, ahead), open_loader(path, device, 0)
    look(expected)
    batches = iter(loader)
    next(batches)
    batches.close()

    assert look(loader) == look(expected)
    begun = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in begun if thread.name.startswith("pyg_direct_ahead")]


def test_windows_of_several_tables_share_the_memory_that_batches_give_up(path, tmp_path, device):
    file = save_rows(tmp_path / "wide.npy", torch.randn(NODES, 150))

    def load(ahead):
        store = open_store(path, device)
        store[None, "wide", None] = Feature(device=device).from_file(file)
        return open_loader(path, device, ahead, store=store)

    planned = load("400K")
    assert look(planned) == look(load(0))
    # All windows have batches, none has all of them.
    assert {window.last_number > 3 for _, window in planned._row_windows} == {True}


@pytest.mark.usefixtures("memory")
def test_several_loaders_read_one_file(path, device):
    expected, loaders = look(open_loader(path, device, 0)), [open_loader(path, device, ahead) for ahead in (3, 5)]

    pairs = [*zip(*loaders, strict=True)]

    assert [look([batch for batch, _ in pairs]), look([batch for _, batch in pairs])] == [expected, expected]


@pytest.mark.usefixtures("memory")
def test_two_iterators_of_a_loader_do_not_share_a_window(path, device):
    loader = open_loader(path, device, 3)
    first, second = iter(loader), iter(loader)
    pairs = [*zip(first, second, strict=True)]

    expected = open_loader(path, device, 0)
    assert look([batch for batch, _ in pairs]) == look(expected)
    assert look([batch for _, batch in pairs]) == look(expected)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("ahead", [4, "100K"])
@pytest.mark.parametrize("change", ["touched", "cut short", "replaced", "taken away"])
def test_a_file_that_changes_while_batches_are_planned_is_an_error(path, device, change, ahead):
    batches = iter(open_loader(path, device, ahead))
    next(batches)
    if change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "cut short":
        os.truncate(path, 1000)
    elif change == "replaced":
        save_rows(path, X + 1)
    else:
        path.unlink()

    with pytest.raises(FileError, match="taken away" if change == "taken away" else "changed while it was read"):
        look(batches)


@pytest.mark.usefixtures("memory")
def test_a_disk_that_hangs_is_an_error_of_the_batch(path, device, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", lambda *args: go_on.wait() and 0)
    monkeypatch.setattr(range_reader, "_LEAVE", 0.1)
    monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", "0.3")
    try:
        with pytest.raises(FileError, match=r"x\.npy gave no bytes for 0\.3 seconds, at byte 0"):
            next(iter(open_loader(path, device, 4)))
    finally:
        go_on.set()


@pytest.mark.usefixtures("memory")
def test_a_disk_that_fails_is_an_error_of_the_batch(path, device, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", lambda *args: 0)
    monkeypatch.setattr(os, "preadv", fail)

    with pytest.raises(FileError, match=r"x\.npy could not be read at byte \d+: Input/output error"):
        next(iter(open_loader(path, device, 4)))


def limit_memory(folder, monkeypatch, num_bytes):
    """Put this process into a control group with a limit."""
    monkeypatch.setattr(host_memory, "_GROUP", folder)
    monkeypatch.setattr(host_memory, "_OWN", folder / "own")
    for name, text in (("max", num_bytes), ("current", 1000), ("stat", "inactive_file 1000")):
        (folder / f"memory.{name}").write_text(str(text))


@pytest.mark.parametrize("count", [1, 4])
def test_windows_take_their_part_of_the_limit_of_a_group(path, tmp_path, device, monkeypatch, count):
    limit_memory(tmp_path, monkeypatch, 400_000 * count)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
    loader = open_loader(path, device, None)

    assert look(loader) == look(open_loader(path, device, 0))
    ((_, window),) = loader._row_windows
    # A quarter for the processes of this host together.
    assert window._rows.nbytes <= 100_000
    assert window.last_number > 4


@pytest.mark.parametrize(("is_large", "has_shared_memory"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("count", [1, 2])
def test_processes_of_a_host_read_through_its_page_cache(path, device, monkeypatch, count, is_large, has_shared_memory):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    # Processes copy rows from each other's windows if the page cache cannot hold the file.
    is_direct = count == 1 or (is_large and has_shared_memory)
    if not has_shared_memory:
        monkeypatch.setattr("pyg_direct.features.tiers.window.open_host_window", lambda *args: None)
    if is_large:
        monkeypatch.setattr(range_reader, "available_bytes", lambda: 1000)
    seen, open_handle = set(), RowFile.open_handle
    monkeypatch.setattr(RowFile, "open_handle", lambda file, *, is_direct: (
        seen.add(is_direct), open_handle(file, is_direct=is_direct))[1])  # fmt: skip

    # Memory for the whole table.
    look(open_loader(path, device, "10M", ranks=(0, count)))

    assert seen == {is_direct}


def test_an_error_of_a_batch_comes_at_its_turn(path, device):
    loader = open_loader(path, device, 4, input_nodes=torch.arange(200), shuffle=False)
    submit, number = loader._submit, []

    def fail(*args):
        number.append(0)
        if len(number) == 4:
            raise RuntimeError("the fourth batch")
        return submit(*args)

    loader._submit = fail
    batches = iter(loader)
    assert [next(batches).batch_size for _ in range(3)] == [32] * 3
    with pytest.raises(RuntimeError, match="the fourth batch"):
        next(batches)


def test_rows_written_in_an_epoch_are_in_its_next_batch(path, device):
    store = open_store(path, device)
    loader = open_loader(path, device, 4, store=store, prefetch=1)
    batches = iter(loader)
    next(batches)
    store._features[None, "y"].update_(torch.arange(NODES), torch.arange(NODES) + 5)

    with pytest.warns(LoaderWarning, match="rows of data were written"):
        rest = [*batches]
    assert len(rest) == len(loader) - 1
    assert all(torch.equal(batch.y, batch.n_id + 5) for batch in rest)
    assert all(torch.equal(batch.x.cpu(), X[batch.n_id.cpu()]) for batch in rest)


def test_a_loader_reports_what_foresight_saved(path, device, capsys):
    loader = open_loader(path, device, 4)
    look(loader)

    report = loader.report()

    assert "saved" in capsys.readouterr().out
    assert "beside the disk's" in str(report)
    assert report.to_tree()["disk"][0]["path"] == str(path)


@pytest.mark.parametrize(("value", "words"), [(-1, "ahead must be a number"), (True, "ahead must be a number"),
                                              (1.5, "ahead must be a number"),
                                              ("lots", "ahead must look like")])  # fmt: skip
def test_other_values_are_refused(path, device, value, words):
    with pytest.raises(ArgumentError, match=words):
        open_loader(path, device, value)


def test_foresight_and_groups_exclude_each_other(path, device):
    with pytest.raises(ArgumentError, match="super_batch must be None or 1 with ahead=3"):
        open_loader(path, device, 3, super_batch=4)


@pytest.mark.parametrize("kept", ["on disk, order of the program", "rows of a tensor"])
def test_a_plan_that_cannot_be_made_is_told(path, device, kept):
    store, options = open_store(path, device), {"batch_sampler": [[0, 1], [2]]}
    if kept == "rows of a tensor":
        store, options = FeatureStore(device=device), {"batch_size": 2}
        store[None, "x", None] = Feature(device=device).from_cpu_tensor(X.clone())
    graph = store, Data(edge_index=EDGES, num_nodes=NODES)
    loader = NeighborLoader(graph, [2], torch.arange(9), device=device, ahead=3, **options)

    with pytest.warns(LoaderWarning, match="ahead=3: not used, as it needs rows in a file"):
        next(iter(loader))


@pytest.mark.filterwarnings("error")
def test_a_file_that_memory_holds_whole_needs_no_plan(path, device):
    store = open_store(path, device)
    store[None, "x", None] = Feature(device=device, host_cache_size="100%").from_file(path)

    assert look(open_loader(path, device, 3, store=store)) == look(open_loader(path, device, 0))


def test_a_number_that_has_no_use_is_told(path, device):
    loader = NeighborLoader(Data(x=X, edge_index=EDGES), [2], torch.arange(9), device=device, ahead=3)

    with pytest.warns(LoaderWarning, match="ahead=3: not used, as it needs rows in a file"):
        next(iter(loader))
