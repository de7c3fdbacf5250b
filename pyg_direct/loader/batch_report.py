"""Report of a loader's latest batches: their times, and the sources of their rows.

Times of a batch are those of sampling, fetching, waiting and use. Recording is off unless `record` of a loader starts
it. Then a stage reads the clock twice. On a GPU it also records two events, which are read for a report, so that the
host does not wait for them. Once per epoch the host waits for one event, on an idle stream, to align the GPU's clock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, overload
from weakref import WeakSet

import torch
from torch.autograd import profiler

from pyg_direct.features.feature import Feature
from pyg_direct.features.tier_report import LINKS, TIER_COLORS, TIER_HEADS, Report, list_tiers, tabulate_tiers
from pyg_direct.graph.placed_topology import ListReads
from pyg_direct.object_text import flatten, one_line, show_count, show_table
from pyg_direct.ops.argument_checks import check_choice, check_count
from pyg_direct.profiling import Origin, draw_shares, draw_spans, open_picture, quantile, show_bytes, show_seconds
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.launch import current_stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pyg_direct.features.range_reader import DiskReads

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


# Lanes of the time line, in the order in which a batch passes them, with their colors in a picture.
LANES = {"sample": "#2b6cb0", "fetch": "#63b3ed", "wait": "#c53030", "train": "#9aa5b1"}
_PARTS = {START: "sample", FINISH: "sample", FETCH: "fetch", WAIT: "wait"}
# Batches in a picture.
_DRAWN = 20
_LINE = "{:<32} {:>9} {:>9} {:>9} {:>9} {:>7}"


class Span(NamedTuple):
    """Interval of a batch, in seconds from the start of a report.

    Attributes:
        lane: `sample`, `fetch`, `wait` (from the request of the batch until it was ready) or `train` (from then until
            the next request).
        where: `host`, or `GPU`: from the first to the last kernel of a stage there.
        batch: Index in the report, from 0.
        begin, end: Seconds.
    """

    lane: str
    where: str
    batch: int
    begin: float
    end: float


class LoaderReport(NamedTuple):
    """Report of the last batches of a loader; `print` shows a table.

    Attributes:
        places: Memory of the topology and of each attribute, one line each.
        num_batches: Batches handed over since `record`; 0 without it.
        num_timed: The last of them, whose times are here.
        spans: Their time line.
        features: Rows served by each tier of each attribute, by name; empty without `record`.
        list_bytes: Bytes of the topology that sampling read over PCIe since `record`, computed from the samples. Each
            drawn edge counts its neighbor, and its id if that is not its position; each expanded node counts its two
            offsets. Only lists in host memory count. Supported are uniform batches of `NeighborLoader` on graphs
            without types, and of `LinkNeighborLoader` if one plan makes them. Other batches and loaders, batches of
            worker processes, and lists that GPUs share over NVLink count 0. The rest of a memory sector of 32 bytes
            does not count, nor do repeated reads of kernels.
        disk: Reads of files for planned batches, since the loader was made (`ahead` of `NeighborLoader`).
        list_bytes_are_most: True if some lists are cached in GPU memory; draws from the cache are in `list_bytes` too.
    """

    places: Sequence[str]
    num_batches: int
    num_timed: int
    spans: Sequence[Span]
    features: Mapping[str, Report]
    list_bytes: int = 0
    list_bytes_are_most: bool = False
    disk: Sequence[DiskReads] = ()

    def seconds(self, lane: str, where: str = "host") -> list[float]:
        """List the seconds of each batch in this lane, in order."""
        sums: dict[int, float] = {}
        for span in self.spans:
            if (span.lane, span.where) == (lane, where):
                sums[span.batch] = sums.get(span.batch, 0.0) + span.end - span.begin
        return [sums[batch] for batch in sorted(sums)]

    def link_bytes(self, link: str) -> int:
        """Count the bytes of rows read over `PCIe` or `NVLink` since `record`; `list_bytes` counts the topology.

        Raises:
            ArgumentError: another link.
        """
        check_choice("link", link, LINKS)
        return sum(report.link_bytes(link) for report in self.features.values())

    def to_dict(self) -> dict[str, int | float]:
        """Return the numbers of the report by flat names, for loggers of metrics and `json.dumps`.

        Names are `num_batches` and `num_timed`; `seconds/host/wait/p50` and others of each place, lane and quantile,
        and `sum`; `bytes/PCIe`, `bytes/NVLink` and `bytes/neighbor_lists`; `features/x/num_read` of each
        attribute, with `num_rows` and `num_read` of its tiers; and `disk/FILE/num_pages` and others of `DiskReads`.

        Example:
            Weights & Biases takes all numbers of an epoch at once::

                wandb.log(loader.tell().to_dict(), step=epoch)

            TensorBoard takes one number at a time::

                for name, number in loader.tell().to_dict().items():
                    writer.add_scalar(name, number, epoch)
        """
        seconds: dict[str, dict[str, Any]] = {}
        for where, lane, times in self._sum_up_times():
            seconds.setdefault(where, {})[lane] = times
        return flatten({
            "num_batches": self.num_batches, "num_timed": self.num_timed, "seconds": seconds,
            "bytes": {**{link: self.link_bytes(link) for link in LINKS}, "neighbor_lists": self.list_bytes},
            "features": {name: report.to_dict() for name, report in self.features.items()},
            "disk": {reads.path: reads.to_dict() for reads in self.disk},
        })  # fmt: skip

    def to_tree(self) -> dict[str, Any]:
        """Convert the report to values that `json.dumps` accepts.

        Attributes are listed by name. `seconds` has quantiles and the sum of each lane and place, `link_bytes` the
        bytes over each link.
        """
        seconds = [{"where": where, "lane": lane, **times} for where, lane, times in self._sum_up_times()]
        return {"places": list(self.places), "num_batches": self.num_batches, "num_timed": self.num_timed,
                "seconds": seconds, "spans": [span._asdict() for span in self.spans],
                "features": {name: report.to_tree() for name, report in self.features.items()},
                "link_bytes": {link: self.link_bytes(link) for link in LINKS}, "list_bytes": self.list_bytes,
                "list_bytes_are_most": self.list_bytes_are_most,
                "disk": [{"path": reads.path, **reads.to_dict()} for reads in self.disk]}  # fmt: skip

    def __repr__(self) -> str:
        # All spans of some hundred batches would fill pages.
        features = list(self.features)
        return (f"{type(self).__name__}(num_batches={self.num_batches}, num_timed={self.num_timed}, "
                f"spans=<{len(self.spans)}>, {features=}, list_bytes={self.list_bytes})")  # fmt: skip

    def _repr_html_(self) -> str:
        tables = [show_table("where it lies", [[place] for place in self.places])]
        if self.num_timed > 0:
            heads, *times = self._tabulate_times()
            tables.append(show_table("times", times, heads))
        if self.features:
            tables.append(show_table("tiers", tabulate_tiers(self.features), TIER_HEADS))
        if self.num_batches > 0:
            tables.append(show_table("links", [[line] for line in self._list_bytes()]))
        return "".join(tables)

    def __str__(self) -> str:
        lines = [*self.places, *map(str, self.disk)]
        if self.num_timed == 0:
            return "\n".join([*lines, "no batches were recorded: call record() before an epoch"])
        lines += [_LINE.format(*cells) for cells in self._tabulate_times()]
        if self.features:
            lines += list_tiers(self.features)
        return "\n".join([*lines, *self._list_bytes()])

    def _list_bytes(self) -> list[str]:
        """List the bytes over each link, one line each."""
        counts = {f"rows over {link}": self.link_bytes(link) for link in LINKS}
        most = ", at most" if self.list_bytes_are_most else ""
        counts[f"neighbor lists over PCIe, by what was sampled{most}"] = self.list_bytes
        return [f"{what}: {show_bytes(count)}, {show_bytes(count / self.num_batches)} a batch"
                for what, count in counts.items() if count > 0]  # fmt: skip

    def _tabulate_times(self) -> list[tuple[str, ...]]:
        """Return the cells of the table of times, titles first."""
        titles = f"last {self.num_timed:,} of {self.num_batches:,} batches", "p20", "p50", "p80", "in all", "share"
        rows: list[tuple[str, ...]] = [titles]
        for where, lane, times in self._sum_up_times():
            whole = sum(self.seconds("wait", where)) + sum(self.seconds("train", where))
            share = times["sum"] / max(whole, 1e-9)
            rows.append((f"{where}: {lane}", *map(show_seconds, times.values()), f"{share:.1%}"))
        return rows

    def _sum_up_times(self) -> list[tuple[str, str, dict[str, float]]]:
        """Sum up times: (place, lane, seconds) of each lane that occurs, as quantiles over batches, and the sum."""
        found = []
        for where in ("host", "GPU"):
            for lane in LANES:
                seconds = self.seconds(lane, where)
                if seconds:
                    times = {f"p{share}": quantile(seconds, share / 100) for share in (20, 50, 80)}
                    found.append((where, lane, {**times, "sum": sum(seconds)}))
        return found

    @overload
    def draw(self, path: None = None) -> Figure: ...

    @overload
    def draw(self, path: str | os.PathLike[str]) -> Path: ...

    def draw(self, path: str | os.PathLike[str] | None = None) -> Path | Figure:
        """Draw the time line of the latest batches and the tiers (needs the extra `bench`).

        Args:
            path: File of the picture; None saves none.

        Returns:
            The path, or without one the figure, which notebooks show.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        served = {f"{name}: rows read": [(tier.name, tier.num_read or 0) for tier in report.tiers]
                  for name, report in self.features.items() if report.num_read > 0}  # fmt: skip
        heights = [3.0, 0.8 + 0.35 * len(served)][: 1 + bool(served)]
        with open_picture(path, len(heights), figsize=(9, sum(heights)), squeeze=False, height_ratios=heights) as drawn:
            figure, parts = drawn
            self._draw_times(parts[0, 0])
            if served:
                draw_shares(parts[1, 0], served, TIER_COLORS)
            figure.suptitle("; ".join(self._list_bytes()), fontsize=8)
        return figure if path is None else Path(path)

    def _draw_times(self, axes: Axes) -> None:
        spans = [span for span in self.spans if span.batch >= self.num_timed - _DRAWN]
        first = min((span.begin for span in spans), default=0.0)
        rows = {f"{where}: {lane}": (color, [(span.begin - first, span.end - first) for span in spans
                                             if (span.where, span.lane) == (where, lane)])
                for where in ("host", "GPU") for lane, color in LANES.items()}  # fmt: skip
        met = {name: row for name, row in rows.items() if row[1]}
        draw_spans(axes, met, edgecolor="white", linewidth=0.5)
        axes.set_xlabel(f"ms; the last {min(self.num_timed, _DRAWN)} batches of {self.num_batches:,}")


