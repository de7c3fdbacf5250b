"""Tables rewritten in another order are read by the same ids."""

import errno
import json
import os

import numpy as np
import pyarrow
import pytest
import torch
import typer
from pyarrow import parquet
from torch_geometric.data import Data

from pyg_direct import (
    CSRTopo,
    DeviceConfig,
    Feature,
    FeatureStore,
    NeighborLoader,
    order_by_reads,
    pack_rows,
    save_rows,
)
from pyg_direct.cli.app import app
from pyg_direct.errors import ArgumentError, FileError, PygDirectError
from pyg_direct.features import packed_rows
from pyg_direct.features.row_files import PACKED
from tests.features.contract import DTYPES, bytes_of, make_rows

ORDER = torch.randperm(40, generator=torch.Generator().manual_seed(0))
IDS = [5, 0, 39, 5, 5, 17, 38, 1, 0]
CACHES = [{}, {"host_cache_size": "30%"}, {"device_cache_size": "20%"}, {"host_cache_size": "100%"}]


@pytest.fixture
def table(tmp_path):
    rows = make_rows()
    return rows, save_rows(tmp_path / "rows.npy", rows)


def read(feature, ids=IDS):
    return bytes_of(feature[torch.tensor(ids, device=feature.device)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_rows_of_any_dtype_are_read_by_id(tmp_path, device, dtype):
    rows = make_rows(dtype=dtype)
    path = pack_rows(save_rows(tmp_path / "rows.safetensors", rows), tmp_path / "packed.safetensors", ORDER)

    assert torch.equal(read(Feature(device=device).from_file(path)), bytes_of(rows)[IDS])


@pytest.mark.parametrize("caches", CACHES, ids=str)
@pytest.mark.parametrize("is_packed", [True, False])
def test_caches_hold_the_rows_of_their_ids(tmp_path, table, device, caches, is_packed):
    rows, path = table
    if is_packed:
        file, options = pack_rows(path, tmp_path / "packed.safetensors", ORDER), {}
    else:
        file, options = save_rows(tmp_path / "moved.npy", rows[ORDER]), {"order": ORDER}
    hotness = torch.arange(40)
    feature = Feature(device=device, hotness=hotness, **caches).from_file(file, **options)

    assert torch.equal(read(feature), bytes_of(rows)[IDS])
    if "host_cache_size" in caches and feature.placement == "mmap":
        # The hottest ids, wherever their rows lie.
        assert sorted(feature.find_missing(torch.arange(40)).tolist()) == sorted(
            packed_rows.invert(ORDER)[:28].tolist())  # fmt: skip


def test_the_ranking_of_a_graph_is_by_id(tmp_path, table):
    rows, path = table
    topo = CSRTopo(torch.tensor([[7] * 9, list(range(9))]), num_nodes=40)
    packed = pack_rows(path, tmp_path / "packed.safetensors", ORDER)
    feature = Feature(device="cpu", host_cache_size="20B", csr_topo=topo).from_file(packed)

    assert feature.find_missing(torch.tensor([7])).tolist() == []
    assert torch.equal(read(feature), bytes_of(rows)[IDS])


def test_other_readers_know_packed_files(tmp_path, table):
    rows, path = table
    packed = pack_rows(path, tmp_path / "packed.safetensors", ORDER)
    feature, names = Feature(device="cpu").from_file(packed), torch.randperm(40)

    assert torch.equal(bytes_of(feature.read_mmap(torch.tensor(IDS))), bytes_of(rows)[IDS])
    feature.set_local_order(names)
    assert torch.equal(read(feature, names.tolist()), bytes_of(rows))
    parts = Feature(device="cpu").from_mmap(None, DeviceConfig([packed], torch.empty(0, 5)))
    assert torch.equal(read(parts), bytes_of(rows)[IDS])
    with pytest.raises(ArgumentError, match="path must name a table in the order of ids"):
        Feature(device="cpu").from_cpu_tensor(rows).set_mmap_file(packed, torch.arange(40))


def test_a_packed_file_is_packed_again(tmp_path, table):
    rows, path = table
    once = pack_rows(path, tmp_path / "once.safetensors", ORDER)
    twice = pack_rows(once, tmp_path / "twice.safetensors", torch.arange(40))

    assert torch.equal(read(Feature(device="cpu").from_file(twice)), bytes_of(rows)[IDS])
    assert torch.equal(bytes_of(packed_rows.RowFile(twice, name="rows").rows), bytes_of(rows))


FAULTS = {"interrupt": (KeyboardInterrupt, "stop"),
          "full": (FileError, "the disk is full .* the same call continues")}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_interrupted_call_continues(tmp_path, table, monkeypatch, fault):
    rows, path = table
    target, real, moved = tmp_path / "packed.safetensors", packed_rows.RangeReader.read, []

    def read_some(reader, own, *args):
        if len(moved) == 3:
            raise KeyboardInterrupt("stop") if fault == "interrupt" else OSError(errno.ENOSPC, "no room")
        moved.append(len(own))
        return real(reader, own, *args)

    with monkeypatch.context() as patch:
        patch.setattr(packed_rows.RangeReader, "read", read_some)
        with pytest.raises(FAULTS[fault][0], match=FAULTS[fault][1]):
            pack_rows(path, target, ORDER, memory="140B")
    assert not target.exists()
    assert json.loads((tmp_path / "packed.safetensors.partial.json").read_text())["done"] == 21
    read_again = []

    def read_on(reader, own, *args):
        read_again.append(len(own))
        return real(reader, own, *args)

    monkeypatch.setattr(packed_rows.RangeReader, "read", read_on)
    pack_rows(path, target, ORDER, memory="140B")

    assert sum(read_again) == 19
    assert torch.equal(read(Feature(device="cpu").from_file(target)), bytes_of(rows)[IDS])
    assert sorted(os.listdir(tmp_path)) == ["packed.safetensors", "rows.npy"]


@pytest.fixture
def deals(monkeypatch):
    """Tables of any size are read once in order, and dealt out."""
    monkeypatch.setattr(packed_rows, "_LEAST_WRITE", 0)
    monkeypatch.setattr(packed_rows, "_FEW_PIECES", 1)
    return monkeypatch


def follow_reads(monkeypatch, most=10**9):
    """Rows of each read of the source; a call after the last one is interrupted."""
    real, reads = packed_rows.RangeReader.read, []

    def read_some(reader, own, *args):
        if len(reads) == most:
            raise KeyboardInterrupt("stop")
        reads.append(own.tolist())
        return real(reader, own, *args)

    monkeypatch.setattr(packed_rows.RangeReader, "read", read_some)
    return reads


@pytest.mark.parametrize("memory", ["40B", "100B", "280B", "400B"])
def test_a_large_table_is_read_once_in_order(tmp_path, device, deals, memory):
    rows = make_rows(397)
    order = torch.randperm(397, generator=torch.Generator().manual_seed(1))
    path, reads = save_rows(tmp_path / "rows.npy", rows), follow_reads(deals)

    packed = pack_rows(path, tmp_path / "packed.safetensors", order, memory=memory)

    assert [row for part in reads for row in part] == [*range(397)]
    assert torch.equal(bytes_of(packed_rows.RowFile(packed, name="rows").rows), bytes_of(rows)[order])
    assert sorted(os.listdir(tmp_path)) == ["packed.safetensors", "rows.npy"]


@pytest.mark.parametrize("at", ["dealing", "order", "half a piece"])
def test_a_call_that_was_interrupted_while_rows_were_dealt_out_continues(tmp_path, deals, at):
    rows = make_rows(397)
    order = torch.randperm(397, generator=torch.Generator().manual_seed(1))
    path, target = save_rows(tmp_path / "rows.npy", rows), tmp_path / "packed.safetensors"
    real, pieces = packed_rows._write_at, []

    def write_some(handle, data, place):
        # Pieces that are in order have 20 rows, and so has no piece that is dealt out.
        pieces.append(len(data) == 20 * 20)
        if sum(pieces) == 5:
            if at == "half a piece":
                real(handle, data[: len(data) // 2], place)
            raise KeyboardInterrupt("stop")
        real(handle, data, place)

    with deals.context() as patch:
        if at == "dealing":
            follow_reads(patch, 5)
        else:
            patch.setattr(packed_rows, "_write_at", write_some)
        with pytest.raises(KeyboardInterrupt):
            pack_rows(path, target, order, memory="800B")
    assert not target.exists()

    # More memory now does not change pieces that are dealt out.
    reads = follow_reads(deals)
    pack_rows(path, target, order, memory="800B" if at == "dealing" else "4000B")

    assert torch.equal(bytes_of(packed_rows.RowFile(target, name="rows").rows), bytes_of(rows)[order])
    # The piece that was begun is read from the source.
    assert sum(map(len, reads)) == (397 if at == "dealing" else 20)


def test_a_disk_that_is_full_while_rows_are_dealt_out_is_named(tmp_path, deals):
    rows, order = make_rows(397), torch.randperm(397, generator=torch.Generator().manual_seed(1))
    path, target, real, places = save_rows(tmp_path / "rows.npy", rows), tmp_path / "packed.safetensors", os.pwrite, []

    def write_some(handle, data, place):
        places.append(place)
        if len(places) > 30:
            raise OSError(errno.ENOSPC, "no room")
        return real(handle, data, place)

    with deals.context() as patch:
        patch.setattr(os, "pwrite", write_some)
        with pytest.raises(FileError, match=r"the disk is full .* the same call continues"):
            pack_rows(path, target, order, memory="800B")
    assert not target.exists()

    pack_rows(path, target, order, memory="800B")
    assert torch.equal(bytes_of(packed_rows.RowFile(target, name="rows").rows), bytes_of(rows)[order])


def test_a_packed_table_is_dealt_out_again(tmp_path, deals):
    rows, order = make_rows(397), torch.randperm(397, generator=torch.Generator().manual_seed(1))
    once = pack_rows(save_rows(tmp_path / "rows.npy", rows), tmp_path / "once.safetensors", order, memory="800B")

    twice = pack_rows(once, tmp_path / "twice.safetensors", order.flip(0), memory="800B")

    assert torch.equal(bytes_of(packed_rows.RowFile(twice, name="rows").rows), bytes_of(rows)[order.flip(0)])


@pytest.mark.parametrize("change", ["order", "source"])
def test_other_arguments_begin_anew(tmp_path, table, monkeypatch, change):
    rows, path = table
    target, real = tmp_path / "packed.safetensors", packed_rows.write_whole

    def stop(journal, text):
        real(journal, text)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packed_rows, "write_whole", stop)
        with pytest.raises(KeyboardInterrupt):
            pack_rows(path, target, ORDER, memory="140B")
    order = ORDER.flip(0) if change == "order" else ORDER
    if change == "source":
        rows = rows.flip(0)
        save_rows(path, rows)

    pack_rows(path, target, order, memory="140B")
    assert torch.equal(read(Feature(device="cpu").from_file(target)), bytes_of(rows)[IDS])


def test_a_source_that_changes_is_not_published(tmp_path, table, monkeypatch):
    _, path = table
    real = packed_rows.write_whole
    monkeypatch.setattr(packed_rows, "write_whole", lambda *args: (real(*args), os.utime(path, ns=(0, 0))))

    with pytest.raises(FileError, match="changed while it was read"):
        pack_rows(path, tmp_path / "packed.safetensors", ORDER)
    assert not (tmp_path / "packed.safetensors").exists()


@pytest.mark.parametrize(("options", "words"), [
    ({"target": "packed.npy"}, "target must end in .safetensors"),
    ({"order": ORDER[:39]}, "order must hold each of 0 to 39 once"),
    ({"order": torch.zeros(40, dtype=torch.int64)}, "order must hold each of 0 to 39 once, got 40 ids, 1 of them"),
    ({"order": torch.arange(40) + 1}, "order must lie in"),
    ({"memory": "lots"}, "memory must look like"),
])  # fmt: skip
def test_other_arguments_are_refused(tmp_path, table, options, words):
    given = {"target": "packed.safetensors", "order": ORDER, **options}
    with pytest.raises(PygDirectError, match=words):
        pack_rows(table[1], tmp_path / given.pop("target"), **given)


def test_a_damaged_packed_file_is_refused(tmp_path, table):
    path = pack_rows(table[1], tmp_path / "packed.safetensors", ORDER)
    os.truncate(path, path.stat().st_size - 8)

    with pytest.raises(FileError, match="must hold the id of each of its 40 packed rows"):
        Feature(device="cpu").from_file(path)


@pytest.mark.parametrize("options", [("--order", "order"), ("--hotness", "hotness"), ("--edges", "edges"),
                                     ("--edges", "edges", "--parts", "parts")], ids=str)  # fmt: skip
def test_the_command_packs(tmp_path, table, capsys, options):
    rows, path = table
    scores = torch.arange(40).flip(0)
    arrays = {"order": ORDER, "hotness": scores, "parts": torch.arange(40) % 3,
              "edges": torch.tensor([[3, 3, 7], [0, 1, 2]])}  # fmt: skip
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array.numpy())
    words = [str(tmp_path / f"{word}.npy") if word in arrays else word for word in options]
    target = tmp_path / "packed.safetensors"

    app(["pack", str(path), str(target), *words, "--json"], standalone_mode=False)

    assert json.loads(capsys.readouterr().out) == {"file": str(target), "num_rows": 40}
    feature = Feature(device="cpu").from_file(target)
    assert torch.equal(read(feature), bytes_of(rows)[IDS])
    first = {"order": ORDER[0], "hotness": 0, "edges": 3, "parts": 3}[options[-1]]
    assert packed_rows.RowFile(target).order[0] == first
    assert PACKED.encode() in target.read_bytes()[:4096]


def test_the_command_packs_for_the_epochs_of_a_loader(tmp_path):
    rows, edges = torch.randn(600, 8), torch.randint(600, (2, 3000), generator=torch.Generator().manual_seed(0))
    path, target = save_rows(tmp_path / "x.npy", rows), tmp_path / "packed.safetensors"
    arrays = {"edges": edges, "input-nodes": torch.arange(0, 600, 4)}
    words = ["--num-neighbors", "4,2", "--batch-size", "8", "--seed", "3", "--ahead", "8000B", "--epochs", "2"]
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array.numpy())
        words += [f"--{name}", str(tmp_path / f"{name}.npy")]
    feature, store = Feature().from_file(path), FeatureStore()
    store[None, "x", None] = feature
    loader = NeighborLoader((store, Data(edge_index=edges, num_nodes=600)), [4, 2], arrays["input-nodes"], batch_size=8,
                            shuffle=True, seed=3, ahead="8000B")  # fmt: skip

    app(["pack", str(path), str(target), *words], standalone_mode=False)

    assert torch.equal(packed_rows.RowFile(target).order, order_by_reads(loader, feature, num_epochs=2))
    assert torch.equal(Feature(device="cpu").from_file(target)[torch.arange(600)], rows)


@pytest.mark.parametrize(("words", "named"), [
    ([], "give --edges, --num-neighbors, --seed and --ahead with --input-nodes, and no --parts"),
    (["--edges", "e.npy"], "give --edges, --num-neighbors, --seed and --ahead with --input-nodes, and no --parts"),
    (["--edges", "e.npy", "--num-neighbors", "4,x", "--seed", "0", "--ahead", "1G"],
     "--num-neighbors must be integers, such as 15,10,5, got 4,x"),
    (["--edges", "e.npy", "--num-neighbors", "4", "--seed", "0", "--ahead", "1G", "--epochs", "0"],
     "--epochs must be an integer of at least 1, got 0"),
])  # fmt: skip
def test_the_command_names_options_of_a_loader_that_do_not_fit(tmp_path, table, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    np.save("e.npy", np.zeros((2, 3), np.int64))
    np.save("n.npy", np.arange(5))

    with pytest.raises(typer.BadParameter, match=named):
        app(["pack", str(table[1]), "packed.safetensors", "--input-nodes", "n.npy", *words], standalone_mode=False)


@pytest.mark.parametrize("words", [["--seed", "0"], ["--ahead", "1G"], ["--num-neighbors", "4"], ["--epochs", "3"],
                                   ["--batch-size", "7"], ["--no-shuffle"]])  # fmt: skip
def test_options_of_a_loader_without_its_nodes_are_named(tmp_path, table, words):
    with pytest.raises(typer.BadParameter, match=r"give --num-neighbors, --seed, .* only with --input-nodes"):
        app(["pack", str(table[1]), str(tmp_path / "packed.safetensors"), "--edges", "e.npy", *words],
            standalone_mode=False)  # fmt: skip


@pytest.mark.parametrize("words", [[], ["--order", "a.npy", "--hotness", "b.npy"], ["--order", "missing.npy"]])
def test_the_command_names_options_that_do_not_fit(tmp_path, table, words):
    with pytest.raises(Exception, match="--order"):
        app(["pack", str(table[1]), str(tmp_path / "packed.safetensors"), *words], standalone_mode=False)


def save_parquet(path, columns):
    parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return path


def make_columns(rows, kind):
    """Rows as columns of numbers, or as a column of lists."""
    if kind == "columns":
        return {f"x{place}": rows[:, place] for place in range(rows.shape[1])}
    flat = pyarrow.array(rows.reshape(-1))
    if kind == "fixed lists":
        return {"x": pyarrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])}
    return {"x": pyarrow.ListArray.from_arrays(np.arange(0, rows.size + 1, rows.shape[1]), flat)}


