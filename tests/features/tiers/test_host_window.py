"""Windows of the processes of a host over one file."""

import os
import signal
import stat
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_direct import save_rows
from pyg_direct.errors import FileError, LoaderWarning
from pyg_direct.features.range_reader import RangeReader
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.tiers import host_window
from pyg_direct.features.tiers.host_window import open_host_window
from tests.processes import start_method

ROWS, WIDTH = 4000, 20
TABLE = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH).to(torch.uint8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder of the lists of members."""
    monkeypatch.setattr(host_window.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def path(folder):
    return save_rows(folder / "rows.npy", TABLE)


class Reader:
    """A window of so many rows, with a reader of its file that counts the rows it reads."""

    def __init__(self, path, count=ROWS):
        self.file = RowFile(path)
        self.window = open_host_window(self.file, count)
        self.rows = self.window.view(torch.uint8, (count, WIDTH))
        self.reader, self.num_read, self.free = RangeReader(self.file), 0, 0

    def read(self, rows, slots):
        self.num_read += len(rows)
        return self.reader.read(rows, slots, self.rows.numpy())

    def fill(self, rows):
        slots = np.arange(self.free, self.free + len(rows))
        self.free += len(rows)
        return self.window.fill(np.asarray(rows), slots, self.read)

    def holds(self, rows):
        slots = self.window.slots[rows]
        return bool((slots >= 0).all()) and torch.equal(self.rows[torch.from_numpy(slots).long()], TABLE[rows])


def test_rows_that_another_window_has_are_copied(path):
    first, second = Reader(path), Reader(path)
    first.fill(np.arange(0, 2000, 2))

    is_read = second.fill(np.arange(0, 2000, 5))

    assert second.holds(np.arange(0, 2000, 5))
    assert second.num_read == 200
    assert np.array_equal(np.arange(0, 2000, 5)[is_read], np.arange(5, 2000, 10))


def test_rows_come_bit_for_bit_in_pieces_and_any_slots(path, monkeypatch):
    monkeypatch.setattr(host_window, "_PIECE_BYTES", 7 * WIDTH)
    generator, readers = np.random.default_rng(0), [Reader(path, 3 * ROWS) for _ in range(3)]

    for _ in range(4):
        for own in readers:
            rows = np.flatnonzero((generator.random(ROWS) < 0.1) & (own.window.slots < 0))
            own.fill(rows)
            assert own.holds(rows)
    assert sum(own.num_read for own in readers) == len(set.union(*(
        set(np.flatnonzero(own.window.slots >= 0)) for own in readers)))  # fmt: skip


def test_rows_given_up_are_read_again(path):
    first, second = Reader(path), Reader(path)
    first.fill(np.arange(100))
    first.window.give_up(np.arange(50))
    first.rows[:50] = 0

    second.fill(np.arange(100))

    assert second.holds(np.arange(100))
    assert second.num_read == 50


def test_a_row_that_is_being_read_is_waited_for(path):
    first, second, go_on, begun = Reader(path), Reader(path), threading.Event(), threading.Event()
    read = first.read
    first.read = lambda *part: (begun.set(), go_on.wait(), read(*part))[2]
    threads = [threading.Thread(target=own.fill, args=(np.arange(200),)) for own in (first, second)]

    threads[0].start()
    begun.wait()
    threads[1].start()
    time.sleep(0.05)
    assert second.num_read == 0
    go_on.set()
    for thread in threads:
        thread.join()

    assert second.holds(np.arange(200))
    assert (first.num_read, second.num_read) == (200, 0)


def test_a_process_that_gives_no_rows_is_not_waited_for_longer_than_the_timeout(path, monkeypatch):
    monkeypatch.setattr(host_window, "_PATIENCE", 0.1)
    first, second = Reader(path), Reader(path)
    first.window.slots[10:20] = host_window._UNDER_WAY

    words = (f"rows.npy was read by other processes of this host .{os.getpid()}., which gave no rows for 0.1 seconds, "
             f"at byte {4096 + 10 * WIDTH}: this process reads them itself")  # fmt: skip
    with pytest.warns(LoaderWarning, match=words):
        second.fill(np.arange(100))

    assert second.holds(np.arange(100))
    assert first.num_read == 0
    assert second.num_read == 100


def test_a_read_that_fails_leaves_its_rows_to_others(path):
    first, second = Reader(path), Reader(path)

    def fail(*part):
        raise FileError("no bytes")

    first.read = fail
    with pytest.raises(FileError, match="no bytes"):
        first.fill(np.arange(100))

    second.fill(np.arange(100))
    assert second.holds(np.arange(100))
    assert (first.window.slots == -1).all()


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_read_that_is_left_has_no_rows(path, is_waiting):
    first, second = Reader(path), Reader(path)
    if is_waiting:
        second.window.slots[50] = host_window._UNDER_WAY
        thread = threading.Timer(0.1, first.window.leave)
        thread.start()
    else:
        first.read = lambda *part: False

    assert first.fill(np.arange(100)) is None
    assert (first.window.slots == -1).all()
    first.window.leave(False)
    second.window.slots[50] = -1
    vars(first).pop("read", None)
    assert first.fill(np.arange(100)).all()


def test_a_lock_that_is_not_given_back_ends_the_sharing_alone(path, monkeypatch):
    monkeypatch.setattr(host_window, "_PATIENCE", 0.1)
    first, second = Reader(path), Reader(path)
    first.fill(np.arange(100))

    with (
        first.window._locked(host_window.fcntl.LOCK_EX),
        pytest.warns(LoaderWarning, match="was locked by other processes of this host for 0.1 seconds"),
    ):
        second.fill(np.arange(100))

    assert second.holds(np.arange(100))
    assert second.num_read == 100


def test_rows_that_are_written_while_they_are_copied_are_read(path, monkeypatch):
    first, second, prepare = Reader(path), Reader(path), host_window.prepare_read
    first.fill(np.arange(100))

    def write_meanwhile(*args):
        # Of a process that was without the lock for too long.
        first.window._own.facts[1] += 1
        first.rows[:] = 0
        return prepare(*args)

    monkeypatch.setattr(host_window, "prepare_read", write_meanwhile)
    # It still has the rows: they are waited for until the timeout, and then read.
    monkeypatch.setattr(host_window, "_PATIENCE", 0.1)
    with pytest.warns(LoaderWarning, match="this process reads them itself"):
        second.fill(np.arange(100))
    assert second.holds(np.arange(100))


def test_the_last_window_removes_the_list(path, folder):
    first, second = Reader(path), Reader(path)
    (list_path,) = (folder / f"pyg_direct-{os.geteuid()}").iterdir()
    assert stat.S_IMODE(list_path.parent.stat().st_mode) == 0o700

    del first
    assert list_path.exists()
    del second
    assert not list_path.exists()


def test_another_file_of_the_same_path_has_a_list_of_its_own(path):
    first = Reader(path)
    first.fill(np.arange(100))
    save_rows(path, TABLE + 1)
    second = Reader(path)

    assert second.fill(np.arange(100)).all()


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_can_enter_is_not_used(path, folder, mode):
    own = folder / f"pyg_direct-{os.geteuid()}"
    own.mkdir(exist_ok=True)
    own.chmod(mode)

    assert open_host_window(RowFile(path), 10) is None


def hold(path, folder, connection, is_reading):
    host_window.tempfile.tempdir = str(folder)
    own = Reader(path)
    if is_reading:
        own.read = lambda *part: (connection.send("reads"), time.sleep(1000))
    own.fill(np.arange(1000))
    connection.send("has read")
    connection.recv()


@pytest.fixture
def start(path, folder):
    context, started = get_context(start_method()), []

    def begin(is_reading):
        ours, theirs = context.Pipe()
        process = context.Process(target=hold, args=(path, folder, theirs, is_reading), daemon=True)
        process.start()
        started.append(process)
        ours.recv()
        return process, ours

    yield begin
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize("is_reading", [True, False])
def test_rows_of_a_process_that_is_killed_are_taken_over(path, folder, start, is_reading):
    process, _ = start(is_reading)
    own = Reader(path)
    thread = threading.Thread(target=own.fill, args=(np.arange(2000),))
    if is_reading:
        thread.start()
        while own.num_read < 1000:
            time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    if not is_reading:
        thread.start()
    thread.join()

    assert own.holds(np.arange(2000))
    assert own.num_read == 2000
    # The list has no process that has ended.
    del own
    assert not list((folder / f"pyg_direct-{os.geteuid()}").iterdir())


def test_rows_of_a_process_are_copied_and_stay_after_its_end(path, start):
    process, connection = start(False)
    own = Reader(path)

    assert not own.fill(np.arange(1000)).any()
    connection.send("end")
    process.join()

    assert own.holds(np.arange(1000))


def test_a_process_that_stops_is_not_waited_for_for_ever(path, start, monkeypatch):
    monkeypatch.setattr(host_window, "_PATIENCE", 0.2)
    process, _ = start(True)
    os.kill(process.pid, signal.SIGSTOP)
    own = Reader(path)

    with pytest.warns(LoaderWarning, match=f"{process.pid}.* gave no rows for 0.2 seconds"):
        own.fill(np.arange(100))
    assert own.holds(np.arange(100))


def test_nothing_is_left_in_shared_memory(path):
    before = set(Path("/dev/shm").iterdir())
    own = Reader(path)
    own.fill(np.arange(10))

    assert set(Path("/dev/shm").iterdir()) == before
