"""Captured plans: a batch as one captured graph over buffers of fixed capacity, with one wait for its sizes.

Counts stay on the device, and writes are checked against the capacity. A batch that needs more says so in its state.
It is sampled again, under the same key, by a larger plan. So a result never depends on the capacity. Two batches may
run at once, so that the GPU samples the next one while the host reads the sizes of the last.

`CapturedPlan` keeps the slots of batches, and captures and replays their graphs. A plan derived from it gives the
kernels to capture and the way out of a batch. One budget of GPU memory serves the plans of a process: the least
recently used plan gives its buffers back (`make_room`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.errors import MemoryLimitError, PlacementWarning, warn
from pyg_direct.runtime.cuda.device import tolerate_captures
from pyg_direct.runtime.cuda.graph_capture import CapturedGraph
from pyg_direct.runtime.cuda.launch import current_stream, is_current, kept_stream, set_stream
from pyg_direct.runtime.host.tensor_views import ordinary_tensors


class Slot:
    """Arrays of fixed capacity that hold one batch, and the graph that fills them.

    Attributes:
        sized, exported: Events after the graph, and after the batch has left for tensors of its own.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.index = device.index
        self.graph: CapturedGraph | None = None
        self.sized = torch.cuda.Event() if on_gpu else None
        self.exported = torch.cuda.Event() if on_gpu else None
        self._exported_on: int | None = None

    def wait(self, stream: int) -> None:
        """Let `stream`, the current one, come after the export of the batch before."""
        if self._exported_on is not None and self._exported_on != stream:
            assert self.exported is not None
            current_stream(self.index).wait_event(self.exported)

    def note_export(self) -> None:
        """Remember that the batch leaves on the current stream."""
        if self.exported is not None:
            stream = current_stream(self.index)
            self.exported.record(stream)
            self._exported_on = stream.cuda_stream

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        # Names are given: as the interpreter ends, names of modules are gone before objects are.
        # The graph reads and writes page-locked memory that the allocator would hand on at once: a batch that nobody
        # waited for must be over first.
        for event in (getattr(self, "sized", None), getattr(self, "exported", None)):
            if event is not None:
                with suppress(Exception), tolerate_captures():
                    event.synchronize()

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return count_bytes(self)


def count_bytes(holder: object) -> int:
    """Bytes of GPU memory of the tensors that are attributes of an object."""
    return sum(
        t.numel() * t.element_size() for t in vars(holder).values() if isinstance(t, Tensor) and not t.is_pinned()
    )


class Scratch:
    """Memory by the number of nodes, used by the batches of all plans of a topology, one after the other."""

    def __init__(self) -> None:
        # Plans of several threads take turns, and batches of several streams wait for each other.
        self.lock = threading.RLock()
        self._last: tuple[int, torch.cuda.Event] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return count_bytes(self)

    def wait(self, stream: int) -> None:
        """Let `stream`, the current one, come after the last batch."""
        if self._last is not None and self._last[0] != stream:
            self._last[1].wait()

    def note(self, stream: int, done: torch.cuda.Event) -> None:
        """Remember the last batch."""
        self._last = stream, done


# Share of a GPU's memory for buffers of plans; a plan that needs more than all of it still gets it.
_SHARE = 1 / 16


class Holder(Protocol):
    """A plan, as the budget sees it."""

    @property
    def num_bytes(self) -> int:
        """Bytes it holds."""

    def release(self) -> bool:
        """Give the buffers back, unless a batch is on its way in them; they are made again when needed."""


_HOLDERS: OrderedDict[int, weakref.ref[Holder]] = OrderedDict()


def touch(holder: Holder) -> None:
    """Note that a plan is used now."""
    number = id(holder)
    if number in _HOLDERS:
        _HOLDERS.move_to_end(number)
    else:
        # Bound to the table: as the interpreter ends, names of this module are gone before plans are.
        _HOLDERS[number] = weakref.ref(holder, partial(_HOLDERS.pop, number))


def make_room(num_bytes: int, holder: Holder, device: torch.device, *, all_of_it: bool = False) -> None:
    """Let other plans give buffers back until `num_bytes` more fit the budget, or all of them (`all_of_it`)."""
    limit = 0 if all_of_it else int(_SHARE * torch.cuda.get_device_properties(device).total_memory)
    plans = [plan for plan in (ref() for ref in list(_HOLDERS.values())) if plan is not None]
    held = sum(plan.num_bytes for plan in plans) + num_bytes
    for plan in plans:
        if held <= limit:
            return
        if plan is not holder:
            before = plan.num_bytes
            held -= before if plan.release() else 0


