"""Order of the rows of a file by the windows that read them."""

import numpy as np
import pytest
import torch

from pyg_direct import save_rows
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.tiers import window as window_module
from pyg_direct.features.tiers.choice import open_file
from pyg_direct.features.tiers.read_order import ReadRecorder, order_by_windows
from pyg_direct.features.tiers.window import RowWindow


def order_slowly(reads, num_rows):
    """Rows in the order of the lists of windows that read them; the end of a list comes after all windows."""
    lists = [[number for number, rows in enumerate(reads) if row in rows] + [len(reads)] for row in range(num_rows)]
    return sorted(range(num_rows), key=lambda row: lists[row])


@pytest.mark.parametrize("seed", range(5))
def test_rows_lie_in_the_order_of_their_windows(seed):
    generator = np.random.default_rng(seed)
    reads = [np.flatnonzero(generator.random(200) < 0.2).astype(np.int32) for _ in range(7)]

    assert order_by_windows(reads, 200).tolist() == order_slowly(reads, 200)


def test_rows_that_no_window_reads_lie_at_the_end_by_position():
    assert order_by_windows([np.array([3]), np.array([1, 3])], 5).tolist() == [3, 1, 0, 2, 4]
    assert order_by_windows([], 3).tolist() == [0, 1, 2]


def test_each_window_finds_its_rows_in_few_places():
    generator = np.random.default_rng(0)
    reads = [np.flatnonzero(generator.random(100_000) < 0.1) for _ in range(6)]

    places = np.argsort(order_by_windows(reads, 100_000))

    for number, rows in enumerate(reads):
        own = np.sort(places[rows])
        # A place for each set of windows before it, and not one for each row.
        assert 1 + np.count_nonzero(np.diff(own) > 1) <= 2**number


def test_a_recorder_lists_what_a_window_reads(tmp_path):
    tier = open_file(RowFile(save_rows(tmp_path / "x.npy", torch.randn(5000, 5))), torch.device("cpu"))
    recorder, window, read = ReadRecorder(tier, 400 * 20), RowWindow(tier, 400 * 20), []
    generator = np.random.default_rng(0)

    for number in range(6):
        ids = generator.choice(1000, 200, replace=False)
        for own in (recorder, window):
            found = own.find_fresh(number, ids)
            assert own.has_room(number, found)
            own.claim(number, number, found)
            assert own.read_ahead(number, number - 1)
            assert own.read_ahead(number, number - 1)
        read.append(window.tell(measures_disk=False).num_rows)

    assert np.cumsum([len(rows) for rows in recorder.reads]).tolist() == read
    assert all(np.array_equal(rows, np.unique(rows)) for rows in recorder.reads)
    assert recorder.num_asked == window.num_asked
    assert not recorder.is_broken
    recorder.leave()


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("device_rows", [0, 300, 400, 900])
def test_a_recorder_has_the_memory_of_a_window(tmp_path, monkeypatch, is_direct, device_rows):
    monkeypatch.setattr(window_module, "wants_gpu_direct", lambda device: is_direct)
    monkeypatch.setattr(window_module, "GpuDirectReader", lambda file: None)
    tier = open_file(RowFile(save_rows(tmp_path / "x.npy", torch.randn(5000, 5))), torch.device("cpu"))

    recorder, window = (kind(tier, 400 * 20, device_bytes=device_rows * 20) for kind in (ReadRecorder, RowWindow))

    assert (recorder.most_rows, len(recorder._held)) == (window.most_rows, len(window._held))
    assert len(window._held) == (400 if is_direct else max(400, device_rows))


def test_rows_that_stay_in_memory_are_not_listed_again(tmp_path):
    tier = open_file(RowFile(save_rows(tmp_path / "x.npy", torch.randn(5000, 5))), torch.device("cpu"))
    recorder = ReadRecorder(tier, 400 * 20)

    for number, ids in enumerate([np.arange(200), np.arange(100, 300), np.arange(100, 150)]):
        recorder.claim(number, number, recorder.find_fresh(number, ids))
        recorder.read_ahead(number, number - 1)

    assert [rows.tolist() for rows in recorder.reads] == [[*range(200)], [*range(200, 300)]]
