"""Tables in files are read as they were written; other files are refused by name."""

import errno
import json
import os
import pickle
import struct
import sys

import numpy as np
import pytest
import torch

from pyg_direct import save_rows
from pyg_direct.errors import ArgumentError, ArgumentTypeError, FileError
from pyg_direct.features import row_files
from pyg_direct.features.row_files import RowFile
from pyg_direct.runtime.host.host_memory import total_bytes
from tests.features.contract import DTYPES, bytes_of, make_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", [(), (3,), (2, 5), (0,)], ids=str)
def test_safetensors_hold_any_dtype(tmp_path, dtype, row):
    rows = make_rows(row=row, dtype=dtype)

    got = RowFile(save_rows(tmp_path / "rows.safetensors", rows)).rows

    assert (got.shape, got.dtype) == (rows.shape, dtype)
    assert torch.equal(bytes_of(got), bytes_of(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool, torch.complex64, torch.float16], ids=str)
def test_numpy_reads_and_writes_the_same_files(tmp_path, dtype):
    rows = make_rows(row=(3, 2), dtype=dtype)
    np.save(tmp_path / "theirs.npy", rows.numpy())

    ours = np.load(save_rows(tmp_path / "ours.npy", rows), allow_pickle=False)

    assert torch.equal(bytes_of(RowFile(tmp_path / "theirs.npy").rows), bytes_of(rows))
    assert torch.equal(bytes_of(torch.from_numpy(ours)), bytes_of(rows))


def test_one_item_of_a_wider_table_is_written(tmp_path):
    path = save_rows(tmp_path / "rows.npy", torch.tensor([[7, 0, 0]])[:, 0])

    assert np.load(path).tolist() == [7]


def test_a_write_to_rows_does_not_reach_the_file(tmp_path):
    path = save_rows(tmp_path / "rows.npy", make_rows())
    before = path.read_bytes()
    file = RowFile(path)

    file.rows.zero_()

    assert path.read_bytes() == before
    assert not file.rows.any()


def test_a_file_may_be_larger_than_memory(tmp_path):
    path, most = tmp_path / "rows.bin", 4 * total_bytes()
    with path.open("wb") as file:
        # With holes, which take no room on the disk.
        file.truncate(most)
        file.seek(most - 4)
        file.write(struct.pack("<f", 7))

    rows = RowFile(path, dtype=torch.float32, shape=(-1, 256)).rows

    assert rows[[-1, 1]][:, -1].tolist() == [7, 0]


def test_bare_bytes_are_read_as_told(tmp_path):
    rows = make_rows(dtype=torch.int32)
    (tmp_path / "rows.bin").write_bytes(b"12345678" + rows.numpy().tobytes())

    got = RowFile(tmp_path / "rows.bin", dtype=torch.int32, shape=(-1, 5), offset=8)

    assert torch.equal(got.rows, rows)


def test_rows_may_come_from_a_memory_map_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "_PIECE_BYTES", 64)
    rows = make_rows(1000)
    np.save(tmp_path / "in.npy", rows.numpy())

    path = save_rows(tmp_path / "out.npy", np.load(tmp_path / "in.npy", mmap_mode="r"))

    assert torch.equal(bytes_of(RowFile(path).rows), bytes_of(rows))


