"""`Pulse`: heartbeats that show which processes of a group are alive, through the group's store."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

# Most seconds between two heartbeats, and the number that must be missed after a failure.
_BEAT = 2.0
_MISSED = 3
# Heartbeats until all have read a word in the store; the names of the ranks that are gone, and of one that failed.
_HEARD = 2.5
_GONE, _FAILED = "gone", "failed"


class Pulse:
    """Heartbeat in the store of the group while this process lives, with a check of the others.

    Only changes of a count matter, and each process measures with its own clock how long ago it saw one. Clocks of
    hosts are never compared. A process that computes for long keeps its heartbeat.

    Args:
        name: Name of the counts, equal on all ranks.
        silence: Seconds without a heartbeat after which a process is gone.

    Attributes:
        gone: Ranks that the first process to miss some found gone; the group ends over them. That process reports them
            before it ends itself; otherwise the others could not distinguish it from the ranks that ended before.
    """

    def __init__(self, name: str, rank: int, size: int, silence: float) -> None:
        self._store: Any = PrefixStore(f"pyg_direct/{name}", open_store(silence))
        # The others can miss this process from here on, even if its thread never sends a heartbeat.
        self._store.set(str(rank), "0")
        self._rank, self._size, self._silence = rank, size, silence
        self._beat = min(_BEAT, silence / (2 * _MISSED))
        # Counts of the others and when they were seen to change; when the store answered last.
        self._counts: dict[int, bytes] = {}
        self._changed: dict[int, float] = {}
        self._answered = time.monotonic()
        self._broken: Exception | None = None
        self.gone: list[int] = []
        self._to_tell: list[int] = []
        self._looks, self._stopped, self._began = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="pyg_direct_pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        count = 0
        try:
            while not self._stopped.wait(self._beat if count else 0):
                count += 1
                self._store.set(str(self._rank), str(count))
                if self._looks.is_set():
                    self._look()
                self._hear_or_tell()
                self._answered = time.monotonic()
                self._began.set()
        except (RuntimeError, dist.DistError) as error:
            self._broken = error
            self._began.set()

    def wait_for_beat(self) -> None:
        """Wait for the first heartbeat of this process: from then on the others can miss it."""
        self._began.wait(self._silence)

    def _look(self) -> None:
        for rank in range(self._size):
            if rank != self._rank and self._store.check([str(rank)]):
                found = self._store.get(str(rank))
                if found != self._counts.setdefault(rank, found):
                    self._counts[rank], self._changed[rank] = found, time.monotonic()

    def _hear_or_tell(self) -> None:
        if not self.gone and self._store.check([_GONE]):
            self.gone = [int(rank) for rank in self._store.get(_GONE).split(b",")]
        elif not self.gone and self._to_tell:
            self._store.set(_GONE, ",".join(map(str, self._to_tell)))
            self.gone = self._to_tell

    def tell_gone(self, ranks: list[int]) -> list[int]:
        """Report to the others which ranks are gone, unless a process did so before; returns the reported ranks.

        Waits for as long as they take to read it.
        """
        if self._size == 2:
            # There are no other processes.
            return self.gone or ranks
        self._to_tell = ranks
        until = time.monotonic() + _HEARD * self._beat
        while time.monotonic() < until and self._broken is None:
            time.sleep(self._beat / 4)
        return self.gone or ranks

    def tell_failed(self) -> None:
        """Report to processes that wait on their GPUs that this process failed."""
        # The user should see the error of this process, also without a store.
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._store.set(_FAILED, str(self._rank))

    def has_failed(self) -> bool:
        """Report whether a process failed that others may wait for on their GPUs."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            return bool(self._store.check([_FAILED]))
        return False

    def watch(self) -> None:
        """Begin to check the others, because a wait has begun."""
        if not self._looks.is_set():
            now = time.monotonic()
            # Counts from before the first check are no heartbeat.
            self._counts = {}
            self._changed = dict.fromkeys((rank for rank in range(self._size) if rank != self._rank), now)
            self._looks.set()

    def rest(self) -> None:
        """End the checks, because the wait is over."""
        self._looks.clear()

    def find_silent(self, within: float | None = None) -> list[int]:
        """Return ranks without a heartbeat for so many seconds, `silence` by default, since `watch`.

        If the store does not answer, return rank 0 alone, which holds the store. Processes that have not joined yet are
        not included.
        """
        within, now = self._silence if within is None else within, time.monotonic()
        if self._broken is not None or now - self._answered > max(within, 2 * self._beat):
            return [0]
        return [rank for rank, changed in self._changed.items() if rank in self._counts and now - changed > within]

    def call_roll(self) -> list[int]:
        """Return ranks that are gone after a failed exchange; waits as long as a heartbeat may take."""
        self.rest()
        self.watch()
        waited = (_MISSED + 0.5) * self._beat
        until = time.monotonic() + waited
        while time.monotonic() < until and self._broken is None:
            time.sleep(self._beat / 4)
        return self.find_silent(_MISSED * self._beat)

    def stop(self) -> None:
        """Stop the heartbeat."""
        self._stopped.set()
        # Not for long, because the store may be gone.
        self._thread.join(1.0)


def open_store(timeout: float) -> Any:
    """Open the store of the default group, over a separate connection if possible, which no other call can block."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    return store
