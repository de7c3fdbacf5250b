"""Layer-wise inference over rows in files."""

import errno
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE
from torch_geometric.nn.conv import SAGEConv

from pyg_direct import Feature, FeatureStore, NeighborLoader, infer, inference_loader, pack_rows, save_rows
from pyg_direct.errors import ArgumentError, ArgumentTypeError, FileError, LoaderWarning, PlacementWarning
from pyg_direct.features import row_files
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.tiers.window import RowWindow
from pyg_direct.loader import inference, whole_table
from tests.features.contract import change_file

NODES, WIDTH, HIDDEN = 2000, 16, 32
EDGES = torch.randint(NODES, (2, 9000), generator=torch.Generator().manual_seed(0))
X = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1))
SIZE = 300


@pytest.fixture
def device(real_device):
    """CPU and GPU: threads launch kernels at once here, which the simulator cannot."""
    return real_device


@pytest.fixture(autouse=True)
def no_room(monkeypatch):
    """A GPU that leaves no memory to rows of files."""
    monkeypatch.setenv("PYG_DIRECT_AHEAD_GPU", "0")


@pytest.fixture
def room(monkeypatch):
    """A device that has room for the rows of any layer."""
    monkeypatch.setattr(whole_table, "find_device_room", lambda *args: 1 << 30)


@pytest.fixture
def path(tmp_path, monkeypatch):
    # Files that were just written are cached.
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    return save_rows(tmp_path / "x.npy", X)


@pytest.fixture
def windows(monkeypatch):
    """Windows that were opened: their bytes, and how many others were in memory then; and their reads."""
    seen, alive, init = [], weakref.WeakSet(), RowWindow.__init__

    def note(window, *args, **options):
        others = len(alive)
        init(window, *args, **options)
        alive.add(window)
        seen.append((window.num_bytes, others, window._reader, window.shape))

    monkeypatch.setattr(RowWindow, "__init__", note)
    return seen


def make_model(device, cls=GraphSAGE, **options):
    torch.manual_seed(2)
    return cls(WIDTH, HIDDEN, num_layers=3, out_channels=5, **options).to(device).eval()


def graph_without_rows():
    return Data(edge_index=EDGES, num_nodes=NODES)


def in_memory(model, device):
    return infer(model, Data(x=X, edge_index=EDGES), batch_size=SIZE, device=device).cpu()


def in_files(model, device, x, out, **options):
    x = Feature(device=device).from_file(x) if isinstance(x, Path) else x
    return infer(model, graph_without_rows(), x=x, out=out, **{"batch_size": SIZE, "device": device, **options})


def are_equal(got, expected, device):
    """Bit for bit; on a GPU PyG's sums are added in any order."""
    if device.type == "cpu":
        return torch.equal(got, expected)
    return torch.allclose(got.cpu(), expected, rtol=1e-5, atol=1e-5)


# A norm of all nodes, and an activation over them, are computed at once.
MODELS = [(GraphSAGE, {}), (GCN, {}), (GAT, {"heads": 2}), (GCN, {"norm": "graph_norm"}),
          (GraphSAGE, {"act": torch.nn.Softmax(0)})]  # fmt: skip


@pytest.mark.parametrize(("cls", "options"), MODELS, ids=str)
def test_results_equal_those_of_rows_in_memory_bit_for_bit(path, tmp_path, device, cls, options):
    model, out = make_model(device, cls, **options), tmp_path / "out.npy"

    got = in_files(model, device, path, out, ahead="100K")

    assert are_equal(got, in_memory(model, device), device)
    assert np.array_equal(np.load(out), got)
    assert sorted(os.listdir(tmp_path)) == ["out.npy", "x.npy"]


@pytest.mark.parametrize("kind", ["only features", "only layers", "a feature in memory", "one batch"])
def test_features_and_layers_may_lie_in_files_alone(path, tmp_path, device, kind):
    model, out = make_model(device), None if kind == "only features" else tmp_path / "out.safetensors"
    x = {"only layers": X, "a feature in memory": Feature(device=device).from_cpu_tensor(X.clone())}.get(kind, path)
    size = {"batch_size": NODES} if kind == "one batch" else {"batch_size": SIZE}
    expected = infer(model, Data(x=X, edge_index=EDGES), device=device, **size).cpu()

    x = Feature(device=device).from_file(x) if isinstance(x, Path) else x
    got = infer(model, graph_without_rows(), x=x, out=out, device=device, **size)

    assert are_equal(got.cpu(), expected, device)
    if out is not None:
        assert torch.equal(Feature(device="cpu").from_file(out)[torch.arange(NODES)], got)


