"""Windows of the processes of a host over one file: a row that one process reads is copied by the others.

Each process has the memory of its own window, in which only it writes; the others may read there. A row is read from
the file by one process at a time, piece by piece; processes that need it too copy it then. They wait for pieces that
are being read, never for rows that are only planned, so that no process waits for the training of another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import LoaderWarning, MemoryLimitError, warn
from pyg_direct.features.disk_rates import DiskRates, find_rates, read_timeout
from pyg_direct.features.row_files import RowFile
from pyg_direct.kernels.rows.file_rows import PAGE
from pyg_direct.ops.rows.gather_rows import prepare_read
from pyg_direct.runtime.comm.host_group import identify_host
from pyg_direct.runtime.cuda.memory import Block
from pyg_direct.runtime.host.shared_memory import SharedMemory, open_shared, pin

try:
    import fcntl
except ImportError:
    # Not on Linux: `open_host_window` opens none then.
    fcntl = None  # type: ignore[assignment]

# Marks of rows that have no slot.
_NOWHERE, _UNDER_WAY = -1, -2
# Bytes of rows that a process reads before it shows them to the others.
_PIECE_BYTES = 32 << 20
# Seconds between two looks at rows or at a lock that others have, and those after which a process goes on without them.
_LOOK, _LOCK_LOOK, _PATIENCE = 0.01, 0.0005, 20.0
# Seconds for which a process waits for the lock when a window begins or ends.
_MOST_JOINING = 2.0
# Bytes of a list of members, at most.
_MOST_LISTED = 1 << 16
_WORD = 8
_FACTS_BYTES = 4 * _WORD


class _Member(NamedTuple):
    """A window of a process, as the processes of a host list it.

    Attributes:
        process, started: Number of the process, and when it started, in ticks of the system.
        descriptor, num_slots: The process's description of the memory, and the rows that fit there.
        token: Number by which the memory is known, too.
    """

    process: int
    started: int
    descriptor: int
    num_slots: int
    token: int

    @property
    def is_alive(self) -> bool:
        """True while the process runs; False if another one has got its number."""
        return _find_start(self.process) == self.started


class _Memory:
    """Memory of a window: rows, the slot of each row of the file, and how often rows have given up their slots.

    Attributes:
        rows: uint8 `[S, row_bytes]`.
        slots: int32 `[N]`; negative for rows without a slot.
        facts: int64 `[2]`: the token, and a number that grows before slots are written again.
        rates: Rates of the disk, float64 `[2]`; zeros until they are known.
    """

    def __init__(self, shared: SharedMemory, num_rows: int, num_slots: int, row_bytes: int) -> None:
        self.shared, flat = shared, shared.bytes
        begin, tail = _find_tables(num_rows, num_slots, row_bytes)
        # Rows come first, as views of page-locked memory begin there.
        self.rows = flat[: num_slots * row_bytes].view(num_slots, row_bytes)
        self.slots: np.ndarray = flat[begin : begin + 4 * num_rows].numpy().view(np.int32)
        self.facts: np.ndarray = flat[tail : tail + 2 * _WORD].numpy().view(np.int64)
        self.rates: np.ndarray = flat[tail + 2 * _WORD : tail + _FACTS_BYTES].numpy().view(np.float64)


def _find_tables(num_rows: int, num_slots: int, row_bytes: int) -> tuple[int, int]:
    """Return the first bytes of the slots and of the facts."""
    begin = -(-num_slots * row_bytes // PAGE) * PAGE
    return begin, begin + -(-4 * num_rows // _WORD) * _WORD


def _find_start(process: int) -> int:
    """Return when a process started; -1 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return -1
    # A process that has ended, and that its parent has not noticed, has no memory.
    return -1 if fields[0] in "ZX" else int(fields[19])


