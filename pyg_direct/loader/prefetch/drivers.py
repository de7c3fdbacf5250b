"""Order of work of an epoch: on streams of a GPU, or by threads of a CPU.

On a GPU one thread samples ahead, fetches ahead and hands over. While batch i trains, batch i + 1 is fetched and batch
i + 2 is sampled, on side streams. Events order the streams; the host waits only for the sizes of a batch that was
sampled one turn before.

For training on the CPU, threads prepare batches: the loops that make a batch release Python's GIL.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pyg_direct.compiler.jit import get_cpu_threads, set_cpu_threads
from pyg_direct.errors import CudaError, ForkedProcessError, PlacementWarning, warn
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.launch import current_stream, kept_stream, set_stream, side_streams
from pyg_direct.runtime.host.host_memory import give_back_now_and_then
from pyg_direct.runtime.host.threads import Pool
from pyg_direct.sampling.captured_plan import is_on_its_way

# The number of a batch and its work item, or of a group of batches (see `batch_groups.py`).
Work = tuple[int, Any]
_OUT_OF_MEMORY = 2


class Pipeline:
    """Iterator over the batches of an epoch.

    If GPU memory runs out during prefetch, prefetched batches are dropped, and fewer are prefetched from then on. The
    batch is made again, with an equal result, as it is a function of its number.

    Args:
        work: (number, work item) of the batches, in order.
        submit: Starts to sample a batch, (number, work item); returns it pending, with `finish`.
        fetch: Makes the batch of a sample: (sample, number, work item) -> batch.
        prefetch: Batches fetched ahead; 0 makes each one on request, as on the CPU.
        finish: Waits for a sample: (pending, number) -> sample.
        split: Splits a work item that exceeded the memory: work item of a group -> work; None if it cannot be split.
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
            # Two streams, so that the wait for a batch's sizes does not include the previous batch's rows. They have
            # priority over training: a few of their blocks keep the link busy. Every epoch uses the same streams, and
            # so the memory that the allocator keeps for them.
            self._streams = side_streams(self._index)
            for stream in self._streams:
                # Placed rows were written on the current stream.
                stream.wait_stream(torch.cuda.current_stream(device))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        """Return (number, batch); the batch is ready on torch's current stream, and valid as long as it is kept."""
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
        """Prefetch batches before the first request."""
        self._advance(ahead=True)

    def close(self) -> None:
        """Drop prefetched batches; later uses of their memory on the current stream come after it."""
        for stream in self._streams or ():
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._again.clear()
        self._sampled.clear()
        self._fetched.clear()
        self._work = iter(())

    def _advance(self, ahead: bool = False) -> None:
        """Fetch batches until enough are ready; an error ahead of time is raised at its batch's turn."""
        while True:
            try:
                with self._on_side_streams():
                    self._fill()
                return
            except BaseException as error:
                if self.prefetch == 0 or not is_out_of_memory(error):
                    if not isinstance(error, Exception) or not (ahead or self._fetched):
                        self.close()
                        raise
                    # Batches before the failing one are still handed over.
                    self._again.clear()
                    self._sampled.clear()
                    self._work = _raise_later(error)
                    return
            # Outside of the handler nothing refers to tensors of the failing call.
            self._shrink()
            if ahead and self.prefetch == 0:
                return

    def _fill(self) -> None:
        """Fetch batches until enough are ready, with one more being sampled."""
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
        """Start the batch after the next one, so that the GPU has work while the next one's sizes are read."""
        try:
            self._start_next()
        except Exception as error:
            if is_out_of_memory(error):
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
            # The host waits for its sizes, so it may leave the sampler in the order of the rows. Then its ids and rows
            # come from one stream, which the allocator must know.
            pending.stream = self._streams[1]
        self._sampled.append((work, pending))
        return True

    def _make(self, pending: Any, number: int, item: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Make (batch, event after its last kernel)."""
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
        """Remember the caller's stream; inside, the work sets the current stream."""
        return nullcontext() if self._streams is None else kept_stream(self._index)

    def _shrink(self) -> None:
        """Drop prefetched batches, release their memory and prefetch fewer from now on."""
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


def is_out_of_memory(error: BaseException) -> bool:
    """Check if GPU memory ran out, according to torch, the driver or an error that one of them caused."""
    causes = (error, error.__cause__)
    return any(isinstance(e, torch.OutOfMemoryError) or (isinstance(e, CudaError) and e.code == _OUT_OF_MEMORY)
               for e in causes)  # fmt: skip


def _raise_later(error: BaseException) -> Iterator[Work]:
    raise error
    yield


def note_memory(batch: Any, values: list[Any]) -> None:
    """Note the tensors that own a batch's memory, until it is handed over: many of its tensors may share memory."""
    batch.__dict__["_memory"] = values


def take_memory(batch: Any) -> list[Any] | None:
    """Take the tensors that own the memory of a batch, or of a list, as noted by `note_memory`; None without a note."""
    if isinstance(batch, list):
        parts = [take_memory(one) for one in batch]
        known = [part for part in parts if part is not None]
        # Batches that were made together share most of it.
        return list({id(value): value for part in known for value in part}.values()) if len(known) == len(parts) \
            else None  # fmt: skip
    values: list[Any] | None = getattr(batch, "__dict__", {}).pop("_memory", None)
    return values


def hold_for(batch: Any, stream: Any) -> None:
    """Mark the tensors of a batch, or of a list of batches, as used on `stream` for torch's allocator."""
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
    """Return the tensors of a sparse tensor, a `TensorFrame` or PyG's `Index`; any other value alone."""
    if isinstance(value, Tensor) and value.layout == torch.sparse_csr:
        return value.crow_indices(), value.col_indices(), value.values()
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        # torch's accessors refuse a tensor whose entries are not merged yet.
        return value._indices(), value._values()
    if isinstance(value, Tensor) and hasattr(value, "as_tensor"):
        # It has no memory of its own.
        return (value.as_tensor(),)
    if hasattr(value, "feat_dict"):
        return tuple(parts_of_frame(value))
    # `torch_sparse.SparseTensor`
    return value.coo() if hasattr(value, "coo") and hasattr(value, "storage") else (value,)


def parts_of_frame(frame: Any) -> Iterator[Any]:
    """Iterate over the tensors of a `TensorFrame`: columns of one kind are a tensor, values with offsets, or a dict."""
    columns = [*frame.feat_dict.values(), frame.y]
    while columns:
        column = columns.pop()
        if isinstance(column, dict):
            columns += column.values()
        elif hasattr(column, "offset"):
            yield from (column.values, column.offset)
        else:
            yield column


class _Gate:
    """Lock that lets a process fork only while no thread makes a batch.

    Otherwise a child could inherit a lock of a thread that it does not have, or a Numba loop in an undefined state.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: set[int] = set()

    def __enter__(self) -> None:
        with self._changed:
            self._inside.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside.discard(threading.get_ident())
            self._changed.notify_all()

    def before_fork(self) -> None:
        self._changed.acquire()
        while self._inside - {threading.get_ident()}:
            self._changed.wait()

    def after_fork(self) -> None:
        self._changed.release()


FORK_GATE = _Gate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=FORK_GATE.before_fork, after_in_parent=FORK_GATE.after_fork, after_in_child=FORK_GATE.after_fork
    )


class Background:
    """Iterator over batches that threads prepare, `ahead` of the last one handed over.

    Batches come in order; an exception is raised at the turn of its batch. One thread makes a batch with all the cores
    of its user. Several threads make one batch each with a share of the cores, which uses more of them, as the loops of
    a batch are short. The threads end with the last batch, at `close()`, when this object is dropped, or when the
    program ends.

    Args:
        work: (number, work item) of the batches, in order; read in the thread that requests batches.
        make: Makes a batch: (number, work item) -> batch; called in the threads.
        ahead: Batches prepared ahead, at least 1.
        num_threads: Threads that make them; None for one per batch.
    """

    def __init__(self, work: Iterator[Work], make: Callable[[int, Any], Any], ahead: int,
                 num_threads: int | None = None) -> None:  # fmt: skip
        self._work, self._make, self._ahead = work, make, ahead
        self._num_threads = ahead if num_threads is None else num_threads
        self._batches: deque[Future[Any]] = deque()
        self._process = os.getpid()
        self._pool: Pool | None = None
        self._is_closed = False

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        if self._process != os.getpid():
            raise ForkedProcessError(
                f"an iterator of process {self._process} was used in its forked child {os.getpid()}, where its threads "
                "do not run; call iter() on the loader there"
            )
        if self._is_closed:
            raise StopIteration
        try:
            self._start(1)
            if not self._batches:
                raise StopIteration
            # One more during the wait: then `ahead` batches are in work when this one is complete.
            self._start(self._ahead + 1)
            made: tuple[int, Any] = self._batches.popleft().result()
            return made
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start to prepare batches before the first request."""
        self._start(self._ahead)

    def _start(self, count: int) -> None:
        """Start batches until `count` are in work."""
        while len(self._batches) < count:
            try:
                item = next(self._work, None)
            except Exception as error:
                # The batches before it are still handed over.
                self._work = iter(())
                failed: Future[Any] = Future()
                failed.set_exception(error)
                self._batches.append(failed)
                return
            if item is None:
                return
            if self._pool is None:
                self._pool = Pool(self._num_threads, "pyg_direct_batch")
                # Pending batches are dropped with their iterator; running ones end by themselves.
                weakref.finalize(self, self._pool.close, wait=False).atexit = False
                # Numba's number of threads is a setting of each thread.
                self._num_cores = max(1, get_cpu_threads() // self._num_threads)
            self._batches.append(self._pool.submit(_make, self._make, self._num_cores, *item))

    def close(self) -> None:
        """End the threads and drop prepared batches."""
        self._is_closed = True
        had_threads = self._pool is not None and self._process == os.getpid()
        if self._pool is not None and had_threads:
            self._pool.close()
        self._pool, self._work = None, iter(())
        self._batches.clear()
        if had_threads:
            # Arenas of threads keep freed memory for other threads, which may never use it.
            give_back_now_and_then()


def _make(make: Callable[[int, Any], Any], num_cores: int, number: int, item: Any) -> tuple[int, Any]:
    with FORK_GATE:
        before = set_cpu_threads(num_cores)
        try:
            return number, make(number, item)
        finally:
            # It is the caller's thread if no other thread can start.
            set_cpu_threads(before)
