"""Foresight: batches sampled many ahead, so that their rows on disk are read once for all of them, in the file's order.

A batch is a function of (seed, epoch, number), so its rows are known before it is asked for. Consecutive batches form a
window. While the batches of one window are handed out, the next window is sampled and its rows are read. They take the
memory that batches give up. Its batches equal the batches without foresight.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import get_cpu_threads, set_cpu_threads
from pyg_direct.features.spilled_rows import serving
from pyg_direct.features.tiers.window import RowWindow
from pyg_direct.loader.batch_report import Stages
from pyg_direct.loader.prefetch.drivers import FORK_GATE, Work
from pyg_direct.runtime.cuda.launch import current_stream
from pyg_direct.runtime.host.threads import Pool

# Windows in work: the one that is handed out, and the next.
_WINDOWS = 2
_FIRST_PART, _FIRST_MOST = 4, 16
# Parts of a window after which the next one may read more rows.
_PARTS = 16


class _Planned:
    """Number of batches of a window, and of those that still read its rows; and bytes of their samples."""

    def __init__(self, number: int) -> None:
        self.number, self.num_batches, self.num_left, self.num_bytes = number, 0, 0, 0
        self.first_batch = -1
        self.ready = threading.Event()
        self.error: BaseException | None = None


class PlannedSample:
    """Sample of a batch that a window holds, in the form of one on its way."""

    stream = None

    def __init__(self, foresight: Foresight, number: int) -> None:
        self._foresight, self._number = foresight, number

    def finish(self) -> Any:
        """Wait for the sample."""
        return self._foresight.wait_for_sample(self._number)


class Foresight:
    """Iterator over the work items of an epoch, whose batches are planned in windows.

    Args:
        work: (number, work item) of the batches, in order; read in the thread that requests them.
        sample: Samples batches: a list of (number, work item) -> their samples; called in a thread of its own.
        find_reads: Finds rows of a sample: sample -> (window of a table, ids int64 `[n]` on the CPU) of each.
        windows: The windows of all tables, which this object may use alone.
        most: Batches of a window, at most; memory may end it earlier. The first window has a quarter, and at most 16,
            as it is waited for.
        room: Bytes for the samples of a window, on the device; one batch may take more.
        together: Batches that are sampled together, at most: so many read neighbor lists in files together.
    """

    def __init__(self, work: Iterator[Work], sample: Callable[[Sequence[Work]], Sequence[Any]],
                 find_reads: Callable[[Any], Sequence[tuple[RowWindow, Tensor]]], windows: Sequence[RowWindow],
                 most: int, room: int, device: torch.device, *, together: int = 1) -> None:  # fmt: skip
        self._work, self._sample, self._find_reads = work, sample, find_reads
        self._windows, self._most, self._room, self._device = windows, most, room, device
        self._together = together
        self._by_tier = {id(window.source): window for window in windows}
        self._changed = threading.Condition()
        # Items for the caller, and the same items for the planner.
        self._items: deque[Work] = deque()
        self._queue: deque[Work] = deque()
        self._failure: BaseException | None = None
        self._rest_error: Exception | None = None
        # Batches that were sampled, and belong to no window yet: (number, sample or error, its reads).
        self._sampled: deque[tuple[int, Any, Any]] = deque()
        self._samples: dict[int, Any] = {}
        self._window_of: dict[int, _Planned] = {}
        self._pulled: set[int] = set()
        self._open: deque[_Planned] = deque()
        # Windows of an earlier epoch are released, and their rows may still be in memory.
        self._first = max((window.last_number for window in windows), default=-1) + 1
        self._num_windows = self._first
        # Batches are numbered in the order in which they claim rows: the next one, the first one that is not released,
        # those released after it, and the number of each.
        self._next_batch = self._unreleased = max((window.last_batch for window in windows), default=-1) + 1
        self._released_later: set[int] = set()
        self._place_of: dict[int, int] = {}
        self._is_closed = False
        self._num_cores = get_cpu_threads()
        self._pool = Pool(1, "pyg_direct_ahead")
        self._stream = _side_stream(device.index) if device.type == "cuda" else None
        if self._stream is not None:
            # Placed rows were written on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def __iter__(self) -> Iterator[Work]:
        return self

    def __next__(self) -> Work:
        self._pull()
        if self._num_windows == self._first and self._items:
            for _ in range(_WINDOWS):
                self._num_windows += 1
                self._pool.submit(self._plan, self._num_windows - 1)
        if self._items:
            return self._items.popleft()
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error
        raise StopIteration

    def _pull(self) -> None:
        """Take items from the work until the planner has enough for the windows in work."""
        while len(self._items) <= _WINDOWS * self._most + 1:
            try:
                item = next(self._work, None)
            except Exception as error:
                # The batches before it are still handed over.
                self._work, self._failure = iter(()), error
                return
            if item is None:
                return
            with self._changed:
                self._items.append(item)
                self._queue.append(item)
                self._pulled.add(item[0])

    def around(self, stages: Stages) -> Stages:
        """Wrap the stages of the loader, which then take samples and rows from windows."""

        def submit(number: int, item: Any) -> Any:
            with self._changed:
                is_planned = number in self._pulled
            return PlannedSample(self, number) if is_planned else stages.submit(number, item)

        def fetch(sample: Any, number: int, *item: Any) -> Any:
            with self._changed:
                place = self._place_of.get(number, -1)
            if not self.wait_for_rows(number):
                return stages.fetch(sample, number, *item)
            with serving(self._by_tier, place):
                return stages.fetch(sample, number, *item)

        return Stages(submit, stages.finish, fetch)

    def releasing(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the whole stage: after it, the batch reads no more rows of its window."""

        def run(sample: Any, number: int, *item: Any) -> Any:
            try:
                return fetch(sample, number, *item)
            finally:
                self.release(number)

        return run

    def wait_for_sample(self, number: int) -> Any:
        """Wait for the sample of a batch, or raise its error."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._samples or self._is_closed)
            sample = self._samples[number]
        if isinstance(sample, BaseException):
            self.release(number)
            raise sample
        if self._stream is not None:
            sample.record_stream(current_stream(self._device.index))
        return sample

    def wait_for_rows(self, number: int) -> bool:
        """Wait until the rows of a batch's window are read, or raise its error; False if no window has the batch."""
        with self._changed:
            window = self._window_of.get(number)
        if window is None:
            return False
        window.ready.wait()
        if window.error is not None:
            raise window.error
        return True

    def release(self, number: int) -> None:
        """Forget a batch that has been made, or failed; the next window is planned after the last one of a window."""
        with self._changed:
            self._pulled.discard(number)
            self._samples.pop(number, None)
            window = self._window_of.pop(number, None)
            if window is None:
                return
            window.num_left -= 1
            self._released_later.add(self._place_of.pop(number))
            while self._unreleased in self._released_later:
                self._released_later.remove(self._unreleased)
                self._unreleased += 1
            self._changed.notify_all()
            self._plan_next()

    def _plan_next(self) -> None:
        """Plan a window for each that was released; the caller holds the lock."""
        while self._open and self._open[0].num_left == 0 and self._open[0].ready.is_set():
            self._open.popleft()
            if not self._is_closed:
                self._num_windows += 1
                self._pool.submit(self._plan, self._num_windows - 1)

    def _plan(self, number: int) -> None:
        """Sample the batches of a window, and read their rows."""
        window = _Planned(number)
        before = set_cpu_threads(self._num_cores)
        try:
            with ExitStack() as stack:
                if self._stream is not None:
                    stack.enter_context(torch.cuda.device(self._device))
                    stack.enter_context(torch.cuda.stream(self._stream))
                first = max(1, min(self._most // _FIRST_PART, _FIRST_MOST))
                most = first if number == self._first else self._most
                while window.num_batches < most and not self._is_closed and self._add_batch(window, most):
                    pass
                if window.num_batches > 0:
                    self._read_rows(window)
                    self._show(window)
                    self._read_rest()
        except BaseException as error:
            window.error = error
        finally:
            set_cpu_threads(before)
            self._show(window)

    def _show(self, window: _Planned) -> None:
        """Let batches of a window read its rows, or raise its error."""
        with self._changed:
            window.ready.set()
            # Its batches may have failed already, or read their rows later.
            self._plan_next()

    def _read_rows(self, window: _Planned) -> None:
        """Read the rows of a window, of all tables in turn, as batches before it give up theirs."""
        if self._rest_error is not None:
            raise self._rest_error
        left = list(self._windows)
        while left and not self._is_closed:
            with self._changed:
                released = self._unreleased - 1
            left = [own for own in left if not own.read_ahead(window.number, released)]
            if left:
                with self._changed:
                    before = self._open[0].num_batches if self._open else 1
                    enough = min(released + max(1, before // _PARTS), window.first_batch - 1)
                    self._changed.wait_for(functools.partial(self._is_released, enough))

    def _read_rest(self) -> None:
        """Read rows that no batch waits for; an error is one of the next window."""
        try:
            for own in self._windows:
                if not self._is_closed:
                    own.read_rest()
        except Exception as error:
            self._rest_error = error

    def _is_released(self, place: int) -> bool:
        """Check if all batches up to a number are released, or the epoch has ended; the caller holds the lock."""
        return self._unreleased > place or self._is_closed

    def _add_batch(self, window: _Planned, most: int) -> bool:
        """Sample the next batches and add one to a window; returns False if there is none, or if it does not fit."""
        if not self._sampled:
            with self._changed:
                items = [self._queue.popleft() for _ in range(min(self._together, most, len(self._queue)))]
            self._sampled.extend(self._make(items))
        if not self._sampled:
            return False
        batch, sample, reads = self._sampled[0]
        claims = [(own, own.find_fresh(window.number, ids)) for own, ids in _join_reads(reads)]
        size, fits = _count_bytes(sample), all(own.has_room(window.number, claim) for own, claim in claims)
        if window.num_batches > 0 and (not fits or window.num_bytes + size > self._room):
            return False
        self._sampled.popleft()
        place, self._next_batch = self._next_batch, self._next_batch + 1
        for own, claim in claims:
            own.claim(window.number, place, claim)
        with self._changed:
            if window.num_batches == 0:
                self._open.append(window)
                window.first_batch = place
            self._place_of[batch] = place
            window.num_batches += 1
            window.num_bytes += size
            window.num_left += 1
            self._samples[batch], self._window_of[batch] = sample, window
            self._changed.notify_all()
        return True

    def _make(self, items: Sequence[Work]) -> list[tuple[int, Any, Sequence[tuple[RowWindow, Tensor]]]]:
        gate: AbstractContextManager[Any] = FORK_GATE if self._stream is None else nullcontext()
        try:
            with gate:
                samples = self._sample(items) if items else []
                made = [(number, sample, self._find_reads(sample))
                        for (number, _), sample in zip(items, samples, strict=True)]  # fmt: skip
        except Exception as error:
            if len(items) > 1:
                # Only the batch that fails has an error.
                return [entry for item in items for entry in self._make([item])]
            return [(items[0][0], error, ())]
        if self._stream is not None:
            self._stream.synchronize()
        return made

    def close(self) -> None:
        """End the planner, and let another epoch use the windows."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._changed.notify_all()
        if was_closed:
            return
        for window in self._windows:
            window.leave()
        self._pool.close()
        self._samples.clear()
        self._sampled.clear()
        for window in self._windows:
            if not window.is_broken:
                window.leave(False)
            window.lock.release()


def _join_reads(reads: Sequence[tuple[RowWindow, Tensor]]) -> list[tuple[RowWindow, np.ndarray]]:
    """Return the ids that a batch reads of each table, which it may read several times."""
    ids_of: dict[int, list[Tensor]] = {}
    for own, ids in reads:
        ids_of.setdefault(id(own), []).append(ids)
    known = {id(own): own for own, _ in reads}
    return [(known[key], torch.cat(parts).numpy()) for key, parts in ids_of.items()]


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """Return the stream on which all epochs sample ahead: the allocator keeps memory for each stream."""
    return torch.cuda.Stream(index)


def _count_bytes(sample: Any) -> int:
    """Count the memory of a sample, which lies in its tensors; 0 for an error."""
    tensors = () if isinstance(sample, BaseException) else sample.tensors()
    memory = [value.untyped_storage() for value in tensors]
    return sum({part.data_ptr(): part.nbytes() for part in memory}.values())
