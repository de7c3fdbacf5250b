"""Epochs in lockstep: every rank makes its batches and takes part in the other ranks' batches, until all are done.

On a GPU the batches of steps overlap (`Overlap`): while ranks meet for a step, the GPU samples the last batches of the
step before.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.loader.prefetch.batch_groups import HOST_ROOM, Work, count_bytes
from pyg_direct.loader.prefetch.drivers import hold_for, take_memory
from pyg_direct.runtime.comm.communicator import Communicator, Unawaited

# Bytes of the batches of a step, unless it is one batch.
GROUP_BYTES = HOST_ROOM
# A step agrees on its number of batches, below this, in one word with the bytes of the largest.
_COUNTS = 1 << 8


class GroupSize:
    """Number of batches of a step: as many as fit into a number of bytes.

    Args:
        most: Their largest number, below 256.
        room: Bytes of the batches of a step, equal on all ranks.

    Attributes:
        num_bytes: Bytes of the largest batch so far, 0 until one is known; with `most=1`, bytes of a whole group.
    """

    def __init__(self, most: int = 1, room: int = GROUP_BYTES) -> None:
        self.most, self.room, self.num_bytes = most, room, 0 if most > 1 else room

    def count(self, batches: list[Any]) -> None:
        """Note the bytes of batches that were made in one step."""
        if self.most > 1:
            self.num_bytes = max(self.num_bytes, -(-count_bytes(batches) // len(batches)))

    def choose(self, num_bytes: int) -> int:
        """Choose the number of batches, if the largest of all processes has so many bytes; 1 if none is known."""
        return max(1, min(self.most, self.room // num_bytes)) if num_bytes > 0 else 1


class _Step:
    """A step whose batches overlap those of the next step.

    Attributes:
        done: Gets the result of the step once all are made; see `_make_step`.
        largest: Bytes of the largest batch of all ranks before.
    """

    def __init__(self, work: list[Work]) -> None:
        self.work, self.largest = work, 0
        self.made: list[Any] = []
        self.done: Future[Any] = Future()


class Overlap:
    """Maker of batches that are begun before earlier ones are finished, also if these are of the step before.

    All ranks begin and finish batches in one order, which follows from the numbers of batches that they agree on. So
    a batch that needs more room is sampled again at one place on all ranks. Between two steps at most `most` batches of
    the first are on their way.

    Args:
        begin: Begins a batch: its work, or None for a batch without seeds -> pending.
        finish: Waits for a sample: (pending, work) -> sample.
        build: Makes the batch: (sample, work) -> batch.
        find_stream: Returns the stream on which batches are ready; the default is the current one.
        most: Batches on their way at a time.
    """

    def __init__(self, begin: Callable[[Work | None], Any], finish: Callable[[Any, Work | None], Any],
                 build: Callable[[Any, Work | None], Any], find_stream: Callable[[], Any] = lambda: None,
                 most: int = 3) -> None:  # fmt: skip
        self._most = most
        self._begin_batch, self._finish_batch, self._build_batch = begin, finish, build
        self.find_stream = find_stream
        self._begun: deque[tuple[_Step, Work | None, Any]] = deque()
        # Steps with batches that are not made yet.
        self._open: deque[_Step] = deque()

    def make(self, step: _Step, most: int, end: Callable[[_Step], object]) -> None:
        """Begin the batches of a step, and make all batches of earlier steps.

        Args:
            most: Most batches of any rank in the step.
            end: Called with each step whose batches are all made.
        """
        if step.work:
            self._open.append(step)
        try:
            for work in chain(step.work, repeat(None, most - len(step.work))):
                sampled = self._finish() if len(self._begun) == self._most else None
                try:
                    # Before the host makes the batch that is sampled: the GPU never waits for it.
                    self._begun.append((step, work, self._begin_batch(work)))
                finally:
                    if sampled is not None:
                        self._build(*sampled, end)
            while self._begun[0][0] is not step:
                self._build(*self._finish(), end)
        except BaseException as error:
            self.abandon(error, end)
            raise

    def flush(self, end: Callable[[_Step], object]) -> None:
        """Make all batches that are on their way."""
        try:
            while self._begun:
                self._build(*self._finish(), end)
        except BaseException as error:
            self.abandon(error, end)
            raise

    def abandon(self, error: BaseException, end: Callable[[_Step], object]) -> None:
        """Give an error to all steps that can no longer be made."""
        while self._begun:
            # All ranks have begun these, which hold their graphs until they are finished.
            with suppress(Exception):
                self._build(*self._finish(), end)
        for step in self._open:
            step.done.set_exception(error)
        self._open.clear()

    def _finish(self) -> tuple[_Step, Work | None, Any]:
        step, work, pending = self._begun.popleft()
        return step, work, self._finish_batch(pending, work)

    def _build(self, step: _Step, work: Work | None, sample: Any, end: Callable[[_Step], object]) -> None:
        batch = self._build_batch(sample, work)
        if work is not None:
            step.made.append(batch)
        while self._open and len(self._open[0].made) == len(self._open[0].work):
            end(self._open.popleft())


class Steps:
    """Iterator over this process's batches, which are prepared in the communicator's thread.

    In a step every process makes its batches, or takes part without seeds if it has none left. A process that stops
    early, or has fewer batches, keeps taking part until the last one is done, so that no process waits for it.

    All processes make equally many batches in a step. With other sizes, a process in the middle of a large group could
    wait in training for a process whose next group waits for it. So the size of a group follows from the bytes that all
    processes agreed on two steps before.

    Args:
        work: (number, work item) of the batches, in order.
        make: Makes the batches of a step: (list of work, most batches of any process) -> list of batches; called in
            the communicator's thread. Or an `Overlap`.
        take_part: Makes so many batches without seeds; unused with an `Overlap`.
        ahead: Steps prepared ahead of the batch handed over, at least 0; at most one with groups, and two if they
            overlap, as a step is ready when the next one has begun.
        group: Batches of a step; None for one. It may be used for several epochs.
    """

    def __init__(self, communicator: Communicator, work: Iterator[Work],
                 make: Callable[[list[Work], int], list[Any]] | Overlap, take_part: Callable[[int], Any], ahead: int,
                 group: GroupSize | None = None) -> None:  # fmt: skip
        self._communicator, self._work = communicator, work
        self._group, self._size = GroupSize() if group is None else group, 1
        self._overlap = make if isinstance(make, Overlap) else None
        # As on all other ranks: the size of a group is agreed on so many steps before.
        self._ahead = 2 if self._overlap else ahead if self._group.most == 1 else min(ahead, 1)
        self._make: Callable[..., Any]
        serve: Any = partial(_serve, communicator, take_part)
        if isinstance(make, Overlap):
            self._make = partial(_begin_step, communicator, make, self._group)
            serve = partial(_serve_overlapped, communicator, make, self._group)
        else:
            self._make = partial(_make_step, communicator, make, self._group)
        self._batches: deque[Future[Any]] = deque()
        self._ready: deque[Any] = deque()
        # Ends the epoch here, once: after the last batch, at `close()` or `cut()`, or when this object is dropped.
        self._finish = weakref.finalize(self, communicator.submit, serve)
        # At the end of a program the communicator is closed first.
        self._finish.atexit = False
        self._others: Future[Any] | None = None
        self._is_cut = False
        communicator.follow(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ready:
            return self._ready.popleft()
        self._start(1 + self._ahead)
        if not self._batches:
            if self._is_cut:
                raise ArgumentError("the graph must be open until the last batch of an epoch, got a closed one")
            raise StopIteration
        try:
            batches, event, largest = self._batches.popleft().result()
        except BaseException:
            self.close()
            raise
        self._size = self._group.choose(largest)
        # One more while this one is in use.
        self._start(self._ahead)
        if event is not None:
            # The stream of the batch's GPU, which may not be the current GPU.
            stream = torch.cuda.current_stream(self._communicator.device)
            event.wait(stream)
            for batch in batches:
                memory = take_memory(batch)
                hold_for(batch if memory is None else memory, stream)
        self._ready.extend(batches)
        return self._ready.popleft()

    def _start(self, count: int) -> None:
        while len(self._batches) < count and self._finish.alive:
            items = list(islice(self._work, self._size))
            if not items:
                self._end()
                return
            if self._overlap is None:
                self._batches.append(self._communicator.submit(self._make, items))
            else:
                step = _Step(items)
                self._communicator.submit(self._make, step)
                self._batches.append(step.done)

    def close(self) -> None:
        """Make no more batches; take part in the other ranks' batches."""
        self._end()
        self._batches.clear()
        self._ready.clear()

    def cut(self) -> None:
        """Close before the communicator is closed; a request for a missing batch then raises the reason."""
        if self._finish.alive:
            self._is_cut = True
            self.close()

    def wait(self) -> None:
        """Wait for the last batch of the last process; only if all processes have equally many."""
        self._end()
        assert self._others is not None
        self._others.result()

    def _end(self) -> None:
        if self._finish.alive:
            self._others = self._finish()


