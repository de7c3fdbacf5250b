"""The order of work of an epoch on a GPU: sample ahead, fetch ahead, hand over, from one thread.

While batch i trains, batch i + 1 is fetched and batch i + 2 is sampled, on side streams. Events order the streams; the
host waits only for the sizes of a batch that was sampled one turn before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import CudaError, PlacementWarning, warn
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.launch import current_stream, kept_stream, set_stream, side_streams
from pyg_direct.sampling.captured_plan import is_on_its_way

# The number of a batch and what it is made from, or of a group of batches (see `batch_groups.py`).
Work = tuple[int, Any]
_OUT_OF_MEMORY = 2


class Pipeline:
    """Iterates over the batches of an epoch.

    When GPU memory runs out while something is made ahead, that is dropped, fewer are made ahead from then on, and the
    batch is made again: equal, as it is a function of its number.

    Args:
        work: (number, what it is made from) of the batches, in order.
        submit: Starts to sample a batch, (number, what it is made from); returns it pending, with `finish`.
        fetch: Makes the batch of a sample: (sample, number, what it is made from) -> batch.
        prefetch: Batches fetched ahead; 0 makes each one when it is asked for, as on the CPU.
        device: The device of batches.
        finish: Waits for a sample: (pending, number) -> sample.
        split: Cuts what was too much for the memory into less: what a group is made from -> work; None where it cannot
            be cut.

    Attributes:
        prefetch: Batches fetched ahead from now on.
    """

    def __init__(self, work: Iterator[Work], submit: Callable[[int, Any], Any], fetch: Callable[[Any, int, Any], Any],
                 prefetch: int, device: torch.device,
                 finish: Callable[[Any, int], Any] = lambda pending, _: pending.finish(),
                 split: Callable[[Any], Iterator[Work]] | None = None) -> None:  # fmt: skip
        self._work, self._submit_batch, self._fetch_batch, self._finish = work, submit, fetch, finish
        self._device, self._split = device, split
        self._index = -1 if device.type == "cpu" else resolve_device(device).index
        self.prefetch = prefetch if device.type == "cuda" else 0
        self._has_shrunk = False
        self._again: deque[Work] = deque()
        self._sampled: deque[tuple[Work, Any]] = deque()
        self._fetched: deque[tuple[Work, Any, torch.cuda.Event | None]] = deque()
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._spare_events: list[torch.cuda.Event] = []
        if self.prefetch > 0:
            # Two streams, so that the sizes of a batch are not waited for behind the rows of the one before. They
            # come first where blocks of both could start: few of theirs keep the link busy. The same ones in each
            # epoch, whose memory is then that of the one before.
            self._streams = side_streams(self._index)
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
        (number, _), batch, ready = self._fetched.popleft()
        memory = take_memory(batch)
        if ready is not None:
            current = current_stream(self._index)
            ready.wait(current)
            self._spare_events.append(ready)
            hold_for(batch if memory is None else memory, current)
        if self.prefetch > 0:
            self._advance(ahead=True)
        return number, batch

    def start(self) -> None:
        """Make batches ahead before one is asked for."""
        self._advance(ahead=True)

    def close(self) -> None:
        """Forget what was made ahead; what reads its memory next on the current stream comes after it."""
        for stream in self._streams or ():
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._again.clear()
        self._sampled.clear()
        self._fetched.clear()
        self._work = iter(())

    def _advance(self, ahead: bool = False) -> None:
        """Fetch batches until enough are ready; what fails ahead of time is raised when its turn comes."""
        while True:
            try:
                with self._on_side_streams():
                    self._fill()
                return
            except BaseException as error:
                if self.prefetch == 0 or not _is_out_of_memory(error):
                    if not isinstance(error, Exception) or not (ahead or self._fetched):
                        self.close()
                        raise
                    # Batches before the failing one are still handed over.
                    self._again.clear()
                    self._sampled.clear()
                    self._work = _raise_later(error)
                    return
            # Out here nothing refers any more to what the failing call had made.
            self._shrink()
            if ahead and self.prefetch == 0:
                return

    def _fill(self) -> None:
        """Fetch batches until enough are ready, keeping one more being sampled."""
        while len(self._fetched) < max(1, self.prefetch):
            if not self._sampled and not self._start_next():
                break
            if self._streams is not None and self.prefetch > 0 and len(self._sampled) < 2:
                self._look_ahead()
            work, pending = self._sampled[0]
            made = self._make(pending, *work)
            self._sampled.popleft()
            self._fetched.append((work, *made))

    def _look_ahead(self) -> None:
        """Start the batch after the one that is made next, so that the GPU has work while that one's sizes are read."""
        try:
            self._start_next()
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            self._again.clear()
            self._work = _raise_later(error)

    def _start_next(self) -> bool:
        work = self._again.popleft() if self._again else next(self._work, None)
        if work is None:
            return False
        if self._streams is not None:
            set_stream(self._streams[0])
        try:
            pending = self._submit_batch(*work)
        except BaseException:
            self._again.appendleft(work)
            raise
        if self._streams is not None and is_on_its_way(pending):
            # Its sizes are waited for on the host, so that it may leave the sampler in the order of the rows: then
            # its ids and its rows come from one stream, which the allocator must know of.
            pending.stream = self._streams[1]
        self._sampled.append((work, pending))
        return True

    def _make(self, pending: Any, number: int, item: Any) -> tuple[Any, torch.cuda.Event | None]:
        """(batch, event after its last kernel)."""
        if self._streams is None:
            return self._fetch_batch(self._finish(pending, number), number, item), None
        sampling, fetching = self._streams
        if is_on_its_way(pending):
            set_stream(fetching)
            sample = self._finish(pending, number)
        else:
            set_stream(sampling)
            sample = self._finish(pending, number)
            fetching.wait_stream(sampling)
            sample.record_stream(fetching)
            set_stream(fetching)
        batch = self._fetch_batch(sample, number, item)
        ready = self._spare_events.pop() if self._spare_events else torch.cuda.Event()
        ready.record(fetching)
        return batch, ready

    def _on_side_streams(self) -> AbstractContextManager[Any]:
        """Remembers the caller's stream; inside, the current stream is set as the work goes on."""
        return nullcontext() if self._streams is None else kept_stream(self._index)

    def _shrink(self) -> None:
        """Drop what was made ahead, give its memory back and make fewer ahead from now on."""
        ahead = [work for work, *_ in self._fetched] + [work for work, _ in self._sampled]
        ahead += self._again
        self._again = deque(ahead if self._split is None else chain.from_iterable(self._split(w) for _, w in ahead))
        self._fetched.clear()
        self._sampled.clear()
        if self._streams is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        if not self._has_shrunk:
            warn(
                f"GPU memory ran out with prefetch={self.prefetch}: fewer batches are made ahead from now on",
                PlacementWarning,
            )
        self._has_shrunk = True
        self.prefetch //= 2


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether GPU memory ran out, said by torch, by the driver or by an error that one of them caused."""
    causes = (error, error.__cause__)
    return any(isinstance(e, torch.OutOfMemoryError) or (isinstance(e, CudaError) and e.code == _OUT_OF_MEMORY)
               for e in causes)  # fmt: skip


def _raise_later(error: BaseException) -> Iterator[Work]:
    raise error
    yield


def note_memory(batch: Any, values: list[Any]) -> None:
    """List what a batch's memory belongs to, until it is handed out: many of its tensors may share some."""
    batch.__dict__["_memory"] = values