class Pending:
    """A batch on its way: enqueued, its sizes not yet read.

    Attributes:
        seeds: Seeds to sample around, in the form of its plan.
        key: Key of its draws, in the form of its plan.
        stream: The stream that it was enqueued on; None on a CPU.
    """

    def __init__(self, plan: CapturedPlan, seeds: Any, key: Any) -> None:
        self._plan, self.seeds, self.key = plan, seeds, key
        # Any thread may finish it, and reads it on the stream it was enqueued on: there its user expects the result, if
        # nothing else is set here.
        device = plan.topology.device
        self.stream = None if device.type == "cpu" else current_stream(device.index)
        self._slot: Any = None
        self._result: Any = None
        self._error: Exception | None = None

    def finish(self) -> Any:
        """Wait for the sizes and write the batch into tensors of its own, on the stream it was enqueued on.

        Raises:
            IdError: a seed on the GPU lies outside the graph.
            MemoryLimitError: the batch does not fit GPU memory.
        """
        if self._result is None and self._error is None:
            self._plan.finish(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Finished:
    """A result that was not waited for because it is there already, in the form of one on its way."""

    # Of the GPU on which it would still be on its way.
    stream = None

    def __init__(self, result: Any) -> None:
        self._result = result

    def finish(self) -> Any:
        """Return the result."""
        return self._result


class PendingList:
    """Results on their way one after the other.

    Args:
        pending: At least one, in the order in which they were enqueued, on one stream.
    """

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    @property
    def stream(self) -> Any:
        """The stream that `finish` is called on."""
        return self._pending[-1].stream

    @stream.setter
    def stream(self, stream: Any) -> None:
        for pending in self._pending:
            pending.stream = stream

    def finish(self) -> list[Any]:
        """Wait for all results."""
        return [pending.finish() for pending in self._pending]


class PendingOutput:
    """Output made of a result on its way, once this result is there.

    Args:
        pending: The result; another output on its way adds its steps to this one's.
        make: The step that makes the output of the result.
    """

    _pending: Pending | PendingList | Finished
    _steps: tuple[Callable[[Any], Any], ...]

    def __init__(self, pending: Pending | PendingList | PendingOutput | Finished, make: Callable[[Any], Any]) -> None:
        # Not one in the other: the loader asks for the stream, and each level would pass this on.
        if isinstance(pending, PendingOutput):
            self._pending, self._steps = pending._pending, (*pending._steps, make)
        else:
            self._pending, self._steps = pending, (make,)

    @property
    def stream(self) -> Any:
        """The stream that `finish` is called on; None if nothing is waited for."""
        return self._pending.stream

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._pending.stream = stream

    def finish(self) -> Any:
        """Wait for the result and make the output, once."""
        made = self._pending.finish()
        for make in self._steps:
            made = make(made)
        return made


def is_on_its_way(pending: Any) -> bool:
    """Report whether a GPU is still sampling the result of `finish` of an object."""
    return isinstance(pending, (Pending, PendingOutput)) and pending.stream is not None


class CapturedPlan:
    """Plan that samples batches on one GPU. Two may be on their way at a time: a third one finishes the first.

    A derived plan finds the slot that a batch needs (`_find_capacity`, `_has_room`) and allocates it
    (`_allocate_slot`). It enqueues the kernels of a batch (`_enqueue`), writes its seeds (`_write_inbox`) and reads it
    (`_read_slot`).
    """

    topology: Any
    # Otherwise kernels are enqueued one by one, as the simulator runs them.
    _is_captured = not SIMULATED

    def __init__(self) -> None:
        self.num_captures = 0
        self._scratch: Any = None
        self._slots: list[Any] = []
        self._most_slots = 2
        self._pending: deque[Pending] = deque()
        self._lock = threading.RLock()

    @property
    def num_bytes(self) -> int:
        """Bytes of GPU memory held by the plan, without the scratch it shares with other plans of its topology."""
        return sum(slot.num_bytes for slot in self._slots)

    @property
    def num_scratch_bytes(self) -> int:
        """Bytes of GPU memory of that scratch."""
        return 0 if self._scratch is None else self._scratch.num_bytes

    def release(self) -> bool:
        """Give the buffers back, unless a batch is on its way in them; they are made again when needed."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._pending:
                return False
            self._slots.clear()
            return True
        finally:
            self._lock.release()

    def finish(self, pending: Pending) -> None:
        """Give a batch on its way its result, or its error."""
        with self._lock:
            if pending._result is not None or pending._error is not None:
                return
            try:
                if pending.stream is None or is_current(pending.stream):
                    pending._result = self._read(pending)
                else:
                    with kept_stream(pending.stream.device_index):
                        set_stream(pending.stream)
                        pending._result = self._read(pending)
            except Exception as error:
                pending._error = error
            finally:
                self._pending.remove(pending)

    def _submit(self, pending: Pending) -> Pending:
        with self._lock:
            touch(self)
            pending._slot = self._claim_slot(pending)
            self._pending.append(pending)
            try:
                self._enqueue_batch(pending)
            except BaseException:
                self._pending.remove(pending)
                raise
        return pending

    def _claim_slot(self, pending: Pending) -> Any:
        """Claim a slot without a batch on its way, large enough for the seeds."""
        busy, idle = [other._slot for other in self._pending], None
        for slot in self._slots:
            if slot not in busy:
                idle = slot
                break
        if idle is None and len(self._slots) >= self._most_slots:
            oldest = self._pending[0]
            self.finish(oldest)
            idle = oldest._slot
        elif idle is None and self._slots:
            try:
                return self._make_slot(None, self._find_capacity(None, pending))
            except MemoryLimitError:
                self._most_slots = 1
                warn(
                    "no GPU memory is left to sample one batch ahead; batches are sampled one by one", PlacementWarning
                )
                return self._claim_slot(pending)
        if idle is None or idle not in self._slots or not self._has_room(idle, pending):
            return self._make_slot(idle, self._find_capacity(idle, pending))
        return idle

    @ordinary_tensors()
    def _make_slot(self, before: Any, capacity: Any) -> Any:
        """Make a slot of a capacity instead of `before`, whose batch is over."""
        if before is not None:
            if before in self._slots:
                self._slots.remove(before)
            del before
        if self._scratch is None:
            self._scratch = self._find_scratch()
        slot = self._allocate(capacity)
        if self._is_captured:
            index = self.topology.device.index
            # Compile and load before the capture, in which nothing may be loaded; without seeds, so that nothing
            # changes in the scratch.
            with torch.cuda.device(index), self._scratch.lock:
                stream = torch._C._cuda_getCurrentRawStream(index)
                self._scratch.wait(stream)
                self._enqueue_once(slot, stream)
                torch.cuda.current_stream(index).synchronize()
            self._capture(slot, index)
        self._slots.append(slot)
        self.num_captures += 1
        return slot

    def _allocate(self, capacity: Any) -> Any:
        device = self.topology.device
        if device.type == "cuda":
            make_room(self._count_slot_bytes(capacity), self, device)
        try:
            return self._allocate_slot(capacity)
        except torch.OutOfMemoryError:
            make_room(0, self, device, all_of_it=True)
        try:
            return self._allocate_slot(capacity)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"a plan for {capacity[0]} seeds and {capacity[1]} edges must fit free GPU memory; use fewer seeds or "
                f"smaller fanouts: {error}"
            ) from error

    def _enqueue_batch(self, pending: Pending) -> None:
        slot = pending._slot
        if slot.sized is None:
            self._write_inbox(slot, pending)
            self._enqueue(slot, 0)
            self._end_batch(slot, 0)
            return
        index = self.topology.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        slot.wait(stream)
        self._write_inbox(slot, pending)
        with self._scratch.lock:
            self._scratch.wait(stream)
            if slot.graph is None:
                self._enqueue(slot, stream)
            else:
                slot.graph.replay(stream)
            self._end_batch(slot, stream)
            self._scratch.note(stream, slot.sized)

    def _read(self, pending: Pending) -> Any:
        while True:
            slot = pending._slot
            if slot.sized is not None:
                self._wait(slot.sized)
            larger = self._find_larger(slot, pending)
            if larger is None:
                result = self._export(slot, pending)
                slot.note_export()
                return result
            pending._slot = self._make_slot(slot, larger)
            self._enqueue_batch(pending)

    def _wait(self, sized: torch.cuda.Event) -> None:
        """Wait for the sizes of a batch, the one wait that it has; other threads run meanwhile."""
        sized.synchronize()

    def _capture(self, slot: Any, index: int) -> None:
        """Capture the graph of a slot on GPU `index`."""
        slot.graph = CapturedGraph(lambda stream: self._enqueue(slot, stream), index)

    def _end_batch(self, slot: Any, stream: int) -> None:
        """Record the event behind a batch that was enqueued on `stream`, the current one."""
        if slot.sized is not None:
            slot.sized.record(current_stream(slot.index))

    def _enqueue_once(self, slot: Any, stream: int) -> None:
        """Enqueue all kernels without seeds, so that they are compiled and loaded."""
        self._enqueue(slot, stream)

    def _find_scratch(self) -> Any:
        """Find the scratch that plans of the topology share."""
        raise NotImplementedError

    def _find_capacity(self, before: Any, pending: Pending) -> Any:
        """Find a first capacity for a batch: (seeds, edges, ...), at least the capacity of the slot before."""
        raise NotImplementedError

    def _has_room(self, slot: Any, pending: Pending) -> bool:
        """Report whether a slot has room for the seeds of a batch."""
        raise NotImplementedError

    def _count_slot_bytes(self, capacity: Any) -> int:
        """Estimate the bytes that a slot of a capacity takes."""
        raise NotImplementedError

    def _allocate_slot(self, capacity: Any) -> Any:
        """Allocate a slot of a capacity, without a graph."""
        raise NotImplementedError

    def _write_inbox(self, slot: Any, pending: Pending) -> None:
        """Write key and seeds of a batch to the words that the kernels read."""
        raise NotImplementedError

    def _enqueue(self, slot: Any, stream: int) -> None:
        """Enqueue all kernels of a batch, in order; the plan captures them."""
        raise NotImplementedError

    def _find_larger(self, slot: Any, pending: Pending) -> Any:
        """Find the capacity for a batch that did not fit its slot; return None if the batch did fit.

        Raises:
            IdError: a seed lies outside the graph.
        """
        raise NotImplementedError

    def _export(self, slot: Any, pending: Pending) -> Any:
        """Copy the batch into tensors of its own."""
        raise NotImplementedError
