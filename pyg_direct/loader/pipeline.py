"""The order of work of an epoch: sample ahead, fetch ahead, hand over, from one thread.

On a GPU this runs on side streams: while batch i trains, batch i + 1 is fetched and batch i + 2 is sampled. Events
order the streams; the host waits only for the sizes of a batch that was sampled one turn before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
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
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._sampled: deque[tuple[Work, Pending | Sample]] = deque()
        self._fetched: deque[tuple[int, Any, torch.cuda.Event | None]] = deque()
        if self._prefetch > 0:
            # Two streams, so that the sizes of a batch are not waited for behind the rows of the one before. They
            # come first where blocks of both could start: few of theirs keep the link busy.
            self._streams = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)
            for stream in self._streams:
                # Placed rows were written on the stream that is current now.
                stream.wait_stream(torch.cuda.current_stream(device))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        """(number, batch); the batch is ready on torch's current stream and stays valid as long as it is kept."""
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
            self._advance(ahead=True)
        return number, batch

    def close(self) -> None:
        """Forget what was made ahead; what reads its memory next on the current stream comes after it."""
        for stream in self._streams or ():
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._sampled.clear()
        self._fetched.clear()
        self._work = iter(())

    def _advance(self, ahead: bool = False) -> None:
        """Fetch batches until enough are ready, keeping one more being sampled."""
        try:
            while len(self._fetched) < max(1, self._prefetch):
                if not self._sampled and not self._start_next():
                    break
                (number, positions), pending = self._sampled.popleft()
                self._fetched.append((number, *self._make(pending, number, positions)))
                if self._streams is not None and not self._sampled:
                    self._start_next()
        except BaseException as error:
            if not isinstance(error, Exception) or not (ahead or self._fetched):
                self.close()
                raise
            # Batches before the failing one are still handed over.
            self._work = _raise_later(error)

    def _start_next(self) -> bool:
        work = next(self._work, None)
        if work is None:
            return False
        with self._on_stream(0):
            self._sampled.append((work, self._submit_batch(*work)))
        return True

    def _make(self, pending: Pending | Sample, number: int, positions: Tensor) -> tuple[Any, torch.cuda.Event | None]:
        """(batch, event after its last kernel)."""
        with self._on_stream(0):
            sample = pending.finish() if isinstance(pending, Pending) else pending
        if self._streams is None:
            return self._fetch_batch(sample, number, positions), None
        sampling, fetching = self._streams
        fetching.wait_stream(sampling)
        for ids in (sample.n_id, sample.e_id, sample.edge_index):
            ids.record_stream(fetching)
        with self._on_stream(1):
            batch = self._fetch_batch(sample, number, positions)
            ready = torch.cuda.Event()
            ready.record()
        return batch, ready

    def _on_stream(self, which: int) -> AbstractContextManager[Any]:
        return nullcontext() if self._streams is None else torch.cuda.stream(self._streams[which])


def _raise_later(error: BaseException) -> Iterator[Work]:
    raise error
    yield


def hold_for(batch: Any, stream: Any) -> None:
    """Tell torch's allocator that the tensors of a batch are used on `stream` too."""
    store = getattr(batch, "_store", None)
    values = store.values() if store is not None else [batch]
    for value in values:
        for part in _parts_of(value):
            if isinstance(part, Tensor) and part.is_cuda:
                part.record_stream(stream)


def _parts_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor) and value.layout == torch.sparse_csr:
        return value.crow_indices(), value.col_indices(), value.values()
    # `torch_sparse.SparseTensor`
    return value.coo() if hasattr(value, "coo") and hasattr(value, "storage") else (value,)
