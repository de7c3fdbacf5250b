"""Rows of a file by large requests."""

import errno
import os
import threading

import numpy as np
import pytest
import torch

from pyg_direct import save_rows
from pyg_direct.errors import FileError
from pyg_direct.features import range_reader
from pyg_direct.features.disk_rates import DiskRates, find_block
from pyg_direct.features.range_reader import RangeReader, find_whole_rows, split_requests
from pyg_direct.features.row_files import RowFile
from tests.features.contract import change_file

PAGE = range_reader.PAGE


@pytest.fixture(params=["buffered", "direct"])
def reader_of(tmp_path, request, monkeypatch):
    # Rows that were just written are cached; direct reads are made of others.
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)

    def make(rows, name="rows.npy"):
        return RangeReader(RowFile(save_rows(tmp_path / name, rows)), keeps_all=request.param == "direct")

    return make


def make_rows(count, width):
    return torch.randint(256, (count, width), dtype=torch.uint8)


def read(reader, rows, ids):
    out = np.zeros((len(ids), rows.shape[1]), np.uint8)
    slots = np.random.default_rng(0).permutation(len(ids))
    assert reader.read(ids, slots, out)
    return out[slots]


@pytest.mark.parametrize(("count", "width"), [(1, 3), (700, 1), (5000, 37), (3000, 512), (40, 9000), (2, 3 << 20)])
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_rows_come_as_they_lie_in_the_file(reader_of, count, width, share):
    rows = make_rows(count, width)
    reader = reader_of(rows)
    ids = np.flatnonzero(np.random.default_rng(1).random(count) < share)

    assert np.array_equal(read(reader, rows, ids), rows.numpy()[ids])


