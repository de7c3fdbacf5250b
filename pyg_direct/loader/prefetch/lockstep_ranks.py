"""Epochs in step: every process makes its batches and takes part in those of the others, until all are done."""

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
    """Iterates over this process's batches, which are made ahead in the communicator's thread.

    In a step every process makes a batch, or takes part without seeds where it has none left. Whoever stops early, or
    has fewer batches, keeps taking part until the last one is done, so that nobody waits for it.

    Args:
        communicator: What batches are made with.
        work: (number, what it is made from) of the batches, in order.
        make: Makes a batch: (number, what it is made from) -> batch; called in the communicator's thread.
        take_part: Makes a batch without seeds.
        ahead: Batches made ahead of the one given out, at least 0.
    """

    def __init__(self, communicator: Communicator, work: Iterator[Work], make: Callable[[int, Any], Any],
                 take_part: Callable[[], Any], ahead: int) -> None:  # fmt: skip
        self._communicator, self._work, self._make, self._ahead = communicator, work, make, ahead
        self._batches: deque[Future[Any]] = deque()
        # Ends the epoch here, once: after the last batch, at `close()` or `cut()`, or when this is dropped.
        self._finish = weakref.finalize(self, communicator.submit, _serve, communicator, take_part)
        # At the end of a program the communicator is closed before.
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
            # That of the batch's GPU, which need not be the current one.
            stream = torch.cuda.current_stream(self._communicator.device)
            event.wait(stream)
            _record(batch, stream)
        # One more while this one is used.
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
        """Make no more batches; those of the others are still taken part in."""
        self._end()
        self._batches.clear()

    def cut(self) -> None:
        """Before the communicator is closed: `close()`, and who asks for a batch that is missing hears why."""
        if self._finish.alive:
            self._is_cut = True
            self.close()

    def wait(self) -> None:
        """Wait for the last batch of the last process; only where all of them have equally many."""
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
    """Take part in the steps of the others until none has a batch."""
    while any(communicator.agree(0)):
        take_part()


def _record(batch: Any, stream: Any) -> None:
    """Tell torch's allocator that a batch is used on a stream."""
    for store in batch.stores:
        for value in store.values():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)