@pytest.mark.parametrize("kind", ["columns", "fixed lists", "lists"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_rows_of_a_parquet_file_are_written_bit_for_bit(tmp_path, kind, dtype):
    rows = np.arange(40 * 5).reshape(40, 5).astype(dtype)
    source = save_parquet(tmp_path / "x.parquet", make_columns(rows, kind))

    path = pack_rows(source, tmp_path / "x.safetensors", memory=100)

    assert torch.equal(Feature(device="cpu").from_file(path)[torch.tensor(IDS)], torch.from_numpy(rows)[IDS])
    repacked = pack_rows(path, tmp_path / "packed.safetensors", ORDER)
    assert torch.equal(Feature(device="cpu").from_file(repacked)[torch.tensor(IDS)], torch.from_numpy(rows)[IDS])


@pytest.mark.parametrize(("columns", "words"), [
    ({"a": [1.0, 2.0], "b": [1, 2]}, "columns of numbers of one dtype"),
    ({"a": [[1.0], [2.0]], "b": [[1.0], [2.0]]}, "or one column of lists"),
    ({"a": ["x", "y"]}, "source must hold numbers, got string"),
    ({"a": [{"b": 1}, {"b": 2}]}, "source must hold numbers, got struct"),
    ({"a": [[[1.0]], [[2.0]]]}, "source must hold numbers, got list"),
    ({"a": [1.0, None]}, "a number in each place"),
    ({"a": [[1.0, 2.0], [1.0]]}, "lists of 2 numbers, as in its first row"),
    ({"a": [[1.0, 2.0], [1.0, None]]}, "a number in each place"),
    ({"a": [[1.0, 2.0], None]}, "lists of 2 numbers"),
])  # fmt: skip
def test_parquet_files_of_other_rows_are_refused(tmp_path, columns, words):
    source = save_parquet(tmp_path / "x.parquet", columns)

    with pytest.raises(ArgumentError, match=words):
        pack_rows(source, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == ["x.parquet"]


def test_a_parquet_file_is_not_read_in_place_or_in_another_order(tmp_path):
    source = save_parquet(tmp_path / "x.parquet", make_columns(np.ones((40, 2)), "columns"))

    with pytest.raises(FileError, match="which has columns: write its rows"):
        Feature(device="cpu").from_file(source)
    with pytest.raises(ArgumentError, match=r"order must be None for a \.parquet, got ids for"):
        pack_rows(source, tmp_path / "x.safetensors", ORDER)
    with pytest.raises(ArgumentError, match=r"order must hold the id of each row of .*x\.npy"):
        pack_rows(tmp_path / "x.npy", tmp_path / "x.safetensors")


@pytest.mark.parametrize("damage", ["cut short", "missing"])
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
    source = save_parquet(tmp_path / "x.parquet", make_columns(np.ones((40, 2)), "columns"))
    if damage == "missing":
        source.unlink()
    else:
        os.truncate(source, 100)

    with pytest.raises(PygDirectError, match=r"source must .*x\.parquet"):
        pack_rows(source, tmp_path / "x.safetensors")


def test_a_parquet_file_that_changes_meanwhile_leaves_nothing(tmp_path, monkeypatch):
    source = save_parquet(tmp_path / "x.parquet", make_columns(np.ones((40, 2)), "columns"))
    join = packed_rows._join_columns

    def touch(*args):
        os.utime(source, ns=(0, 0))
        return join(*args)

    monkeypatch.setattr(packed_rows, "_join_columns", touch)
    with pytest.raises(FileError, match=r"x\.parquet changed while it was read"):
        pack_rows(source, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == ["x.parquet"]


def test_the_command_writes_the_rows_of_a_parquet_file(tmp_path, capsys):
    source = save_parquet(tmp_path / "x.parquet", make_columns(np.ones((40, 2)), "columns"))

    app(["pack", str(source), str(tmp_path / "x.safetensors")], standalone_mode=False)

    assert "40 rows" in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="give no order for"):
        app(["pack", str(source), str(tmp_path / "y.safetensors"), "--parts", "parts.npy"], standalone_mode=False)


def test_a_packed_file_keeps_its_order(tmp_path):
    order = torch.arange(40)
    pack_rows(save_rows(tmp_path / "rows.npy", make_rows(40, (3,), torch.float32)), tmp_path / "packed.safetensors",
              order=order.flip(0))  # fmt: skip

    with pytest.raises(ArgumentError, match=r"order must be None for .*, which has an order of its own"):
        Feature(device="cpu").from_file(tmp_path / "packed.safetensors", order=order)