def take_memory(batch: Any) -> list[Any] | None:
    """What the memory of a batch, or of a list of them, belongs to, as `note_memory` listed it; None if it did not."""
    if isinstance(batch, list):
        parts = [take_memory(one) for one in batch]
        known = [part for part in parts if part is not None]
        # Batches that were made together share most of it.
        return list({id(value): value for part in known for value in part}.values()) if len(known) == len(parts) \
            else None  # fmt: skip
    values: list[Any] | None = getattr(batch, "__dict__", {}).pop("_memory", None)
    return values


def hold_for(batch: Any, stream: Any) -> None:
    """Tell torch's allocator that the tensors of a batch, or of a list of them, are used on `stream` too."""
    if isinstance(batch, list):
        for one in batch:
            if type(one) is not Tensor or one.layout is not torch.strided:
                hold_for(one, stream)
            elif one.is_cuda:
                one.record_stream(stream)
        return
    store = stores = None
    if not isinstance(batch, Tensor):
        store = getattr(batch, "_store", None)
        stores = getattr(batch, "stores", None) if store is None else [store._mapping]
    values = (batch,) if stores is None else chain.from_iterable(part.values() for part in stores)
    for value in values:
        kind = type(value)
        if kind is int or kind is list:
            continue
        if kind is Tensor and value.layout is torch.strided:
            if value.is_cuda:
                value.record_stream(stream)
            continue
        for part in parts_of(value):
            if isinstance(part, Tensor) and part.is_cuda:
                part.record_stream(stream)


def parts_of(value: Any) -> tuple[Any, ...]:
    """The tensors that a sparse one, a `TensorFrame` or PyG's `Index` is made of; anything else alone."""
    if isinstance(value, Tensor) and value.layout == torch.sparse_csr:
        return value.crow_indices(), value.col_indices(), value.values()
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        # Its own accessors refuse one whose entries are not merged yet.
        return value._indices(), value._values()
    if isinstance(value, Tensor) and hasattr(value, "as_tensor"):
        # It has no memory of its own.
        return (value.as_tensor(),)
    if hasattr(value, "feat_dict"):
        return tuple(parts_of_frame(value))
    # `torch_sparse.SparseTensor`
    return value.coo() if hasattr(value, "coo") and hasattr(value, "storage") else (value,)


def parts_of_frame(frame: Any) -> Iterator[Any]:
    """The tensors of a `TensorFrame`: columns of one kind lie in a tensor, in values with offsets, or in a dict."""
    columns = [*frame.feat_dict.values(), frame.y]
    while columns:
        column = columns.pop()
        if isinstance(column, dict):
            columns += column.values()
        elif hasattr(column, "offset"):
            yield from (column.values, column.offset)
        else:
            yield column
