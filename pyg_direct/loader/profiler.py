"""Times of the latest batches of a loader: sampling, fetching, waiting and use.

Recording is off unless `record` of a loader starts it. Then a stage reads the clock twice. On a GPU it also records two
events, which are read for a report, so that the host does not wait for them. Once per epoch the host waits for one
event, on an idle stream, to align the GPU's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from pyg_direct.features.feature import Feature
from pyg_direct.graph.placed_topology import ListReads
from pyg_direct.object_text import one_line, show_count
from pyg_direct.profiling import Origin
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.launch import current_stream

# Stages of a batch. Sampling has two parts: start, and finish once its sizes are known.
START, FINISH, FETCH, WAIT = range(4)
# Names of the ranges in profiles.
RANGES = ("pyg_direct.sample", "pyg_direct.sample", "pyg_direct.fetch", "pyg_direct.wait")
_END = object()


@contextmanager
def ending(batches: Iterator[Any]) -> Iterator[None]:
    """End an iterator with this block.

    A loop that is left early must end its threads. The traceback of an earlier error may still hold the iterator.
    """
    try:
        yield
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


class Stages(NamedTuple):
    """Stages by which a loader makes a batch.

    Attributes:
        submit: Starts to sample: (number, work item) -> pending.
        finish: Waits for the sample: (pending, number) -> sample.
        fetch: Makes the batch: (sample, number, work item) -> batch.
    """

    submit: Callable[..., Any]
    finish: Callable[[Any, int], Any]
    fetch: Callable[..., Any]


class BatchTimes:
    """Times of one batch, nanoseconds of `time.perf_counter_ns`.

    Attributes:
        number: Number of the batch in its epoch; -1 if workers make the batches.
        spans: (begin, end) of each stage on the host; None if it was not observed.
        events: Events of each stage on the GPU; none on a CPU.
        used: Time of the next batch's request; 0 before it.
        origin: Alignment of events to the clock of the host; None on a CPU.
    """

    __slots__ = ("events", "number", "origin", "spans", "used")

    def __init__(self, number: int, origin: Origin | None) -> None:
        self.number, self.origin, self.used = number, origin, 0
        self.spans: list[tuple[int, int] | None] = [None, None, None, None]
        self.events: dict[int, tuple[Any, Any]] = {}


class Recorder:
    """Recorder of the times of a loader's last batches.

    Args:
        nvtx: Push NVTX ranges too, on a GPU.

    Attributes:
        done: Batches that were handed over, oldest first.
        num_batches: Number of all batches handed over so far.
        features: The features of the loader, by name, which count the rows that they serve.
        reads: Reads of sampling from lists in host memory; None if there are none, or if they are not known.
        list_bytes: Bytes of lists that sampling read over the link so far, computed from the samples.
    """

    def __init__(self, last: int, device: torch.device, nvtx: bool = False) -> None:
        self.done: deque[BatchTimes] = deque(maxlen=last)
        self.num_batches = 0
        self.features: dict[str, Feature] = {}
        self.reads: ListReads | None = None
        self.list_bytes = 0
        self.nvtx = nvtx and device.type == "cuda"
        self._index = resolve_device(device).index if device.type == "cuda" else None
        self._spare: list[Any] = []
        # An idle stream, so that its events complete at once.
        self._idle = None if self._index is None else torch.cuda.Stream(self._index)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield f"{show_count(self.num_batches, 'batch', 'batches')} recorded"
        yield f"times of the last {len(self.done)}"

    def begin(self, attributes: Mapping[str, Any], reads: ListReads | None = None) -> EpochRecord:
        """Begin the record of an epoch: new features start to count, and so do reads of lists in host memory
        (`reads`).
        """
        self.reads = reads
        before, self.features = self.features, {k: f for k, f in attributes.items() if isinstance(f, Feature)}
        for name, feature in self.features.items():
            if before.get(name) is not feature:
                feature.count_served()
        return EpochRecord(self, None if self._idle is None else Origin.record(self._idle))

    def stop(self) -> None:
        """Stop counting in the features."""
        for feature in self.features.values():
            feature.count_served(False)

    def keep(self, times: BatchTimes) -> None:
        """Add a batch that is handed over; the oldest one is dropped."""
        if len(self.done) == self.done.maxlen:
            for pair in self.done.popleft().events.values():
                self._spare.extend(pair)
        self.done.append(times)
        self.num_batches += 1

    def count_lists(self, made: Any) -> None:
        """Count the reads of lists for a batch or a group, by the numbers of nodes and edges of its hops on the
        host.
        """
        if self.reads is None:
            return
        for batch in made if isinstance(made, list) else [made]:
            nodes, edges = (getattr(batch, f"num_sampled_{what}", None) for what in ("nodes", "edges"))
            if isinstance(nodes, list) and isinstance(edges, list):
                # Nodes of the last hop are not expanded.
                self.list_bytes += self.reads.sum_bytes(sum(nodes[:-1]), sum(edges))

    def mark(self) -> Any:
        """Record an event on the current stream of the GPU."""
        assert self._index is not None
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(current_stream(self._index))
        return event


class EpochRecord:
    """Record of the times of one epoch's batches; see `Recorder`."""

    def __init__(self, recorder: Recorder, origin: Origin | None) -> None:
        self._recorder, self._origin, self._nvtx = recorder, origin, recorder.nvtx
        # Pending batches, in the order in which they are handed over.
        self._open: dict[int, BatchTimes] = {}

    def follow(self, work: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Iterate over the same work items, and note their order."""
        for item in work:
            self._open[item[0]] = BatchTimes(item[0], self._origin)
            yield item

    def around(self, stages: Stages) -> Stages:
        """Wrap the stages with timers; any thread may call them."""

        def submit(number: int, item: Any) -> Any:
            return self._time(START, number, stages.submit, number, item)

        def finish(pending: Any, number: int) -> Any:
            return self._time(FINISH, number, stages.finish, pending, number)

        def fetch(sample: Any, number: int, *item: Any) -> Any:
            made = self._time(FETCH, number, stages.fetch, sample, number, *item)
            self._recorder.count_lists(made)
            return made

        return Stages(submit, finish, fetch)

    def _time(self, stage: int, number: int, call: Callable[..., Any], *args: Any) -> Any:
        times = self._open.get(number)
        if times is None:
            return call(*args)
        has_range = self._nvtx or profiler._is_profiler_enabled
        noted = self._enter(stage) if has_range else None
        begin = perf_counter_ns()
        first = self._recorder.mark() if self._origin is not None and stage != FINISH else None
        try:
            return call(*args)
        finally:
            times.spans[stage] = begin, perf_counter_ns()
            if first is not None:
                times.events[stage] = first, self._recorder.mark()
            if has_range:
                self._leave(noted)

    def hand_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Iterate over the same batches, and note the time of waiting and use."""
        times = None
        with ending(batches):
            while True:
                noted = self._enter(WAIT)
                begin = perf_counter_ns()
                first = None if self._origin is None else self._recorder.mark()
                if times is not None:
                    times.used = begin
                try:
                    batch = next(batches, _END)
                finally:
                    end = perf_counter_ns()
                    last = None if first is None else self._recorder.mark()
                    self._leave(noted)
                if batch is _END:
                    return
                times = self._close()
                times.spans[WAIT] = begin, end
                if first is not None:
                    times.events[WAIT] = first, last
                self._recorder.keep(times)
                yield batch
                # Released while the next one is made.
                del batch

    def _close(self) -> BatchTimes:
        number = next(iter(self._open), None)
        return BatchTimes(-1, self._origin) if number is None else self._open.pop(number)

    def _enter(self, stage: int) -> Any:
        """Begin a range in a running `torch.profiler`, and in NVTX if requested."""
        if self._nvtx:
            torch.cuda.nvtx.range_push(RANGES[stage])
        if not profiler._is_profiler_enabled:
            return None
        noted = profiler.record_function(RANGES[stage])
        noted.__enter__()
        return noted

    def _leave(self, noted: Any) -> None:
        if noted is not None:
            noted.__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