def test_each_page_is_read_once(reader_of):
    rows = make_rows(20_000, 400)
    reader, ids = reader_of(rows), np.arange(0, 20_000, 7)

    read(reader, rows, ids)

    offset = reader.file.layout.offset
    touched = {page for row in ids for page in ((offset + row * 400) // PAGE, (offset + row * 400 + 399) // PAGE)}
    # Requests of limited length may share a page.
    assert len(touched) <= reader.num_pages <= len(touched) + reader.num_requests
    assert reader.num_again <= reader.num_requests
    read(reader, rows, ids)
    assert reader.num_again >= len(touched)


def test_requests_end_at_wide_gaps_and_at_a_length():
    rows = np.array([0, 3, 7, 8, 100, 101, 102])

    # Rows of a page each: gaps of up to 2 pages are read along.
    assert split_requests(rows, 0, PAGE).tolist() == [0, 2, 4, 7]
    assert np.diff(split_requests(np.arange(1000), 0, PAGE)).tolist() == [256, 256, 256, 232]
    assert split_requests(rows[:0], 0, PAGE).tolist() == [0]


def test_whole_rows_of_requests_cover_the_rows_once():
    layout = range_reader.Layout(128, torch.uint8, (3000, 300))
    rows = np.flatnonzero(np.random.default_rng(0).random(3000) < 0.01)

    first, end = find_whole_rows(rows, layout, 300)

    covered = np.concatenate([np.arange(*pair) for pair in zip(first, end, strict=True)])
    assert np.isin(rows, covered).all()
    assert len(np.unique(covered)) == len(covered)
    assert covered.min() >= 0
    assert covered.max() < 3000


@pytest.mark.parametrize("change", ["touched", "cut short", "replaced", "taken away"])
def test_a_file_that_changed_is_not_read(reader_of, change):
    rows = make_rows(100, 50)
    reader = reader_of(rows)
    change_file(reader.file.path, change, rows)

    with pytest.raises(FileError, match="taken away" if change == "taken away" else "changed while it was read"):
        read(reader, rows, np.arange(100))


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_file_that_changes_during_a_read_is_an_error(reader_of, monkeypatch, is_cut):
    rows = make_rows(100, 50)
    reader = reader_of(rows)
    real = range_reader.read_file_ranges_cpu

    def change(*args):
        if is_cut:
            os.truncate(reader.file.path, 1000)
        else:
            os.utime(reader.file.path, ns=(0, 0))
        return real(*args)

    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", change)
    with pytest.raises(FileError, match="changed while it was read"):
        read(reader, rows, np.arange(100))


def test_a_read_that_is_left_while_threads_read_is_not_whole(reader_of, monkeypatch):
    rows = make_rows(2000, 5000)
    reader, real, calls = reader_of(rows), range_reader.read_file_ranges_cpu, []

    def leave_in_the_second(*args):
        calls.append(args)
        if len(calls) < 2:
            return real(*args)
        reader.leave()
        return 0

    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", leave_in_the_second)
    monkeypatch.setattr(range_reader, "find_rates", lambda file: None)
    # Two requests for each of two tasks, one after the other.
    monkeypatch.setattr(range_reader, "MOST_IN_FLIGHT", 1)
    monkeypatch.setattr(range_reader, "FEW_IN_FLIGHT", 1)
    ids = np.arange(0, 2000, 500)

    assert not reader.read(ids, np.arange(len(ids)), np.zeros((len(ids), 5000), np.uint8))
    assert len(calls) == 2


def test_a_disk_that_fails_is_named_with_the_byte(reader_of, monkeypatch):
    rows = make_rows(100, 5000)
    reader = reader_of(rows)
    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", lambda *args: 0)

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    begin = (reader.file.layout.offset + 50 * 5000) // PAGE * PAGE
    with pytest.raises(FileError, match=f"rows.npy could not be read at byte {begin}: Input/output error"):
        read(reader, rows, np.arange(50, 100))


def test_requests_that_come_in_pieces_are_read_to_their_end(reader_of, monkeypatch):
    rows = make_rows(300, 100)
    reader, ids, preadv = reader_of(rows), np.arange(0, 300, 3), os.preadv
    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", lambda *args: 0)
    monkeypatch.setattr(os, "preadv", lambda handle, targets, *place: preadv(handle, [targets[0][:700]], *place))

    assert np.array_equal(read(reader, rows, ids), rows.numpy()[ids])


def test_a_disk_that_hangs_is_named_with_the_byte_after_a_timeout(reader_of, monkeypatch):
    rows, go_on = make_rows(100, 5000), threading.Event()
    reader = reader_of(rows)

    def hang(handle, offset, rows, slots, bounds, staging, out, seen, progress, unit):
        progress[0] = 123 * PAGE
        go_on.wait()
        return 0

    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", hang)
    monkeypatch.setattr(range_reader, "_LEAVE", 0.1)
    monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", "0.3")
    try:
        with pytest.raises(FileError, match=rf"rows.npy gave no bytes for 0.3 seconds, at byte {123 * PAGE}: check"):
            read(reader, rows, np.arange(100))
        assert reader.is_broken
    finally:
        go_on.set()


def test_a_read_can_be_left(reader_of, monkeypatch):
    rows = make_rows(5000, 5000)
    reader, real = reader_of(rows), range_reader.read_file_ranges_cpu
    monkeypatch.setattr(range_reader, "_MOST_OF_TASK", 1)

    def leave(*args):
        reader.leave()
        return real(*args)

    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", leave)
    # Rows far from each other: a request for each.
    ids = np.arange(0, 5000, 50)

    assert not reader.read(ids, np.arange(100), np.zeros((100, 5000), np.uint8))
    assert not reader.is_broken
    assert reader.num_requests < 100


def test_blocks_of_the_disk_are_read_instead_of_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    # Rates by which a request costs no more than its bytes.
    monkeypatch.setattr(range_reader, "find_rates", lambda file: DiskRates(1e9, 1e9))
    monkeypatch.setattr(range_reader, "find_block", lambda file: 512)
    rows = make_rows(4000, 512)
    file = RowFile(save_rows(tmp_path / "rows.npy", rows))
    monkeypatch.setattr(range_reader, "available_bytes", lambda: 1000)
    reader, ids = RangeReader(file), np.flatnonzero(np.random.default_rng(1).random(4000) < 0.1)
    # Where the file system has larger blocks, the same requests come through the page cache.
    reader._is_direct &= find_block(file) == 512

    assert np.array_equal(read(reader, rows, ids), rows.numpy()[ids])
    assert (reader.unit, reader.num_pages, reader.num_again) == (512, len(ids), 0)
    assert np.array_equal(read(reader, rows, ids[::2]), rows.numpy()[ids[::2]])
    assert reader.num_again == len(ids[::2])


@pytest.mark.parametrize(("keeps_all", "is_shared"), [(True, False), (False, True)])
def test_rows_that_share_pages_with_others_in_memory_are_read_by_pages(tmp_path, monkeypatch, keeps_all, is_shared):
    monkeypatch.setattr(range_reader, "find_block", lambda file: 512)
    monkeypatch.setattr(range_reader, "available_bytes", lambda: 1000)
    file = RowFile(save_rows(tmp_path / "rows.npy", make_rows(100, 512)))

    assert RangeReader(file, keeps_all=keeps_all, is_shared=is_shared).unit == PAGE


@pytest.mark.parametrize(("width", "share"), [(512, 0.3), (37, 0.02), (5000, 0.5), (512, 0.01)])
@pytest.mark.parametrize("rates", [DiskRates(1e9, 6e4), DiskRates(7e9, 1e6), DiskRates(1e8, 100)], ids=str)
def test_rows_are_equal_whatever_the_disk(reader_of, monkeypatch, width, share, rates):
    monkeypatch.setattr(range_reader, "find_rates", lambda file: rates)
    rows = make_rows(3000, width)
    ids = np.flatnonzero(np.random.default_rng(1).random(3000) < share)

    assert np.array_equal(read(reader_of(rows), rows, ids), rows.numpy()[ids])
