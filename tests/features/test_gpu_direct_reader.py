"""Rows of a file by requests of kvikio, of which the tests have a stand-in."""

import errno
import os
import sys
import threading

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pyg_direct import Feature, FeatureStore, NeighborLoader, save_rows
from pyg_direct.errors import DeviceError, FileError
from pyg_direct.features import gpu_direct_reader
from pyg_direct.features.gpu_direct_reader import GpuDirectReader, wants_gpu_direct
from pyg_direct.features.row_files import RowFile
from tests import kvikio_stand_in
from tests.features.contract import change_file


@pytest.fixture
def kvikio(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", kvikio_stand_in)
    return kvikio_stand_in


@pytest.fixture
def reader_of(tmp_path, kvikio):
    def make(rows):
        return GpuDirectReader(RowFile(save_rows(tmp_path / "rows.npy", rows)))

    return make


def make_rows(count, width):
    return torch.randint(256, (count, width), dtype=torch.uint8)


def read(reader, rows, ids, device="cpu"):
    out = torch.zeros(len(ids), rows.shape[1], dtype=torch.uint8, device=device)
    slots = np.random.default_rng(0).permutation(len(ids))
    assert reader.read(ids, slots, out)
    return out.cpu().numpy()[slots]


@pytest.mark.parametrize(("count", "width"), [(1, 3), (700, 1), (5000, 37), (3000, 512), (40, 9000), (2, 3 << 20)])
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("staging", [1 << 14, 64 << 20])
def test_rows_come_as_they_lie_in_the_file(reader_of, real_device, monkeypatch, count, width, share, staging):
    monkeypatch.setattr(gpu_direct_reader, "_STAGING_BYTES", staging)
    rows = make_rows(count, width)
    ids = np.flatnonzero(np.random.default_rng(1).random(count) < share)

    assert np.array_equal(read(reader_of(rows), rows, ids, real_device), rows.numpy()[ids])


def test_pages_are_counted_as_those_of_other_reads(reader_of):
    rows = make_rows(20_000, 400)
    reader, ids = reader_of(rows), np.arange(0, 20_000, 7)
    read(reader, rows, ids)
    pages = reader.num_pages

    read(reader, rows, ids)

    assert reader.num_pages == 2 * pages
    assert pages <= reader.num_again <= pages + reader.num_requests


@pytest.mark.parametrize("change", ["touched", "cut short", "replaced", "taken away"])
def test_a_file_that_changed_is_not_read(reader_of, change):
    rows = make_rows(100, 50)
    reader = reader_of(rows)
    change_file(reader.file.path, change, rows)

    with pytest.raises(FileError, match="taken away" if change == "taken away" else "changed while it was read"):
        read(reader, rows, np.arange(100))


def test_a_disk_that_fails_is_named_with_the_byte(reader_of, kvikio, monkeypatch):
    def fail(*args):
        raise RuntimeError(os.strerror(errno.EIO))

    monkeypatch.setattr(kvikio.CuFile, "read_at", staticmethod(fail))
    rows = make_rows(100, 5000)
    with pytest.raises(FileError, match=r"rows.npy could not be read at byte 4096: Input/output error"):
        read(reader_of(rows), rows, np.arange(100))


def test_a_read_that_ends_too_early_is_an_error(reader_of, kvikio, monkeypatch):
    monkeypatch.setattr(kvikio.CuFile, "read_at", staticmethod(lambda handle, size, begin: bytes(size - 1)))
    rows = make_rows(100, 5000)
    with pytest.raises(FileError, match=r"rows.npy was cut short while it was read: it ends before byte"):
        read(reader_of(rows), rows, np.arange(100))


def test_a_disk_that_hangs_is_named_with_the_byte(reader_of, kvikio, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(kvikio.CuFile, "read_at", staticmethod(lambda *args: go_on.wait() and b""))
    monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", "0.2")
    rows = make_rows(100, 5000)
    reader = reader_of(rows)
    try:
        with pytest.raises(FileError, match=r"rows.npy gave no bytes for 0.2 seconds, at byte 4096: check"):
            read(reader, rows, np.arange(100))
        assert reader.is_broken
    finally:
        go_on.set()


def test_a_read_can_be_left(reader_of, monkeypatch):
    rows = make_rows(100, 5000)
    reader = reader_of(rows)
    reader.leave()

    assert not reader.read(np.arange(100), np.arange(100), torch.zeros(100, 5000, dtype=torch.uint8))
    reader.leave(False)
    assert np.array_equal(read(reader, rows, np.arange(100)), rows.numpy())


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    file = RowFile(save_rows(tmp_path / "rows.npy", make_rows(3, 3)))
    with pytest.raises(ModuleNotFoundError, match=r'DIRECT=1 needs the package kvikio: pip install "\.\[gds12\]" or'):
        GpuDirectReader(file)


def test_a_library_that_kvikio_lacks_is_named(tmp_path, monkeypatch):
    (tmp_path / "kvikio.py").write_text("raise ImportError('libcufile.so.0: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    file = RowFile(save_rows(tmp_path / "rows.npy", make_rows(3, 3)))
    with pytest.raises(DeviceError, match=r"PYG_DIRECT_GPU_DIRECT must be 0 .* got 1: libcufile.so.0: cannot open"):
        GpuDirectReader(file)


def test_a_file_that_kvikio_does_not_open_is_named(tmp_path, kvikio, monkeypatch):
    def refuse(path, flags):
        raise RuntimeError("cuFile does not support it")

    monkeypatch.setattr(kvikio, "CuFile", refuse)
    with pytest.raises(FileError, match=r"rows.npy could not be opened by kvikio: cuFile does not support it; unset"):
        GpuDirectReader(RowFile(save_rows(tmp_path / "rows.npy", make_rows(3, 3))))


@pytest.mark.parametrize(("given", "before", "threads"), [(None, 1, 32), (None, 64, 64), ("4", 4, 4)])
def test_many_requests_are_under_way_unless_the_program_chose(reader_of, kvikio, monkeypatch, given, before, threads):
    monkeypatch.delenv("KVIKIO_NTHREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("KVIKIO_NTHREADS", given)
    kvikio.defaults.set("num_threads", before)

    reader_of(make_rows(3, 3))

    assert kvikio.defaults.get("num_threads") == threads


@pytest.mark.parametrize(("value", "kind", "wants"), [("1", "cuda", True), ("0", "cuda", False), ("", "cuda", False),
                                                      (None, "cuda", False), ("1", "cpu", False)])  # fmt: skip
def test_it_is_used_on_a_gpu_where_it_is_asked_for(monkeypatch, value, kind, wants):
    monkeypatch.delenv("PYG_DIRECT_GPU_DIRECT", raising=False)
    if value is not None:
        monkeypatch.setenv("PYG_DIRECT_GPU_DIRECT", value)

    assert wants_gpu_direct(torch.device(kind)) == wants


@pytest.mark.parametrize("ahead", [5, "100K", None])
def test_batches_equal_those_of_reads_through_the_host(tmp_path, real_device, kvikio, monkeypatch, ahead):
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    generator = torch.Generator().manual_seed(0)
    edges, x = torch.randint(3000, (2, 20_000), generator=generator), torch.randn(3000, 37, generator=generator)
    path = save_rows(tmp_path / "x.npy", x)

    def load(number):
        store = FeatureStore(device=real_device)
        store[None, "x", None] = Feature(device=real_device).from_file(path)
        graph = store, Data(edge_index=edges, num_nodes=3000)
        return NeighborLoader(graph, [5, 3], torch.arange(0, 3000, 4), batch_size=32, shuffle=True, seed=3,
                              device=real_device, ahead=number)  # fmt: skip

    expected = [batch.x.cpu() for batch in load(0)]
    monkeypatch.setenv("PYG_DIRECT_GPU_DIRECT", "1")
    loader = load(ahead)
    got = [batch.x.cpu() for batch in loader]

    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    ((_, window),) = loader._row_windows
    assert isinstance(window._reader, GpuDirectReader) == (torch.device(real_device).type == "cuda")