def read_spans(batches: Sequence[BatchTimes]) -> list[Span]:
    """Read the time line of batches, oldest first; waits for the GPU if there are events."""
    spans = []
    for place, times in enumerate(batches):
        for stage, span in enumerate(times.spans):
            if span is not None:
                spans.append((_PARTS[stage], "host", place, *span))
        waited = times.spans[WAIT]
        if times.used > 0 and waited is not None:
            spans.append(("train", "host", place, waited[1], times.used))
    latest: dict[int, tuple[int, int]] = {}
    for place, times in enumerate(batches):
        if times.origin is None:
            continue
        for stage, pair in times.events.items():
            pair[1].synchronize()
            begin, end = (times.origin.locate(mark) for mark in pair)
            spans.append((_PARTS[stage], "GPU", place, begin, end))
            if stage == WAIT:
                # The previous batch of the epoch was used until this one was requested.
                epoch = id(times.origin.event)
                if epoch in latest:
                    before, since = latest[epoch]
                    spans.append(("train", "GPU", before, since, begin))
                latest[epoch] = place, end
    first = min((begin for _, _, _, begin, _ in spans), default=0)
    return [Span(lane, where, place, (begin - first) / 1e9, (end - first) / 1e9)
            for lane, where, place, begin, end in spans]  # fmt: skip


