"""The order of work of an epoch: sample ahead, fetch ahead, hand over, from one thread.

On a GPU everything runs on a side stream: while batch i trains, batch i + 1 is fetched and batch i + 2 is sampled.
Events order the streams; the host waits only for the sizes of a batch that was sampled one turn before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pyg_direct.sampling.plan import Pending
from pyg_direct.sampling.sample import Sample

Work = tuple[int, Tensor]


class Pipeline:
    """Iterates over the batches of an epoch.

    Args:
        work: (number, positions) of the batches, in order.
        submit: Starts to sample a batch; returns it pending, or sampled.
        fetch: Makes the batch of a sample: (sample, number, positions) -> batch.
        prefetch: Batches fetched ahead; 0 makes each one when it is asked for.
        device: The device of batches.
    """

    def __init__(self, work: Iterator[Work], submit: Callable[[int, Tensor], Pending | Sample],
                 fetch: Callable[[Sample, int, Tensor], Any], prefetch: int, device: torch.device) -> None:  # fmt: skip
        self._work, self._submit_batch, self._fetch_batch = work, submit, fetch
        self._device = device
        self._prefetch = prefetch if device.type == "cuda" else 0
        self._stream = None
        self._sampled: deque[tuple[Work, Pending | Sample]] = deque()
        self._fetched: deque[tuple[int, Any, torch.cuda.Event | None]] = deque()
        self._error: BaseException | None = None
        if self._prefetch > 0:
            self._stream = torch.cuda.Stream(device)
            # Placed rows were written on the stream that is current now.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        """(number, batch); the batch is ready on torch's current stream and stays valid as long as it is kept."""
        if self._error is not None:
            self.close()
            raise StopIteration
        if not self._fetched:
            self._advance()
        if not self._fetched:
            raise StopIteration
        number, batch, ready = self._fetched.popleft()
        if ready is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(ready)
            hold_for(batch, current)
        if self._prefetch > 0:
            self._advance()
        return number, batch

    def close(self) -> None:
        """Forget what was made ahead."""
        self._sampled.clear()
        self._fetched.clear()
        self._work = iter(())

    def _advance(self) -> None:
        """Fetch batches until enough are ready, keeping one more being sampled."""
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                while len(self._fetched) < max(1, self._prefetch):
                    if not self._sampled and not self._start_next():
                        break
                    (number, positions), pending = self._sampled.popleft()
                    sample = pending.finish() if isinstance(pending, Pending) else pending
                    batch = self._fetch_batch(sample, number, positions)
                    ready = None
                    if self._stream is not None:
                        ready = torch.cuda.Event()
                        ready.record()
                    self._fetched.append((number, batch, ready))
                    if self._stream is not None and not self._sampled:
                        self._start_next()
        except BaseException as error:
            if not self._fetched:
                self._error = error
                self.close()
                raise
            # Batches before the failing one are still handed over; then it is made again, and raises.
            self._work = _raise_later(error)

    def _start_next(self) -> bool:
        work = next(self._work, None)
        if work is None:
            return False
        self._sampled.append((work, self._submit_batch(*work)))
        return True


def _raise_later(error: BaseException) -> Iterator[Work]:
    raise error
    yield


def hold_for(batch: Any, stream: Any) -> None:
    """Tell torch's allocator that the tensors of a batch are used on `stream` too."""
    store = getattr(batch, "_store", None)
    values = store.values() if store is not None else [batch]
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            value.record_stream(stream)
        elif hasattr(value, "record_stream"):
            value.record_stream(stream)

