"""Rows of a file that a device holds whole, read while something else is done."""

import threading

import pytest
import torch

from pyg_direct import Feature, save_rows
from pyg_direct.errors import FileError
from pyg_direct.features import range_reader
from pyg_direct.features.row_files import RowFile
from pyg_direct.loader import whole_table
from pyg_direct.loader.whole_table import WholeTable, fits_device
from pyg_direct.runtime.cuda.device import resolve_device

X = torch.randn(3000, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def device(real_device, monkeypatch):
    """CPU and GPU, which have room for 1 MB."""
    monkeypatch.setattr(whole_table, "find_device_room", lambda *args: 1 << 20)
    return resolve_device(real_device)


@pytest.fixture
def path(tmp_path, monkeypatch):
    # Files that were just written are cached.
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    return save_rows(tmp_path / "x.npy", X)


def open_table(x, device):
    table = WholeTable.open(x, device)
    assert table is not None
    return table


@pytest.mark.parametrize("at_once", [96, 5000, 1 << 30])
def test_rows_come_in_the_order_of_ids(path, device, monkeypatch, at_once):
    monkeypatch.setattr(whole_table, "_AT_ONCE", at_once)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1))

    for x, expected in ((Feature(device=device).from_file(path), X),
                        (Feature(device=device).from_file(path, order=order), X[order.argsort()])):  # fmt: skip
        table = open_table(x, device)
        rows = table.wait()
        table.close()

        assert rows.device == device
        assert torch.equal(rows.cpu(), expected)


def test_rows_elsewhere_and_rows_without_room_are_left_alone(path, tmp_path, device):
    big = save_rows(tmp_path / "big.npy", torch.zeros(9000, 32))

    for x in (X, Feature(device=device).from_cpu_tensor(X.clone()), Feature(device=device).from_file(big),
              Feature(device=device, host_cache_size="20%").from_file(path)):  # fmt: skip
        assert WholeTable.open(x, device) is None
    assert [fits_device(size, device) for size in (0, 1, 1 << 20, (1 << 20) + 1)] == [False, True, True, False]


def test_memory_that_lies_in_pieces_is_no_room(path, device, monkeypatch):
    def refuse(*args):
        raise torch.OutOfMemoryError("no piece is large enough")

    monkeypatch.setattr(whole_table.WholeTable, "__init__", refuse)

    assert WholeTable.open(Feature(device=device).from_file(path), device) is None


def test_a_table_is_usable_after_inference_mode(path, device):
    with torch.inference_mode():
        table = open_table(Feature(device=device).from_file(path), device)
        rows = table.wait()
    table.close()

    assert not rows.is_inference()
    assert torch.equal(rows.cpu(), X)


def test_an_error_of_the_read_is_raised_by_the_wait(path, device):
    x = Feature(device=device).from_file(path)
    path.unlink()
    table = open_table(x, device)

    with pytest.raises(FileError, match=r"x\.npy was taken away"):
        table.wait()
    table.close()


def test_a_disk_that_hangs_is_named_by_the_wait(path, device, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", lambda *args: go_on.wait() and 0)
    monkeypatch.setattr(range_reader, "_LEAVE", 0.1)
    monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", "0.3")
    table = open_table(Feature(device=device).from_file(path), device)

    try:
        with pytest.raises(FileError, match=r"x\.npy gave no bytes for 0\.3 seconds, at byte 0"):
            table.wait()
    finally:
        go_on.set()
        table.close()
