"""Epochs in lockstep: every rank makes its batches and takes part in the other ranks' batches, until all are done."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.runtime.comm.communicator import Communicator

Work = tuple[int, Any]


class Steps:
    """Iterator over this process's batches, which are prepared in the communicator's thread.

    In a step every process makes a batch, or takes part without seeds if it has none left. A process that stops early,
    or has fewer batches, keeps taking part until the last one is done, so that no process waits for it.

    Args:
        communicator: Communicator of the batches.
        work: (number, work item) of the batches, in order.
        make: Makes a batch: (number, work item) -> batch; called in the communicator's thread.
        take_part: Makes a batch without seeds.
        ahead: Batches prepared ahead of the one handed over, at least 0.
    """

    def __init__(self, communicator: Communicator, work: Iterator[Work], make: Callable[[int, Any], Any],
                 take_part: Callable[[], Any], ahead: int) -> None:  # fmt: skip
        self._communicator, self._work, self._make, self._ahead = communicator, work, make, ahead
        self._batches: deque[Future[Any]] = deque()
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
        self._start(1 + self._ahead)
        if not self._batches:
            if self._is_cut:
                raise ArgumentError("the graph must be open until the last batch of an epoch, got a closed one")
            raise StopIteration
        try:
            batch, event = self._batches.popleft().result()
        except BaseException:
            self.close()
            raise
        if event is not None:
            # The stream of the batch's GPU, which may not be the current GPU.
            stream = torch.cuda.current_stream(self._communicator.device)
            event.wait(stream)
            _record(batch, stream)
        # One more while this one is in use.
        self._start(self._ahead)
        return batch

    def _start(self, count: int) -> None:
        while len(self._batches) < count and self._finish.alive:
            item = next(self._work, None)
            if item is None:
                self._end()
                return
            self._batches.append(self._communicator.submit(_step, self._communicator, self._make, *item))

    def close(self) -> None:
        """Make no more batches; take part in the other ranks' batches."""
        self._end()
        self._batches.clear()

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


def _step(communicator: Communicator, make: Callable[[int, Any], Any], number: int, item: Any) -> tuple[Any, Any]:
    communicator.agree(1)
    batch, event = make(number, item), None
    if communicator.device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
    return batch, event


def _serve(communicator: Communicator, take_part: Callable[[], Any]) -> None:
    """Take part in the other ranks' steps until none has a batch."""
    while any(communicator.agree(0)):
        take_part()


def _record(batch: Any, stream: Any) -> None:
    """Mark a batch as used on a stream for torch's allocator."""
    for store in batch.stores:
        for value in store.values():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)
