"""Rows of a file that reach memory of a device through pieces of page-locked memory."""

import numpy as np
import pytest
import torch

from pyg_direct import save_rows
from pyg_direct.errors import ArgumentError, FileError
from pyg_direct.features import device_reader, range_reader
from pyg_direct.features.device_reader import StagedReader, find_device_room
from pyg_direct.features.row_files import RowFile
from pyg_direct.runtime.cuda.device import resolve_device
from tests.features.contract import change_file


@pytest.fixture
def device(real_device):
    """CPU and GPU: rows are copied to the GPU without a kernel of ours."""
    return resolve_device(real_device)


@pytest.fixture
def reader_of(tmp_path, device, monkeypatch):
    # Rows that were just written are cached; direct reads are made of others.
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)

    def make(rows):
        return StagedReader(RowFile(save_rows(tmp_path / "rows.npy", rows)), device, keeps_all=True)

    return make


def make_rows(count, width):
    return torch.randint(256, (count, width), dtype=torch.uint8)


@pytest.mark.parametrize(("count", "width"), [(1, 3), (700, 1), (5000, 37), (9000, 512), (40, 9000), (2, 3 << 20)])
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("is_in_order", [True, False])
def test_rows_come_to_their_slots(reader_of, device, count, width, share, is_in_order):
    rows = make_rows(count, width)
    reader, out = reader_of(rows), torch.zeros(count, width, dtype=torch.uint8, device=device)
    ids = np.flatnonzero(np.random.default_rng(1).random(count) < share)
    slots = np.arange(len(ids)) if is_in_order else np.random.default_rng(0).permutation(count)[: len(ids)]

    assert reader.read(ids, slots, out)

    expected = torch.zeros(count, width, dtype=torch.uint8)
    expected[torch.from_numpy(slots)] = rows[torch.from_numpy(ids)]
    assert torch.equal(out.cpu(), expected)


def test_memory_on_the_way_does_not_grow_with_the_rows(reader_of, device, monkeypatch):
    asked, allocate = [], device_reader.allocate_or_fall_back
    monkeypatch.setattr(device_reader, "allocate_or_fall_back",
                        lambda size, *args: (asked.append(size), allocate(size, *args))[1])  # fmt: skip
    rows = make_rows(160_000, 512)
    reader, out = reader_of(rows), torch.zeros(160_000, 512, dtype=torch.uint8, device=device)

    for _ in range(2):
        assert reader.read(np.arange(160_000), np.arange(160_000), out)

    assert torch.equal(out.cpu(), rows)
    assert len(asked) <= range_reader.MOST_IN_FLIGHT + range_reader.FEW_IN_FLIGHT
    assert sum(asked) <= StagedReader.count_staging(512)


def test_a_read_that_is_left_returns_without_its_rows(reader_of, device):
    rows = make_rows(9000, 512)
    reader, out = reader_of(rows), torch.zeros(9000, 512, dtype=torch.uint8, device=device)
    reader.leave()

    assert not reader.read(np.arange(9000), np.arange(9000), out)

    reader.leave(False)
    assert reader.read(np.arange(9000), np.arange(9000), out)
    assert torch.equal(out.cpu(), rows)


@pytest.mark.parametrize("change", ["cut short", "replaced", "touched", "taken away"])
def test_a_file_that_changed_is_named(reader_of, device, change):
    rows = make_rows(9000, 512)
    reader = reader_of(rows)
    change_file(reader.file.path, change, rows)

    with pytest.raises(FileError, match=r"rows\.npy"):
        reader.read(np.arange(9000), np.arange(9000), torch.empty(9000, 512, dtype=torch.uint8, device=device))


def test_a_failed_read_gives_back_its_memory(reader_of, device, monkeypatch):
    rows = make_rows(9000, 512)
    reader, out = reader_of(rows), torch.zeros(9000, 512, dtype=torch.uint8, device=device)

    def fail(*args):
        raise FileError("rows.npy could not be read at byte 4096: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(range_reader, "read_file_ranges_cpu", fail)
        with pytest.raises(FileError, match="Input/output error"):
            reader.read(np.arange(9000), np.arange(9000), out)

    assert reader.read(np.arange(9000), np.arange(9000), out)
    assert torch.equal(out.cpu(), rows)


def test_a_failed_allocation_costs_no_piece(reader_of, device, monkeypatch):
    rows = make_rows(9000, 512)
    reader, out = reader_of(rows), torch.zeros(9000, 512, dtype=torch.uint8, device=device)
    left = [(pieces, pieces._num_left) for pieces in (reader._small, reader._large)]

    def refuse(*args):
        raise MemoryError("no memory can be locked")

    with monkeypatch.context() as patch:
        patch.setattr(device_reader, "allocate_or_fall_back", refuse)
        # As often as there are pieces, and once more for each size.
        for ids in (np.arange(9000), np.arange(0, 9000, 4000)):
            for _ in range(range_reader.MOST_IN_FLIGHT + 1):
                with pytest.raises(MemoryError, match="no memory can be locked"):
                    reader.read(ids, ids, out)

    assert [(pieces, pieces._num_left) for pieces in (reader._small, reader._large)] == left
    assert reader.read(np.arange(9000), np.arange(9000), out)
    assert torch.equal(out.cpu(), rows)


def test_memory_of_a_gpu_is_a_share_of_what_is_free_or_what_the_user_names(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(device_reader, "free_bytes", lambda index: 80 << 30)
    monkeypatch.delenv("PYG_DIRECT_AHEAD_GPU", raising=False)

    # A quarter of what a model leaves.
    assert find_device_room(gpu) == 15 << 30
    assert find_device_room(gpu, "50%") == 30 << 30
    assert find_device_room(torch.device("cpu")) == 0
    for given, expected in (("0", 0), ("1000000", 1_000_000), ("2G", 2 << 30), ("10%", 8 << 30), ("900G", 80 << 30)):
        monkeypatch.setenv("PYG_DIRECT_AHEAD_GPU", given)
        assert find_device_room(gpu) == expected
    monkeypatch.setenv("PYG_DIRECT_AHEAD_GPU", "much")
    with pytest.raises(ArgumentError, match=r"PYG_DIRECT_AHEAD_GPU must look like .* got 'much'"):
        find_device_room(gpu)