class HostWindow:
    """Memory of a window that other processes of this host read, and the way to theirs over the same file.

    If a process ends, others read the rows that it was reading. If it stops, they do so after some seconds. Memory and
    locks have no names, and end with their processes; the list of members is a small file of a folder of this user,
    which the last member removes.

    Args:
        file: The table.
        num_slots: Rows that fit the window.
        list_path: The list of members.

    Raises:
        OSError, MemoryLimitError: the system does not allow this.
        FileError: see `measure_disk`.

    Attributes:
        slots: Slot of each row, int32 `[N]`; negative for rows that have none. Only `fill` and `give_up` write it.
    """

    def __init__(self, file: RowFile, num_slots: int, list_path: Path) -> None:
        self._file, self._path = file, list_path
        num_rows = file.layout.shape[0]
        self._row_bytes = file.layout.num_bytes // max(1, num_rows)
        self._num_rows = num_rows
        size = _find_tables(num_rows, num_slots, self._row_bytes)[1] + _FACTS_BYTES
        self._own = _Memory(SharedMemory(size), num_rows, num_slots, self._row_bytes)
        self.slots = self._own.slots
        self.slots[:] = _NOWHERE
        self._own.facts[:] = secrets.randbits(62), 0
        self._me = _Member(os.getpid(), _find_start(os.getpid()), self._own.shared.descriptor, num_slots,
                           int(self._own.facts[0]))  # fmt: skip
        self._peers: dict[_Member, _Memory] = {}
        self._is_left = False
        # True after another process did not give back the lock.
        self._is_alone = False
        self._lock = _join_list(list_path, self._me)
        weakref.finalize(self, _end_membership, self._lock, list_path, self._me)
        self._share_rates()

    def _share_rates(self) -> None:
        """Take the rates of the disk from another process, or measure them while the others wait: measurements at the
        same time would disturb each other.
        """
        with self._locked(fcntl.LOCK_EX):
            known = next((memory.rates for memory in self._find_peers() if memory.rates.all()), None)
            rates = find_rates(self._file, None if known is None else DiskRates(*known.tolist()))
            if rates is not None:
                self._own.rates[:] = rates

    def view(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the rows of the window, on the CPU."""
        return self._own.shared.view(dtype, shape)

    def pin(self, device: torch.device) -> Block:
        """Page-lock the memory for a GPU of this process.

        Raises:
            CudaError: the system does not allow it.
        """
        return pin(self._own.shared, device)

    def leave(self, is_left: bool = True) -> None:
        """Let a wait for other processes end early; or wait again."""
        self._is_left = is_left

    def give_up(self, rows: np.ndarray) -> None:
        """Take rows out of the window, before their slots are written again.

        Args:
            rows: Positions in the file, int64 `[n]`.
        """
        with self._locked(fcntl.LOCK_EX):
            self.slots[rows] = _NOWHERE
            # After the slots: a process that copies without the lock sees one of both.
            self._own.facts[1] += 1

    def fill(self, rows: np.ndarray, slots: np.ndarray, read: Callable[[np.ndarray, np.ndarray], bool]
             ) -> np.ndarray | None:  # fmt: skip
        """Bring rows into slots: copies of other processes, or from the file.

        Args:
            rows: Positions in the file, int64 `[n]`, ascending and unique, that have no slot.
            slots: int64 `[n]`, which no row has.
            read: Reads rows of the file to slots, as `RangeReader.read`.

        Returns:
            True for rows that were read from the file, bool `[n]`; None if the read was left early, without its rows.

        Raises:
            FileError: see `RangeReader.read`.
        """
        is_read = np.zeros(len(rows), bool)
        is_whole = False
        try:
            left, is_first, since = np.arange(len(rows)), True, time.monotonic()
            while len(left) > 0:
                is_forced = time.monotonic() - since > min(_PATIENCE, read_timeout())
                if is_forced:
                    self._name_wait(int(rows[left[0]]))
                rest = []
                for places in _split(left, self._row_bytes):
                    if self._is_left:
                        return None
                    rest.append(self._serve(rows, slots, places, read, is_read, is_forced))
                    if rest[-1] is None:
                        return None
                now = np.concatenate([places for places in rest if places is not None])
                if len(now) < len(left):
                    since = time.monotonic()
                elif not is_first:
                    time.sleep(_LOOK)
                left, is_first = now, False
            is_whole = True
        finally:
            if not is_whole:
                self.give_up(rows)
        return is_read

    def _serve(self, rows: np.ndarray, slots: np.ndarray, places: np.ndarray,
               read: Callable[[np.ndarray, np.ndarray], bool], is_read: np.ndarray, is_forced: bool
               ) -> np.ndarray | None:  # fmt: skip
        """Bring a piece of rows into slots; returns the places of those that another process is reading, or None if the
        read was left early.
        """
        is_here = self._copy(rows[places], slots[places])
        own, others = places[~is_here], places[:0]
        if len(own) > 0:
            is_elsewhere = self._begin(rows[own], is_forced)
            own, others = own[~is_elsewhere], own[is_elsewhere]
        if len(own) > 0:
            if not read(rows[own], slots[own]):
                return None
            is_read[own] = True
        here = np.concatenate([places[is_here], own])
        if len(here) > 0:
            with self._locked(fcntl.LOCK_EX):
                self.slots[rows[here]] = slots[here]
        return others

    def _copy(self, rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Copy the rows that other processes have; returns which, bool `[n]`."""
        is_here = np.zeros(len(rows), bool)
        with self._locked(fcntl.LOCK_SH):
            for memory in self._find_peers():
                before = int(memory.facts[1])
                places = memory.slots[rows]
                found = np.flatnonzero((places >= 0) & ~is_here)
                if len(found) == 0:
                    continue
                chosen = torch.from_numpy(places[found].astype(np.int64))
                targets = torch.from_numpy(slots[found])
                prepare_read(memory.rows, chosen, self._own.rows, targets)(0, len(found))
                # A process that was too long without the lock may have written there meanwhile.
                is_here[found] = memory.facts[1] == before
        return is_here

    def _begin(self, rows: np.ndarray, is_forced: bool) -> np.ndarray:
        """Mark the rows that no other process has or reads as rows that are read here; returns the others, bool `[n]`.

        Args:
            is_forced: Read all of them here.
        """
        is_elsewhere = np.zeros(len(rows), bool)
        with self._locked(fcntl.LOCK_EX):
            for memory in () if is_forced else self._find_peers():
                is_elsewhere |= memory.slots[rows] != _NOWHERE
            self.slots[rows[~is_elsewhere]] = _UNDER_WAY
        return is_elsewhere

    def _find_peers(self) -> list[_Memory]:
        """Return the windows of the other processes that run; the caller has the lock."""
        if self._is_alone:
            return []
        others = [member for member in _read_list(self._lock) if member != self._me and member.is_alive]
        # Memory of a process that has ended is free after this.
        self._peers = {member: self._peers[member] for member in others if member in self._peers}
        for member in others:
            if member not in self._peers:
                with contextlib.suppress(OSError, MemoryLimitError):
                    self._peers[member] = self._open(member)
        return list(self._peers.values())

    def _open(self, member: _Member) -> _Memory:
        size = _find_tables(self._num_rows, member.num_slots, self._row_bytes)[1] + _FACTS_BYTES
        memory = _Memory(open_shared(member.process, member.descriptor, size), self._num_rows, member.num_slots,
                         self._row_bytes)  # fmt: skip
        if memory.facts[0] != member.token:
            raise OSError(f"memory of process {member.process} must be a window, it is another one's by now")
        return memory

    def _name_wait(self, row: int) -> None:
        """Tell the user that other processes gave no rows."""
        place = self._file.layout.offset + row * self._row_bytes
        numbers = ", ".join(str(member.process) for member in self._peers)
        warn(f"{self._file.path} was read by other processes of this host ({numbers}), which gave no rows for "
             f"{min(_PATIENCE, read_timeout()):g} seconds, at byte {place}: this process reads them itself",
             LoaderWarning)  # fmt: skip

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Hold the lock of all windows over the file; the lock ends with its process."""
        is_held, since = False, time.monotonic()
        while not (is_held or self._is_alone):
            try:
                fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
                is_held = True
            except BlockingIOError:
                self._is_alone = time.monotonic() - since > _PATIENCE
                if self._is_alone:
                    warn(
                        f"{self._file.path} was locked by other processes of this host for {_PATIENCE:g} seconds: this "
                        "process reads all of its rows itself from now on",
                        LoaderWarning,
                    )
                time.sleep(_LOCK_LOOK)
        try:
            yield
        finally:
            if is_held:
                fcntl.flock(self._lock, fcntl.LOCK_UN)


def _split(places: np.ndarray, row_bytes: int) -> list[np.ndarray]:
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    return [places[first : first + step] for first in range(0, len(places), step)]


def open_host_window(file: RowFile, num_slots: int) -> HostWindow | None:
    """Open a window that processes of this host share; None if the system does not allow this."""
    if sys.platform != "linux":
        return None
    try:
        return HostWindow(file, num_slots, _find_path(file))
    except (OSError, MemoryLimitError):
        return None


def _find_path(file: RowFile) -> Path:
    """Return the path of the list of members, in a folder that only this user can enter.

    Raises:
        OSError: there is no such folder.
    """
    folder = Path(tempfile.gettempdir()) / f"pyg_direct-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user can enter")
    # Processes that see different numbers of processes, or another file by now, have lists of their own.
    facts = identify_host(), os.fstat(file.handle).st_dev, *file.stamp, *map(str, file.layout)
    return folder / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _join_list(path: Path, member: _Member) -> int:
    """Put a window on the list, and return a handle of it, which has a lock of its own.

    Raises:
        OSError: the list cannot be written, or another process does not give back its lock.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock_soon(handle)
            # The last member may just have removed it.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                _write_list(handle, [*_read_list(handle), member])
                fcntl.flock(handle, fcntl.LOCK_UN)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock_soon(handle: int) -> None:
    """Take the lock of a list alone.

    Raises:
        BlockingIOError: another process does not give it back.
    """
    since = time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - since > _MOST_JOINING:
                raise
            time.sleep(_LOCK_LOOK)


def _read_list(handle: int) -> list[_Member]:
    text = os.pread(handle, _MOST_LISTED, 0)
    try:
        return [_Member(*entry) for entry in json.loads(text)]
    except (ValueError, TypeError):
        # A list that its writer did not end.
        return []


def _write_list(handle: int, members: list[_Member]) -> None:
    """Replace the list by those members that run; the caller has the lock."""
    text = json.dumps([member for member in members if member.is_alive]).encode()
    os.ftruncate(handle, 0)
    os.pwrite(handle, text, 0)


def _end_membership(handle: int, path: Path, member: _Member) -> None:
    """Take a window off the list, and remove a list without windows."""
    # A forked process has the window of its parent, which stays.
    if os.getpid() == member.process:
        with contextlib.suppress(OSError):
            _lock_soon(handle)
            left = [other for other in _read_list(handle) if other != member and other.is_alive]
            _write_list(handle, left)
            if not left:
                path.unlink()
    os.close(handle)