class _All:
    """Record that loaders keep without a call of `record`: its number of batches, None for none, and these loaders."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.loaders: WeakSet[ReportedLoader] = WeakSet()


_ALL = _All()


def record_all(last: int | None) -> None:
    """Make each loader of this process record from its next epoch on, for frameworks that make loaders themselves.

    Args:
        last: Batches whose times are kept; None stops the records that this function started.
    """
    _ALL.last = last
    while last is None and _ALL.loaders:
        _ALL.loaders.pop().record(False)


class ReportedLoader:
    """Base of loaders with a report."""

    device: torch.device
    _recorder: Recorder | None = None

    def record(self, on: bool = True, last: int = 256, *, nvtx: bool = False) -> None:
        """Start or stop recording, from the next epoch on: times of each batch, and rows served by each tier of the
        features, from zero.

        `report` shows the result. Meanwhile `torch.profiler` shows the ranges `pyg_direct.sample`, `pyg_direct.fetch`
        and `pyg_direct.wait` of the threads that it profiles. On a GPU a batch takes six more events, the counts of
        `Feature.count_served`, and no wait. Loaders of the same tensors share features, and their counts. Batches that
        are sampled or fetched together (`super_batch`) are timed as one, with the first of them.

        Args:
            on: False to stop; the report then has no recorded batches.
            last: Batches whose times are kept, at least 1.
            nvtx: On a GPU, push the ranges to NVTX too, for Nsight Systems.

        Raises:
            ArgumentError: named argument, rule and value.
        """
        check_count("last", last)
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder = Recorder(last, self.device, nvtx) if on else None

    def _begin_record(self) -> EpochRecord | None:
        """Begin the record of the next epoch, if recording is on."""
        if self._recorder is None and _ALL.last is not None:
            self.record(last=_ALL.last)
            _ALL.loaders.add(self)
        return None if self._recorder is None else self._recorder.begin(self._list_places()[1], self._find_reads())

    def report(self, picture: str | os.PathLike[str] | None = None) -> LoaderReport:
        """Print and return the memory of each part and, after `record`, the times of the last batches. Waits for the
        GPU.

        Args:
            picture: Also draw a picture into this file, such as `batches.png` (needs the extra `bench`).
        """
        found = self.tell()
        print(found)
        if picture is not None:
            found.draw(picture)
        return found

    def tell(self) -> LoaderReport:
        """Return the report without printing it. Waits for the GPU."""
        lines, attributes = self._list_places()
        places = [*lines, *(f"{name}: {feature}" for name, feature in attributes.items())]
        found = LoaderReport(places, 0, 0, [], {}, disk=self._list_disk_reads())
        if self._recorder is not None:
            batches = list(self._recorder.done)
            served = {name: feature.tell() for name, feature in self._recorder.features.items()}
            reads = self._recorder.reads
            found = LoaderReport(places, self._recorder.num_batches, len(batches), read_spans(batches), served,
                                 self._recorder.list_bytes, reads is not None and reads.is_most,
                                 found.disk)  # fmt: skip
        return found

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        """List (lines about the topology, memory of each attribute by name)."""
        raise NotImplementedError

    def _list_disk_reads(self) -> Sequence[DiskReads]:
        """List the reads of files for planned batches."""
        return ()

    def _find_reads(self) -> ListReads | None:
        """Find the reads of lists in host memory; None if there are none, or if their number differs from the draws."""
        return None
