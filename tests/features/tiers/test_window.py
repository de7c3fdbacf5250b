"""Rows of planned batches in memory, over the tier of a file."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyg_direct import save_rows
from pyg_direct.errors import FileError, IdError
from pyg_direct.features import range_reader
from pyg_direct.features.disk_rates import DiskRates
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.spilled_rows import find_window, serving
from pyg_direct.features.staged_reader import StagedReader
from pyg_direct.features.tiers import host_window, window as window_module
from pyg_direct.features.tiers.choice import open_file
from pyg_direct.features.tiers.window import RowWindow, can_plan
from pyg_direct.runtime.cuda.device import resolve_device
from tests.features.contract import DTYPES, bytes_of, make_rows

ROW_BYTES = 20


@pytest.fixture(params=["host", "device"])
def window_of(tmp_path, device, request):
    """Windows in memory of the host, and in memory of the device, which rows reach through pieces."""

    def make(rows, most=None):
        tier = open_file(RowFile(save_rows(tmp_path / "rows.safetensors", rows)), resolve_device(device))
        num_bytes = rows.numel() * rows.element_size() if most is None else most * ROW_BYTES
        return RowWindow(tier, num_bytes) if request.param == "host" else RowWindow(tier, 0, device_bytes=num_bytes)

    return make


@pytest.mark.parametrize(("num_bytes", "rows"), [(20_000, 1000), (19_999, 199), (12_000, 66), (100, 1), (0, 1)])
def test_memory_for_rows_is_what_their_tables_leave(tmp_path, num_bytes, rows):
    file = RowFile(save_rows(tmp_path / "rows.npy", torch.zeros(1000, ROW_BYTES, dtype=torch.uint8)))
    tier = open_file(file, torch.device("cpu"))

    window = RowWindow(tier, RowWindow.fit_rows(tier, num_bytes))

    assert len(window._rows) == rows
    assert rows in (1, 1000) or window.num_bytes <= num_bytes


def claim(window, number, ids, batch=None):
    found = window.find_fresh(number, np.asarray(ids))
    fits = window.has_room(number, found)
    window.claim(number, number if batch is None else batch, found)
    return fits


def plan(window, number, ids, released=-1):
    """A window of one batch of the same number; True if all of its rows are in memory."""
    fits = claim(window, number, ids)
    return window.read_ahead(number, released) and fits


def take(window, number, ids):
    ids = torch.as_tensor(ids).to(window.device)
    with serving({id(window.source): window}, number):
        rows = find_window(window.source).take(ids)
        window.synchronize()
    return rows


def forbid_reads(window, monkeypatch):
    def refuse(*args):
        raise AssertionError("rows were read from the file")

    monkeypatch.setattr(type(window.source), "_read", refuse)
    monkeypatch.setattr(type(window.source), "place", refuse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planned_rows_of_any_dtype_come_bit_for_bit(window_of, dtype, monkeypatch):
    rows, ids = make_rows(dtype=dtype), [5, 0, 39, 5, 17, 38, 1, 0]
    window = window_of(rows)
    plan(window, 0, ids)
    forbid_reads(window, monkeypatch)

    assert torch.equal(bytes_of(take(window, 0, ids)), bytes_of(rows)[ids])


def test_memory_of_a_gpu_is_free_of_kernels_before_rows_are_written(tmp_path, monkeypatch):
    """Without a GPU: the order of the calls."""
    calls, gpu = [], torch.device("cuda", 0)
    tier = open_file(RowFile(save_rows(tmp_path / "rows.npy", make_rows())), torch.device("cpu"))
    monkeypatch.setattr(tier, "device", gpu)
    empty, stream = torch.empty, SimpleNamespace(synchronize=lambda: calls.append("synchronize"))

    def allocate(*args, device, **options):
        calls.append(device)
        return empty(*args, **options, device="cpu")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (calls.append("stream of"), stream)[1])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", allocate)
        RowWindow(tier, 0, device_bytes=4000)

    assert calls[calls.index(gpu) :] == [gpu, "stream of", "synchronize"]


@pytest.mark.gpu
def test_kernels_of_the_stream_of_the_caller_end_before_rows_are_written(tmp_path):
    """The allocator gives memory to the stream that freed it, whose kernels may still read it."""
    rows = torch.ones(1 << 18, 32)
    tier = open_file(RowFile(save_rows(tmp_path / "rows.npy", rows)), resolve_device("cuda"))
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):
        seen, old = (torch.zeros(1 << 18, 32, device="cuda") for _ in range(2))
        address = old.data_ptr()
        torch.cuda._sleep(1 << 30)
        seen.copy_(old)
        del old
        window = RowWindow(tier, 0, device_bytes=rows.nbytes)

    # On another stream, as the thread of a loader does.
    plan(window, 0, np.arange(1 << 18))
    torch.cuda.synchronize()

    assert window._rows.data_ptr() == address
    assert not seen.any()
    assert torch.equal(window._rows.cpu(), rows)


def test_rows_of_a_window_that_processes_share_come_bit_for_bit(tmp_path, device, monkeypatch):
    monkeypatch.setattr(host_window.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(range_reader, "available_bytes", lambda: 0)
    rows, ids = make_rows(), [5, 0, 39, 5]
    path = save_rows(tmp_path / "rows.npy", rows)
    windows = [RowWindow(open_file(RowFile(path), resolve_device(device)), 400, is_shared=True) for _ in range(2)]
    for window in windows:
        plan(window, 0, ids)
        forbid_reads(window, monkeypatch)

        assert torch.equal(bytes_of(take(window, 0, ids)), bytes_of(rows)[ids])
    assert [window.tell(measures_disk=False).num_copied for window in windows] == [0, 3]


@pytest.mark.parametrize("row", [(), (7,), (2, 3, 5)], ids=str)
def test_planned_rows_of_any_shape_come_bit_for_bit(window_of, row):
    rows, ids = make_rows(row=row), [5, 0, 39, 5]
    window = window_of(rows)
    plan(window, 0, ids)

    assert torch.equal(bytes_of(take(window, 0, ids)), bytes_of(rows)[ids])


def test_rows_that_were_not_planned_come_from_the_file(window_of):
    rows = make_rows(400)
    window = window_of(rows, most=20)
    plan(window, 0, [7, 3, 300])

    assert torch.equal(bytes_of(take(window, 0, [300, 150, 7, 399])), bytes_of(rows)[[300, 150, 7, 399]])
    assert window.tell(measures_disk=False).num_rows == 3 + 2


def test_places_are_written_in_any_order(window_of):
    rows, ids, positions = make_rows(), torch.tensor([7, 3, 39, 0]), torch.tensor([5, 1, 0, 8])
    window = window_of(rows)
    plan(window, 0, [7, 39, 0])
    out = torch.zeros(9, 5, device=window.device)

    with serving({id(window.source): window}, 0):
        window.place(ids.to(window.device), out, positions.to(window.device))

    expected = torch.zeros(9, 5)
    expected[positions] = rows[ids]
    assert torch.equal(bytes_of(out), bytes_of(expected))


def test_rows_of_windows_that_are_not_released_stay(window_of, monkeypatch):
    rows, generator = make_rows(5000), np.random.default_rng(0)
    window, ids = window_of(rows, most=400), [generator.choice(5000, 200, replace=False) for _ in range(9)]

    plan(window, 0, ids[0])
    for number in range(1, 9):
        assert plan(window, number, ids[number], released=number - 2)
        with monkeypatch.context() as patch:
            forbid_reads(window, patch)
            for known in (number - 1, number):
                assert torch.equal(bytes_of(take(window, known, ids[known])), bytes_of(rows)[ids[known]])


def test_rows_that_the_next_window_reads_again_are_kept(window_of):
    window = window_of(make_rows(5000), most=400)
    first, second = np.arange(0, 4000, 20), np.arange(2000, 5000, 15)
    plan(window, 0, first)
    plan(window, 1, second)

    assert window.tell(measures_disk=False).num_rows == len(np.union1d(first, second))


def test_rows_in_pages_that_are_read_stay_where_memory_has_room(window_of):
    rows = make_rows(5000)
    window = window_of(rows)
    # A page has 204 rows.
    plan(window, 0, np.arange(0, 5000, 100))
    pages = window.tell(measures_disk=False).num_pages
    plan(window, 1, np.arange(5000))

    # Rows over the ends of requests were not whole.
    assert window.tell(measures_disk=False).num_pages <= pages + 2
    assert torch.equal(bytes_of(take(window, 1, np.arange(5000))), bytes_of(rows))


def test_a_full_window_has_no_room_and_holds_the_bytes_it_may(window_of):
    window = window_of(make_rows(5000), most=400)

    # One part of 16 is left to the window before.
    assert claim(window, 0, np.arange(300), batch=0)
    assert claim(window, 0, np.arange(200, 375), batch=1)
    assert not window.has_room(0, window.find_fresh(0, np.arange(374, 376)))
    assert window.has_room(1, window.find_fresh(1, np.arange(374, 376)))
    # The first batch of a window gets what fits.
    assert not claim(window, 1, np.arange(1000), batch=2)
    assert window.read_ahead(1, 1)
    assert window.num_bytes <= 400 * ROW_BYTES + 5000 * 8 + 400 * 8


def test_rows_take_the_places_of_rows_of_batches_that_are_released(window_of, monkeypatch):
    rows = make_rows(5000)
    window = window_of(rows, most=320)
    for batch in range(3):
        claim(window, 0, np.arange(100 * batch, 100 * batch + 100), batch)
    assert window.read_ahead(0, -1)
    # Rows 50 to 99 stay for it, and 200 are new: 20 places are empty.
    claim(window, 1, np.arange(50, 100), 3)
    claim(window, 1, np.arange(1000, 1200), 4)

    assert not window.read_ahead(1, -1)
    # Batch 0 gives up 50 rows, batch 1 has 100, and batch 2 too.
    assert not window.read_ahead(1, 0)
    assert not window.read_ahead(1, 1)
    with monkeypatch.context() as patch:
        forbid_reads(window, patch)
        assert torch.equal(bytes_of(take(window, 2, np.arange(200, 300))), bytes_of(rows)[200:300])
        assert torch.equal(bytes_of(take(window, 3, np.arange(50, 100))), bytes_of(rows)[50:100])
    assert window.read_ahead(1, 2)
    with monkeypatch.context() as patch:
        forbid_reads(window, patch)
        assert torch.equal(bytes_of(take(window, 4, np.arange(1000, 1200))), bytes_of(rows)[1000:1200])
        assert torch.equal(bytes_of(take(window, 3, np.arange(50, 100))), bytes_of(rows)[50:100])
    assert window.tell(measures_disk=False).num_rows == 500


def test_rows_stay_in_order_after_more_batches_than_16_bits_count(window_of, monkeypatch):
    rows = make_rows(5000)
    window = window_of(rows, most=160)
    for number in range(3):
        # Nearly a window's batches apart: the first ones are too old to be told from each other.
        base = 60_000 * number
        claim(window, number, np.arange(50) + 1000 * number, base)
        claim(window, number, np.arange(50, 100) + 1000 * number, base + 59_999)
        assert window.read_ahead(number, base - 1)
        with monkeypatch.context() as patch:
            forbid_reads(window, patch)
            expected = bytes_of(rows)[1000 * number + 50 : 1000 * number + 100]
            assert torch.equal(bytes_of(take(window, base + 59_999, np.arange(50, 100) + 1000 * number)), expected)
    # 60 places had no rows before, and the last batches stay longest.
    assert (window._slots[2000:2100] >= 0).all()
    assert (window._slots[1050:1100] >= 0).sum() >= (window._slots[:100] >= 0).sum()


def test_few_places_wait_for_more(window_of):
    window = window_of(make_rows(5000), most=320)
    claim(window, 0, np.arange(10), 0)
    claim(window, 0, np.arange(10, 300), 1)
    assert window.read_ahead(0, -1)
    claim(window, 1, np.arange(1000, 1300), 2)
    # 20 places are empty, a part.
    assert not window.read_ahead(1, -1)
    requests = window.tell(measures_disk=False).num_requests

    assert not window.read_ahead(1, 0)
    assert window.tell(measures_disk=False).num_requests == requests
    assert window.read_ahead(1, 1)


def test_ids_out_of_range_are_refused_when_rows_are_taken(window_of):
    window = window_of(make_rows())
    plan(window, 0, [-1, 3, 40])

    with pytest.raises(IdError, match=r"must lie in \[0, 40\)"):
        take(window, 0, [3, 40])


@pytest.mark.parametrize("change", ["touched", "cut short", "taken away"])
def test_rows_of_a_file_that_changed_since_they_were_read_are_refused(window_of, change):
    window = window_of(make_rows())
    plan(window, 0, [1, 2])
    path = window.file.path
    if change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "cut short":
        os.truncate(path, 10)
    else:
        path.unlink()

    with pytest.raises(FileError, match="taken away" if change == "taken away" else "changed while it was read"):
        take(window, 0, [1, 2])


def test_only_threads_that_are_served_read_the_window(window_of):
    window = window_of(make_rows())

    assert find_window(window.source) is window.source
    assert can_plan(window.source)


def test_reads_are_reported_beside_the_disk(window_of):
    window = window_of(make_rows(400))
    plan(window, 0, np.arange(400))
    claim(window, 1, np.arange(50))

    found = window.tell()

    assert (found.num_asked, found.num_rows, found.num_saved, found.num_again) == (450, 400, 50, 0)
    assert found.disk_rate > 0
    assert found.to_dict()["num_pages"] == found.num_pages > 0
    # Window 0 holds 400 rows, and window 1 holds 50 of them.
    assert found.num_claimed == 450
    assert found.to_dict()["read_ratio"] == found.num_pages * found.page_bytes / (450 * ROW_BYTES)
    assert "400 rows read for 450 that batches asked for, 11% saved" in str(found)
    assert "beside the disk's" in str(found)
    assert "11% saved, 7 copied from other processes; " in str(found._replace(num_copied=7))


def test_windows_read_at_most_two_and_a_half_times_the_rows_that_they_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(range_reader, "find_rates", lambda file: DiskRates(1.9e9, 8.7e4))
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    count, numbers = 40_000, np.random.default_rng(0)
    file = RowFile(save_rows(tmp_path / "rows.npy", torch.zeros(count, 512, dtype=torch.uint8)))
    window = RowWindow(open_file(file, torch.device("cpu")), 10_000 * 512)
    # As past the page cache, by blocks of the disk.
    window._reader.unit = 512

    for number in range(8):
        # Half of the rows of a window are read by all of them; the first window is short, as in a loader.
        ids = np.append(np.arange(0, count, 10), numbers.choice(count, 4000))
        assert plan(window, number, ids if number else ids[::4], number - 1)

    found = window.tell(measures_disk=False)
    assert found.num_rows < 0.6 * found.num_claimed
    assert 1.5 < found.read_ratio <= 2.5


def test_the_rest_of_a_table_is_read_once_half_of_it_is_asked_for(window_of, monkeypatch):
    rows = make_rows(4000)
    window = window_of(rows)

    plan(window, 0, np.arange(0, 400))
    assert not window.is_whole
    plan(window, 1, np.arange(0, 4000, 2))
    assert window.is_whole

    # No claim is needed any more, and none is made.
    forbid_reads(window, monkeypatch)
    assert len(window.find_fresh(2, np.arange(4000)).fresh) == 0
    ids = [3999, 1, 1, 2000]
    assert torch.equal(bytes_of(take(window, 2, ids)), bytes_of(rows)[ids])
    assert window.tell(measures_disk=False).num_again <= 1


def test_the_rest_of_a_table_in_long_runs_is_read_after_the_rows_of_the_window(window_of, monkeypatch):
    monkeypatch.setattr(window_module, "_LONG_RUN", 500 * ROW_BYTES)
    rows = make_rows(4000)
    window = window_of(rows)

    plan(window, 0, np.arange(1000, 3500))
    assert not window.is_whole
    assert torch.equal(bytes_of(take(window, 0, np.arange(1000, 3500))), bytes_of(rows)[1000:3500])

    window.read_rest()
    assert window.is_whole
    window.read_rest()
    assert torch.equal(bytes_of(take(window, 0, np.arange(4000))), bytes_of(rows))
    assert window.tell(measures_disk=False).num_again <= 4


def test_few_rows_of_a_table_that_fits_leave_the_others_in_the_file(window_of):
    # Rows of a page each.
    rows = make_rows(3000, row=(1024,))
    window = window_of(rows)

    for number in range(3):
        plan(window, number, np.arange(number * 200, 3000, 600))

    assert not window.is_whole
    assert window.tell(measures_disk=False).num_pages < 1500


def test_a_whole_table_is_read_piece_by_piece(window_of, monkeypatch):
    monkeypatch.setattr(window_module, "_AT_ONCE", 100 * ROW_BYTES)
    rows = make_rows(1234)
    window = window_of(rows)

    plan(window, 0, np.arange(1000))

    assert window.is_whole
    assert torch.equal(bytes_of(take(window, 0, np.arange(1234))), bytes_of(rows))


def test_a_read_of_a_whole_table_that_is_left_goes_on_in_a_later_window(window_of):
    rows = make_rows(4000)
    window = window_of(rows)
    window.leave()
    plan(window, 0, np.arange(3000))
    assert not window.is_whole

    window.leave(False)
    plan(window, 1, np.arange(5))

    assert torch.equal(bytes_of(take(window, 1, np.arange(5))), bytes_of(rows)[:5])


def test_ids_out_of_range_of_a_whole_table_are_named(window_of):
    window = window_of(make_rows(400))
    plan(window, 0, np.arange(400))

    with pytest.raises(IdError):
        take(window, 0, [3, 400])


def test_memory_of_a_device_is_bounded_by_the_tables_that_its_rows_need_on_the_host(tmp_path):
    tier = open_file(RowFile(save_rows(tmp_path / "rows.npy", torch.zeros(1000, 4, 128))), torch.device("cpu"))
    staging = StagedReader.count_staging(2048)

    # Host memory without room for what rows pass through gives none.
    assert RowWindow.fit_device_rows(tier, staging, 1 << 30) == 0
    assert RowWindow.fit_device_rows(tier, staging + (1 << 20), 1 << 30) == 1000 * 2048
    assert RowWindow.fit_device_rows(tier, staging + 8 * 1000 + 500 + 16 * 1000, 1 << 30) == 1000 * 2048
    assert RowWindow.fit_device_rows(tier, staging + (1 << 20), 9 * 2048 + 1) == 9 * 2048
    assert RowWindow.fit_device_rows(tier, staging + 8 * 1000 + 500 + 40 * 100, 1 << 30) == 100 * 2048