def test_a_store_and_its_loader_give_the_features(path, device):
    store, model = FeatureStore(device=device), make_model(device)
    store[None, "x", None] = Feature(device=device).from_file(path)
    graph = store, graph_without_rows()
    loader = NeighborLoader(graph, [-1], torch.arange(NODES), batch_size=SIZE, device=device, ahead="100K")

    expected = in_memory(model, device)
    assert are_equal(infer(model, graph, batch_size=SIZE, device=device).cpu(), expected, device)
    assert are_equal(infer(model, loader).cpu(), expected, device)
    assert next(iter(loader)).x.shape[1] == WIDTH


def test_each_page_is_read_once_if_memory_holds_the_rows_of_a_layer(path, tmp_path, device, windows):
    in_files(make_model(device), device, path, tmp_path / "out.npy", ahead="10M")

    # The features and two layers; the last one is the result.
    assert [shape[1] for *_, shape in windows] == [WIDTH, HIDDEN, HIDDEN]
    for _, _, reader, shape in windows:
        assert reader.num_pages <= -(-shape.numel() * 4 // 4096) + 2
        assert reader.num_again <= 2


@pytest.mark.parametrize("order", ["plain", "packed", "by the program"])
@pytest.mark.parametrize("is_filed", [True, False])
def test_rows_that_fit_the_device_are_read_once_in_order(path, tmp_path, device, room, windows, order, is_filed,
                                                         caplog):  # fmt: skip
    ids = torch.randperm(NODES, generator=torch.Generator().manual_seed(3))
    if order == "packed":
        path = pack_rows(path, tmp_path / "packed.safetensors", ids)
    elif order == "by the program":
        path = save_rows(tmp_path / "other.npy", X[ids])
    x = Feature(device=device).from_file(path, order=ids if order == "by the program" else None)
    model, out = make_model(device), tmp_path / "out.npy" if is_filed else None

    with caplog.at_level("INFO", logger="pyg_direct.loader.whole_table"):
        got = in_files(model, device, x, out)

    assert are_equal(got.cpu(), in_memory(model, device), device)
    assert out is None or np.array_equal(np.load(out), got)
    assert windows == []
    assert "2,000 rows read" in caplog.text
    assert " 0% of them again" in caplog.text


def test_layers_that_fit_the_device_are_not_written(path, tmp_path, device, room, monkeypatch):
    written, save = [], inference.save_pieces
    monkeypatch.setattr(
        inference,
        "save_pieces",
        lambda file, *args, **options: (written.append(file.name), save(file, *args, **options)),
    )
    in_files(make_model(device), device, path, tmp_path / "out.npy")

    assert written == ["layer0.npy"]
    assert sorted(os.listdir(tmp_path)) == ["out.npy", "x.npy"]


def test_layers_are_written_if_memory_of_the_device_lies_in_pieces(path, tmp_path, device, room, monkeypatch):
    written, save, asked = [], inference.save_pieces, []
    monkeypatch.setattr(
        inference,
        "save_pieces",
        lambda file, *args, **options: (written.append(file.name), save(file, *args, **options)),
    )

    def refuse(*args):
        asked.append(args)
        raise torch.OutOfMemoryError("no piece is large enough")

    model = make_model(device)
    expected = in_memory(model, device)
    monkeypatch.setattr(inference._Rows, "empty", refuse)

    got = in_files(model, device, path, tmp_path / "out.npy")

    assert are_equal(got, expected, device)
    assert len(asked) == 2
    assert written == ["layer2.safetensors", "layer1.safetensors", "layer0.npy"]
    assert sorted(os.listdir(tmp_path)) == ["out.npy", "x.npy"]


def test_rows_that_are_partly_in_memory_are_read_as_batches_need_them(path, device, room, windows):
    x = Feature(device=device, host_cache_size="20%").from_file(path)

    got = in_files(make_model(device), device, x, None)

    assert are_equal(got.cpu(), in_memory(make_model(device), device), device)
    assert len(windows) == 1


@pytest.mark.parametrize("change", ["cut short", "replaced", "touched", "taken away"])
def test_a_file_that_changes_before_it_is_read_whole_is_named(path, device, room, change):
    x = Feature(device=device).from_file(path)
    change_file(path, change, X)

    with pytest.raises(FileError, match=r"x\.npy"):
        in_files(make_model(device), device, x, None)


def test_an_error_ends_the_read_of_the_whole_table(path, device, room, monkeypatch):
    ended, end = [], whole_table._end_read
    monkeypatch.setattr(whole_table, "_end_read", lambda *args: (end(*args), ended.append(args[0].is_broken)))
    model = stop_at(make_model(device), 1, interrupt)

    with pytest.raises(KeyboardInterrupt):
        in_files(model, device, path, None)

    assert ended == [False]


def test_memory_is_bounded_by_what_is_asked_for(path, tmp_path, device, windows, monkeypatch):
    written, held = [], []
    write, view = row_files._write_all, RowFile.stream
    monkeypatch.setattr(row_files, "_write_all", lambda file, data: (written.append(len(data)), write(file, data)))
    monkeypatch.setattr(RowFile, "stream", lambda file: (held.append(file.path), view(file))[1])
    monkeypatch.setattr(inference._Rows, "empty", lambda *args: held.append(args))

    in_files(make_model(device), device, path, tmp_path / "out.npy", ahead="60K")

    assert len(windows) == 3
    for num_bytes, others, reader, (count, width) in windows:
        # Rows, and 8 bytes a row of the table and of the window to find them.
        assert num_bytes <= 60 * 1024 + 8 * count + 8 * (60 * 1024 // (4 * width))
        assert others == 0
        assert reader.num_requests > 0
    # No more than a batch, or the header of a page, is written at a time; no layer is held.
    assert max(written) <= max(SIZE * HIDDEN * 4, 4096)
    assert not held


class _Stops(SAGEConv):
    """A convolution that calls a function at its fourth batch."""

    def forward(self, x, edges):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 4:
            self.act_then()
        return super().forward(x, edges)


def stop_at(model, layer, act):
    own = _Stops(*((WIDTH if layer == 0 else HIDDEN), HIDDEN if layer < 2 else 5))
    own.act_then = act
    model.convs[layer] = own.to(next(model.parameters()).device).eval()
    return model


def interrupt():
    raise KeyboardInterrupt("stop")


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_interrupted_run_leaves_the_old_result_and_nothing_else(path, tmp_path, device, layer):
    out, before = save_rows(tmp_path / "out.npy", torch.ones(2)), threading.enumerate()
    model = stop_at(make_model(device), layer, interrupt)

    with pytest.raises(KeyboardInterrupt, match="stop"):
        in_files(model, device, path, out, ahead="100K")

    assert np.load(out).tolist() == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["out.npy", "x.npy"]
    begun = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in begun if thread.name.startswith("pyg_direct_ahead")]
    assert are_equal(in_files(model, device, path, out), in_memory(model, device), device)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_full_disk_is_named_and_nothing_is_published(path, tmp_path, device, monkeypatch, when):
    out, write = save_rows(tmp_path / "out.npy", torch.ones(2)), row_files._write_all
    if when == "before":
        words, full = "out must lie where .* bytes are free, .*out.npy.partial has 5", type("Usage", (), {"free": 5})
        monkeypatch.setattr(row_files.shutil, "disk_usage", lambda path: full)
    else:
        words = r"out=.*layer1\.safetensors' could not be written, .*: the disk is full \(\d+ bytes needed\)"
        calls = []

        def fill(file, data):
            calls.append(len(data))
            # In the second layer: each has a header and 7 batches.
            if len(calls) == 12:
                raise OSError(errno.ENOSPC, "no room")
            write(file, data)

        monkeypatch.setattr(row_files, "_write_all", fill)

    with pytest.raises(FileError, match=words):
        in_files(make_model(device), device, path, out)
    assert np.load(out).tolist() == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["out.npy", "x.npy"]


@pytest.mark.parametrize("change", ["cut short", "replaced"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_file_that_changes_meanwhile_is_named(path, tmp_path, device, change, layer):
    target = path if layer == 0 else tmp_path / "out.npy.partial" / "layer2.safetensors"

    def spoil():
        if change == "cut short":
            os.truncate(target, 1000)
        else:
            save_rows(target, X + 1)

    model = stop_at(make_model(device), layer, spoil)
    with pytest.raises(FileError, match=rf"{target.name} changed while it was read"):
        in_files(model, device, path, tmp_path / "out.npy", ahead=1, batch_size=100)
    assert os.listdir(tmp_path) == ["x.npy"]


def test_a_run_takes_the_folder_of_one_that_was_killed_and_no_other(path, tmp_path, device):
    folder, out = tmp_path / "out.npy.partial", tmp_path / "out.npy"
    folder.mkdir()
    for name in ("layer2.safetensors", ".layer1.safetensors.0a1b2c3d", "lock", "notes.txt"):
        (folder / name).write_text("old")
    model = make_model(device)

    with FileLock(folder / "lock"), pytest.raises(FileError, match=r"by one run at a time: another one has locked"):
        in_files(model, device, path, out)
    assert not out.exists()
    assert len(os.listdir(folder)) == 4

    assert are_equal(in_files(model, device, path, out), in_memory(model, device), device)
    # What is not of a run stays.
    assert os.listdir(folder) == ["notes.txt"]


def test_runs_over_other_results_in_a_folder_do_not_meet(path, tmp_path, device):
    model, got = make_model(device), []

    def run_another():
        got.append(in_files(make_model(device), device, path, tmp_path / "second.npy"))

    in_files(stop_at(make_model(device), 1, run_another), device, path, tmp_path / "first.npy")

    assert are_equal(got[0], in_memory(model, device), device)
    assert sorted(os.listdir(tmp_path)) == ["first.npy", "second.npy", "x.npy"]


def test_a_result_that_cannot_be_put_into_place_is_named(path, tmp_path, device):
    out = tmp_path / "out.npy"

    with pytest.raises(FileError, match=r"out='.*out\.npy' could not be written: Is a directory"):
        in_files(stop_at(make_model(device), 2, out.mkdir), device, path, out)
    assert sorted(os.listdir(tmp_path)) == ["out.npy", "x.npy"]


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_an_empty_graph_has_a_file_without_rows(tmp_path, suffix):
    data = Data(x=torch.empty(0, WIDTH), edge_index=torch.empty(2, 0, dtype=torch.int64))

    assert infer(make_model("cpu"), data, device="cpu", out=tmp_path / f"out{suffix}").shape == (0, 5)


def test_other_arguments_are_refused(path, tmp_path):
    model, feature = make_model("cpu"), Feature(device="cpu").from_file(path)
    for out, words in [("out.pt", "out must end in"), (tmp_path, "a file, got the folder"),
                       (path, "out must be another file than x"),
                       (tmp_path / "none" / "out.npy", "out=.* could not be written: No such file")]:  # fmt: skip
        with pytest.raises((ArgumentError, FileError), match=words):
            in_files(model, "cpu", feature, out)
    with pytest.raises(ArgumentTypeError, match="out must be the name of a file, got 3"):
        in_files(model, "cpu", feature, 3)
    with pytest.raises(ArgumentError, match=r"dtype of NumPy for \.npy"):
        in_files(make_model("cpu").bfloat16(), "cpu", X.bfloat16(), tmp_path / "out.npy")
    with pytest.raises(ArgumentError, match="x must have a row for each of the 2000 nodes"):
        in_files(model, "cpu", Feature(device="cpu").from_cpu_tensor(X[:5].clone()), None)
    adjacency = Data(adj_t=torch.eye(NODES).to_sparse_csr(), num_nodes=NODES)
    with pytest.raises(ArgumentError, match="data must have edge_index where rows lie in files, got adj_t"):
        infer(model, adjacency, x=feature, device="cpu")
    with pytest.raises(ArgumentError, match="data must have edge_index or adj_t, got Data"):
        infer(model, Data(num_nodes=NODES), x=feature, device="cpu")
    with pytest.raises(ArgumentTypeError, match=r"features in a pyg_direct.FeatureStore"):
        infer(model, (Data(), graph_without_rows()), device="cpu")
    assert os.listdir(tmp_path) == ["x.npy"]


@pytest.mark.filterwarnings("error")
def test_memory_for_rows_in_memory_is_told_to_be_unused(path, tmp_path):
    model = make_model("cpu")

    with pytest.raises(LoaderWarning, match="ahead='1M': not used, as it needs rows in files"):
        infer(model, Data(x=X, edge_index=EDGES), device="cpu", ahead="1M")
    # The features are in memory, the layers are not.
    in_files(model, "cpu", X, tmp_path / "out.npy", ahead="1M")
    infer(model, inference_loader(Data(x=X, edge_index=EDGES), SIZE, device="cpu"))


def test_layers_larger_than_free_memory_are_told(monkeypatch):
    monkeypatch.setattr(inference, "available_bytes", lambda: 1000)

    with pytest.warns(PlacementWarning, match="but only 1.0 KB of host memory are free: give out="):
        infer(make_model("cpu"), Data(x=X, edge_index=EDGES), batch_size=SIZE, device="cpu")