def _make_step(communicator: Communicator, make: Callable[[list[Work], int], list[Any]], group: GroupSize,
               items: list[Work]) -> tuple[list[Any], Any, int] | Unawaited:  # fmt: skip
    """Make the batches of a step: (batches, event behind them, bytes of the largest batch of all processes before)."""
    agreed = communicator.agree(group.num_bytes * _COUNTS + len(items))
    made = _hand_out(communicator, group, make(items, _count_most(agreed)), max(agreed) // _COUNTS)
    return Unawaited(made) if _is_unawaited(communicator) else made


def _begin_step(communicator: Communicator, overlap: Overlap, group: GroupSize, step: _Step) -> Unawaited | None:
    """Begin the batches of a step, and make all batches of the step before."""
    end = partial(_end_step, communicator, overlap, group)
    try:
        agreed = communicator.agree(group.num_bytes * _COUNTS + len(step.work))
    except BaseException as error:
        step.done.set_exception(error)
        overlap.abandon(error, end)
        raise
    step.largest = max(agreed) // _COUNTS
    overlap.make(step, _count_most(agreed), end)
    return Unawaited(None) if _is_unawaited(communicator) else None


def _end_step(communicator: Communicator, overlap: Overlap, group: GroupSize, step: _Step) -> None:
    step.done.set_result(_hand_out(communicator, group, step.made, step.largest, overlap.find_stream()))


def _hand_out(communicator: Communicator, group: GroupSize, batches: list[Any], largest: int, stream: Any = None
              ) -> tuple[list[Any], Any, int]:  # fmt: skip
    """Return the result of a step, with an event behind its batches on a GPU."""
    event, is_on_gpu = None, communicator.device.type == "cuda"
    # On a GPU batches share no memory: the first stands for all.
    group.count(batches[:1] if is_on_gpu else batches)
    if is_on_gpu:
        event = torch.cuda.Event()
        event.record(stream)
    return batches, event, largest


def _is_unawaited(communicator: Communicator) -> bool:
    return bool(getattr(communicator, "is_awaited_by_graphs", False))


def _count_most(agreed: list[int]) -> int:
    """Count the batches of the process that has most of them in a step."""
    return max(word % _COUNTS for word in agreed)


def _serve(communicator: Communicator, take_part: Callable[[int], Any]) -> None:
    """Take part in the other ranks' steps until none has a batch."""
    while count := _count_most(communicator.agree(0)):
        take_part(count)


def _serve_overlapped(communicator: Communicator, overlap: Overlap, group: GroupSize) -> Unawaited | None:
    """As `_serve`; the batches of the last step are made here."""
    end = partial(_end_step, communicator, overlap, group)
    try:
        while count := _count_most(communicator.agree(0)):
            overlap.make(_Step([]), count, end)
    except BaseException as error:
        # A second call changes nothing.
        overlap.abandon(error, end)
        raise
    overlap.flush(end)
    return Unawaited(None) if _is_unawaited(communicator) else None
