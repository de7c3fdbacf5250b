"""Profiling tools that all rooms share. They hold clocks, spans of lanes on the host and on a GPU, quantiles, texts for
bytes and seconds, and pictures.

`time_call` and `time_on_stream` time work once, by the host's clock and between events of a GPU. `Origin` ties the two
clocks. `LaneSpans` records named spans. matplotlib (extra `bench`) is imported only when a picture is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from pyg_direct.errors import needs_extra
from pyg_direct.object_text import one_line, show_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Dots of a picture in an inch.
_DPI = 110


def time_call(work: Callable[[], object], device: torch.device | None = None) -> float:
    """Measure the seconds of a call by the host's clock.

    Args:
        device: A GPU, which is synchronized before and after; a CPU and None wait for nothing.
    """
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    begin = perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize(device)
    return perf_counter() - begin


def time_on_stream(work: Callable[[], object], count: int = 1) -> float:
    """Measure the mean seconds of `count` calls on the GPU's current stream; waits for their end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


class Origin(NamedTuple):
    """A moment on both clocks.

    Attributes:
        event: The event of a GPU; None on a CPU.
        at: Nanoseconds of `time.perf_counter_ns` when the host saw that it had passed.
    """

    event: Any
    at: int

    @classmethod
    def record(cls, stream: Any) -> Origin:
        """Record a moment on a stream, which should be idle: the host waits for it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        # After it has passed: GPU work then appears some microseconds late rather than before its launch.
        event.synchronize()
        return cls(event, perf_counter_ns())

    def locate(self, moment: Any) -> int:
        """Return nanoseconds on the host's clock of an event that has passed; a moment on this clock stays as it is."""
        if isinstance(moment, int):
            return moment
        return self.at + round(1e6 * self.event.elapsed_time(moment))


class LaneSpans:
    """Records spans of named lanes, which on a GPU are spans of its streams unless the host's clock is asked for.

    Args:
        lanes: Names of all lanes, with their colors; a picture shows them from top to bottom.
    """

    def __init__(self, device: torch.device, lanes: Mapping[str, str]) -> None:
        self._device, self._lanes, self._on_gpu = device, lanes, device.type == "cuda"
        # Lane, begin and end: events of the GPU, or nanoseconds of the host.
        self._spans: list[tuple[str, Any, Any]] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
            self._origin = Origin.record(torch.cuda.current_stream(device))
        else:
            self._origin = Origin(None, perf_counter_ns())

    @one_line
    def __repr__(self) -> Iterator[str]:
        # The table of `print` waits for the GPU.
        yield show_count(self.count, "span")
        yield str(self._device)

    def _mark(self, on_gpu: bool) -> Any:
        if not on_gpu:
            return perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        # Of this GPU, which need not be the current one.
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def span(self, lane: str, on_host: bool = False) -> Iterator[None]:
        """Record the time span of the block, on torch's current stream if there is a GPU."""
        on_gpu = self._on_gpu and not on_host
        begin = self._mark(on_gpu)
        try:
            yield
        finally:
            self._spans.append((lane, begin, self._mark(on_gpu)))

    @property
    def count(self) -> int:
        """Spans so far."""
        return len(self._spans)

    def spans(self) -> list[tuple[str, float, float]]:
        """Return (lane, begin, end) of each, in seconds since the recorder was made; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return [(lane, self._since(begin), self._since(end)) for lane, begin, end in list(self._spans)]

    def _since(self, moment: Any) -> float:
        return (self._origin.locate(moment) - self._origin.at) / 1e9

    def seconds(self) -> dict[str, float]:
        """Return seconds of each lane in all."""
        return sum_lanes(self.spans(), self._lanes)

    def __str__(self) -> str:
        return "\n".join(f"{lane}: {1e3 * seconds:.3f} ms" for lane, seconds in self.seconds().items() if seconds)

    @overload
    def draw(self, path: None = None) -> Figure: ...

    @overload
    def draw(self, path: str | os.PathLike[str]) -> Path: ...

    def draw(self, path: str | os.PathLike[str] | None = None) -> Path | Figure:
        """Draw a bar for each span (needs the extra `bench`).

        Args:
            path: File of the picture; None saves none.

        Returns:
            The path, or without one the figure, which notebooks show.
        """
        spans = self.spans()
        rows = {lane: (color, [(begin, end) for name, begin, end in spans if name == lane])
                for lane, color in self._lanes.items()}  # fmt: skip
        with open_picture(path, figsize=(9, 2.6)) as (figure, axes):
            draw_spans(axes, rows)
            axes.set_xlabel("ms")
        return figure if path is None else Path(path)


def trace(spans: LaneSpans | None, lane: str, on_host: bool = False) -> AbstractContextManager[None]:
    """Return a span of a recorder, or a context without effect if `spans` is None."""
    return nullcontext() if spans is None else spans.span(lane, on_host)


def sum_lanes(spans: Iterable[tuple[str, float, float]], lanes: Iterable[str]) -> dict[str, float]:
    """Return seconds of each lane in all, 0 for one without spans."""
    seconds = dict.fromkeys(lanes, 0.0)
    for lane, begin, end in spans:
        seconds[lane] += end - begin
    return seconds


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the others lies below, the nearest one by rank; `values` has at least one."""
    return sorted(values)[round(share * (len(values) - 1))]