def write_safetensors(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def test_one_of_several_tensors_is_named(tmp_path):
    header = {"__metadata__": {"by": "hand"}, "a": GOOD, "b": {"dtype": "I32", "shape": [1], "data_offsets": [24, 28]}}
    write_safetensors(tmp_path / "two.safetensors", header, bytes(24) + b"\x07\0\0\0")

    got = RowFile(tmp_path / "two.safetensors", name="b").rows

    assert got.tolist() == [7]
    with pytest.raises(ArgumentError, match=r"name must be one of a, b in .*, got None"):
        RowFile(tmp_path / "two.safetensors")


@pytest.mark.parametrize(("header", "data", "words"), [
    (b"{", b"", "must have a header of safetensors"),
    ({"a": {**GOOD, "dtype": "F7"}}, bytes(24), "must have a header of safetensors"),
    ({"a": {**GOOD, "shape": [2, 4]}}, bytes(24), "must give 32 bytes to .* it gives bytes 0 to 24"),
    ({"a": {**GOOD, "shape": [-2, -3]}}, bytes(24), "must give 24 bytes"),
    ({"a": GOOD}, bytes(23), "must have .* bytes .* it was cut short"),
    ({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4), "at least one dimension"),
])  # fmt: skip
def test_damaged_safetensors_are_refused(tmp_path, header, data, words):
    write_safetensors(tmp_path / "bad.safetensors", header, data)

    with pytest.raises(FileError, match=words):
        RowFile(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("data", [b"", b"1234567", struct.pack("<Q", 2**60), struct.pack("<Q", 3)])
def test_a_header_longer_than_the_file_is_refused(tmp_path, data):
    (tmp_path / "bad.safetensors").write_bytes(data)

    with pytest.raises(FileError, match="must begin with the length of its header"):
        RowFile(tmp_path / "bad.safetensors")


def test_a_file_shorter_than_it_says_is_refused(tmp_path):
    path = save_rows(tmp_path / "rows.npy", make_rows())
    os.truncate(path, path.stat().st_size - 1)

    with pytest.raises(FileError, match=r"must have 4896 bytes for \[40, 5\] of torch.float32, it has 4895"):
        RowFile(path)


@pytest.mark.parametrize("array", [np.array([[1, "a"]], dtype=object), np.asfortranarray(np.ones((3, 4))),
                                   np.ones((3, 4), dtype=">f4"), np.array(["a"])])  # fmt: skip
def test_arrays_that_are_no_rows_of_numbers_are_refused(tmp_path, array):
    np.save(tmp_path / "bad.npy", array, allow_pickle=True)

    with pytest.raises(FileError, match="must hold"):
        RowFile(tmp_path / "bad.npy")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("name", ["rows.pt", "rows.pkl", "rows.npz", "rows.npy", "rows.safetensors"])
def test_no_pickle_is_loaded(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))

    with pytest.raises(FileError):
        RowFile(tmp_path / name)

    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(("options", "words"), [
    ({}, "dtype and shape must be given for bare bytes"),
    ({"dtype": torch.int32, "shape": (3, -1)}, "must not be negative"),
    ({"dtype": torch.int32, "shape": (3,), "offset": -1}, "must not be negative"),
])  # fmt: skip
def test_bare_bytes_need_a_meaning(tmp_path, options, words):
    (tmp_path / "rows.bin").write_bytes(bytes(12))

    with pytest.raises(ArgumentError, match=words):
        RowFile(tmp_path / "rows.bin", **options)


def test_bare_bytes_that_are_no_whole_rows_are_refused(tmp_path):
    (tmp_path / "rows.bin").write_bytes(bytes(13))

    with pytest.raises(FileError, match="whole rows of 4 bytes from byte 0 on, it has 13 bytes"):
        RowFile(tmp_path / "rows.bin", dtype=torch.int32, shape=(-1,))


def test_another_dtype_or_shape_than_expected_is_refused(tmp_path):
    path = save_rows(tmp_path / "rows.npy", make_rows())

    with pytest.raises(ArgumentError, match=r"dtype must be that of .*, torch.float32, got torch.int8"):
        RowFile(path, dtype=torch.int8)
    with pytest.raises(ArgumentError, match=r"shape must be that of .*, \(40, 5\), got \(40, 6\)"):
        RowFile(path, shape=(40, 6))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileError, match=r"path must name a file that can be read, got .*none.npy"):
        RowFile(tmp_path / "none.npy")


