"""Epochs in lockstep: every rank makes its batches and takes part in the other ranks' batches, until all are done."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any

import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.loader.prefetch.batch_groups import HOST_ROOM, Work, count_bytes
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


class Steps:
    """Iterator over this process's batches, which are prepared in the communicator's thread.

    In a step every process makes its batches, or takes part without seeds if it has none left. A process that stops
    early, or has fewer batches, keeps taking part until the last one is done, so that no process waits for it.

    All processes make equally many batches in a step. With other sizes, a process in the middle of a large group could
    wait in training for a process whose next group waits for it. So the size of a group follows from the bytes that all
    processes agreed on two steps before.

    Args:
        communicator: Communicator of the batches.
        work: (number, work item) of the batches, in order.
        make: Makes the batches of a step: (list of work, most batches of any process) -> list of batches; called in
            the communicator's thread.
        take_part: Makes so many batches without seeds.
        ahead: Steps prepared ahead of the batch handed over, at least 0; at most one with groups.
        group: Batches of a step; None for one. It may be used for several epochs.
    """

    def __init__(self, communicator: Communicator, work: Iterator[Work], make: Callable[[list[Work], int], list[Any]],
                 take_part: Callable[[int], Any], ahead: int, group: GroupSize | None = None) -> None:  # fmt: skip
        self._communicator, self._work = communicator, work
        self._group, self._size = GroupSize() if group is None else group, 1
        # As on all other ranks: the size of a group is agreed on two steps before.
        self._ahead = ahead if self._group.most == 1 else min(ahead, 1)
        self._make: Callable[[list[Work]], Any] = partial(_step, communicator, make, self._group)
        self._batches: deque[Future[Any]] = deque()
        self._ready: deque[Any] = deque()
        # Ends the epoch here, once: after the last batch, at `close()` or `cut()`, or when this object is dropped.
        self._finish = weakref.finalize(self, communicator.submit, _serve, communicator, take_part)
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
        if event is not None:
            # The stream of the batch's GPU, which may not be the current GPU.
            stream = torch.cuda.current_stream(self._communicator.device)
            event.wait(stream)
            for batch in batches:
                _record(batch, stream)
        self._size = self._group.choose(largest)
        # One more while this one is in use.
        self._start(self._ahead)
        self._ready.extend(batches)
        return self._ready.popleft()

    def _start(self, count: int) -> None:
        while len(self._batches) < count and self._finish.alive:
            items = list(islice(self._work, self._size))
            if not items:
                self._end()
                return
            self._batches.append(self._communicator.submit(self._make, items))

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


def _step(communicator: Communicator, make: Callable[[list[Work], int], list[Any]], group: GroupSize,
          items: list[Work]) -> tuple[list[Any], Any, int] | Unawaited:  # fmt: skip
    """Make the batches of a step: (batches, event behind them, bytes of the largest batch of all processes before)."""
    agreed = communicator.agree(group.num_bytes * _COUNTS + len(items))
    batches, event = make(items, _count_most(agreed)), None
    is_on_gpu = communicator.device.type == "cuda"
    # On a GPU batches share no memory: the first stands for all.
    group.count(batches[:1] if is_on_gpu else batches)
    if is_on_gpu:
        event = torch.cuda.Event()
        event.record()
    made = batches, event, max(agreed) // _COUNTS
    return Unawaited(made) if getattr(communicator, "is_awaited_by_graphs", False) else made


def _count_most(agreed: list[int]) -> int:
    """Count the batches of the process that has most of them in a step."""
    return max(word % _COUNTS for word in agreed)


def _serve(communicator: Communicator, take_part: Callable[[int], Any]) -> None:
    """Take part in the other ranks' steps until none has a batch."""
    while count := _count_most(communicator.agree(0)):
        take_part(count)


def _record(batch: Any, stream: Any) -> None:
    """Mark a batch as used on a stream for torch's allocator."""
    for store in batch.stores:
        for value in store.values():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)