def show_bytes(num_bytes: float) -> str:
    """Return bytes in the largest unit that gives at least 1, such as `9.5 GB`."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.4g} B"


def show_seconds(seconds: float) -> str:
    """Return seconds in the largest unit that gives at least 1, such as `2.5 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


@contextmanager
def open_picture(path: str | os.PathLike[str] | None, rows: int = 1, columns: int = 1, *,
                 figsize: tuple[float, float] | None = None, **options: Any) -> Iterator[tuple[Any, Any]]:  # fmt: skip
    """Open a figure and its axes to draw on in the block, at the end of which the figure is saved.

    Args:
        path: File of the picture, with the ending of its format; None saves nothing.
        figsize: Width and height in inches; None takes matplotlib's.
    """
    with needs_extra("a picture", "bench"):
        import matplotlib  # noqa: F401
        from matplotlib.figure import Figure

    # pyplot would keep the figure, and change the backend of the program's own figures.
    figure = Figure(figsize=figsize, layout="constrained")
    yield figure, figure.subplots(rows, columns, **options)
    if path is None:
        # Without pyplot, a notebook shows a figure only by this method.
        figure.__dict__["_repr_png_"] = partial(_encode_png, figure)
    else:
        figure.savefig(path, dpi=_DPI)


def _encode_png(figure: Any) -> bytes:
    memory = BytesIO()
    figure.savefig(memory, format="png", dpi=_DPI)
    return memory.getvalue()


def draw_spans(axes: Axes, rows: Mapping[str, tuple[str, Sequence[tuple[float, float]]]], **style: Any) -> None:
    """Draw a row of bars for each entry of `rows`, from top to bottom: (color, (begin, end) in seconds), as ms."""
    for place, (color, spans) in enumerate(rows.values()):
        bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans]
        axes.broken_barh(bars, (place - 0.4, 0.8), **{"facecolor": color, "edgecolor": color, **style})
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)


def draw_shares(axes: Axes, bars: Mapping[str, Sequence[tuple[str, int]]], colors: Mapping[str, str]) -> None:
    """Draw a bar for each entry of `bars`: shares of (name, count), in colors by a word of the name; gray without."""
    shown = set()
    for place, parts in enumerate(bars.values()):
        left, total = 0.0, max(1, sum(count for _, count in parts))
        for name, count in parts:
            color = next((color for word, color in colors.items() if word in name), "#d0d0d0")
            axes.barh(place, count / total, left=left, color=color, label=None if name in shown else name)
            shown.add(name)
            if count / total > 0.06:
                axes.annotate(f"{count / total:.0%}", (left + count / total / 2, place), ha="center", va="center")
            left += count / total
        axes.annotate(f" {sum(count for _, count in parts):,}", (1, place), va="center", fontsize=8)
    # Between two of them would be a formula.
    axes.set_yticks(range(len(bars)), [name.replace("$", r"\$") for name in bars])
    axes.set_xlim(0, 1.18)
    axes.set_xticks([])
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4)