@pytest.mark.parametrize(("name", "rows", "error", "words"), [
    ("rows.pt", make_rows(), ArgumentError, r"path must end in .safetensors or .npy"),
    ("rows.npy", make_rows(dtype=torch.bfloat16), ArgumentError, "dtype of NumPy for .npy, got torch.bfloat16"),
    ("rows.npy", torch.tensor(1.0), ArgumentError, "at least one dimension"),
    ("rows.npy", torch.eye(3).to_sparse(), ArgumentTypeError, "dense tensor with values, got .* torch.sparse_coo"),
    ("rows.safetensors", torch.eye(3, device="meta"), ArgumentTypeError, "dense tensor with values, got .* memory"),
    ("rows.npy", [1.0], ArgumentTypeError, "rows must be a tensor or an array, got list"),
    ("rows.safetensors", torch.empty(2, dtype=torch.complex128), ArgumentError, "a dtype of safetensors"),
    ("none/rows.npy", make_rows(), FileError, "could not be written|No such file"),
])  # fmt: skip
def test_what_cannot_be_saved_is_named(tmp_path, name, rows, error, words):
    with pytest.raises(error, match=words):
        save_rows(tmp_path / name, rows)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    path = save_rows(tmp_path / "rows.npy", make_rows(3))
    before = path.read_bytes()
    monkeypatch.setattr(row_files.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100}))

    with pytest.raises(FileError, match=r"must lie where 4896 bytes are free, .* has 100"):
        save_rows(path, make_rows())

    assert path.read_bytes() == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_interrupted_conversion_leaves_the_old_file(tmp_path, monkeypatch, error, when):
    path = save_rows(tmp_path / "rows.npy", make_rows(3))
    before, calls, write = path.read_bytes(), [], row_files._write_all

    def fail(file, data):
        if len(calls) == when:
            write(file, data[: len(data) // 2])
            raise error
        calls.append(data)
        write(file, data)

    monkeypatch.setattr(row_files, "_PIECE_BYTES", 400)
    monkeypatch.setattr(row_files, "_write_all", fail)

    with pytest.raises(FileError if isinstance(error, OSError) else KeyboardInterrupt):
        save_rows(path, make_rows())

    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.npy"]


def test_rows_that_were_just_read_are_cached_and_those_of_a_hole_are_not(tmp_path):
    file = RowFile(save_rows(tmp_path / "rows.npy", make_rows(5000)))
    (tmp_path / "hole.bin").touch()
    os.truncate(tmp_path / "hole.bin", 1 << 30)

    file.rows[[0, 4999]].sum()

    # Other systems do not report it.
    assert file.is_cached([0, 4999]) == (sys.platform == "linux")
    assert not RowFile(tmp_path / "hole.bin", dtype=torch.float32, shape=(-1, 256)).is_cached([0, 7000])


class TestFilesOfOthers:
    """For a file of another user Linux would report every page as cached: reads without a wait show the truth."""

    @pytest.fixture
    def file(self, tmp_path, monkeypatch):
        path = save_rows(tmp_path / "rows.npy", make_rows(5000))
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        monkeypatch.setattr(os, "access", lambda *args: False)
        return RowFile(path)

    @pytest.mark.parametrize("error", [BlockingIOError(errno.EAGAIN, ""), OSError(errno.EOPNOTSUPP, "")], ids=str)
    def test_what_must_be_waited_for_is_not_cached(self, file, monkeypatch, error):
        def refuse(*args):
            raise error

        monkeypatch.setattr(os, "preadv", refuse)

        assert not file.is_cached([0])

    @pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
    def test_what_is_there_is_cached(self, file, monkeypatch):
        asked = []
        monkeypatch.setattr(os, "preadv", lambda handle, targets, *how: asked.append(how) or len(targets[0]))

        assert file.is_cached([0, 4999])
        begin = file.layout.offset
        assert asked == [(begin, os.RWF_NOWAIT), (begin + 4999 * 20, os.RWF_NOWAIT)]


def test_a_file_is_closed_with_the_last_who_reads_it(tmp_path):
    file = RowFile(save_rows(tmp_path / "rows.npy", make_rows()))
    read, handle = file.read_rows, file._handle
    del file
    os.fstat(handle)

    del read

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_rows_without_bytes_are_not_looked_for(tmp_path):
    assert not RowFile(save_rows(tmp_path / "rows.npy", make_rows(row=(0,)))).is_cached([0])


def test_options_that_a_file_does_not_have_are_refused(tmp_path):
    path = save_rows(tmp_path / "rows.npy", torch.zeros(10, 4))

    with pytest.raises(ArgumentError, match=r"name must be None unless the file is a .safetensors, got 'x'"):
        RowFile(path, name="x")
    with pytest.raises(ArgumentError, match=r"offset must be 0 for .*rows.npy, whose head says"):
        RowFile(path, offset=64)
