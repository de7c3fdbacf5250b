"""Epochs of dynamic graph networks over frames: ours beside PyTorch Geometric Temporal and variants of it."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch_geometric.data import Data

from benchmarks.dynamic.ways import MODELS, WAYS, Model, make_optimizer
from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.dynamic import FrameTrainer, nn, stream
from pyg_direct.dynamic.frame_trainer import run_recurrent
from pyg_direct.dynamic.overlapped_work import LANES
from pyg_direct.errors import needs_extra

# Number of `FrameTrainer` objects for the time of preparation.
_PREPARED = 5
# Epoch of the compared losses, or the last that all ways have: they prepare in one epoch or in two.
_COMPARED = 3
# Ways that are also compared with our stream in a script.
_BESIDE_STREAM = ("PyGT", "PyGT-R", "PyGT-G", "resident PyGT")


class _Streamed:
    """Training loop of a script, over our stream and layers."""

    def __init__(self, model: Model, signal: Sequence[Data], window: int, device: torch.device) -> None:
        self.way = WAYS["resident PyGT"](model, signal, window, device)
        given = stream(list(signal), device, keep="device")
        self.way.moved = [given[t] for t in range(len(given))]  # type: ignore[attr-defined]

    def epoch(self) -> float:
        """Train over all frames."""
        return self.way.epoch()


class Trained:
    """Training by `FrameTrainer`."""

    def __init__(self, model: Model, signal: Any, window: int, device: torch.device) -> None:
        optimizer = make_optimizer(model, device)
        self.trainer = FrameTrainer(model, signal, optimizer, window=window, step=run_recurrent, device=device)

    def epoch(self) -> float:
        """Train over all frames."""
        return self.trainer.train_epoch()


class Course:
    """Epochs of one way: preparing epochs, with the construction of all they need, and measured ones.

    There are two preparing epochs, or `preparing_epochs` of the made object.

    Attributes:
        making: Seconds of the construction.
        preparing: Seconds of each preparing epoch; the first includes the construction.
        measured: Seconds of each later epoch.
        losses: Losses of all epochs.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        # Garbage of earlier ways must not be collected during this one.
        gc.collect()
        wait_for_gpu()
        begin = time.perf_counter()
        self.run = make()
        wait_for_gpu()
        self.making = time.perf_counter() - begin
        self.preparing, self.measured = list[float](), list[float]()
        self.losses = list[float]()
        for _ in range(getattr(self.run, "preparing_epochs", 2)):
            self.train()
            now = time.perf_counter()
            self.preparing.append(now - begin)
            begin = now

    def train(self) -> None:
        """Run an epoch."""
        self.losses.append(self.run.epoch())
        wait_for_gpu()

    def measure(self) -> None:
        """Run and time an epoch."""
        begin = time.perf_counter()
        self.train()
        self.measured.append(time.perf_counter() - begin)

    @property
    def median(self) -> float:
        """Return the median seconds of an epoch."""
        return statistics.median(self.measured)

    def prepare_in(self, median: float) -> float:
        """Return the seconds before the measured epochs in excess of as many epochs of `median`."""
        return max(0.0, sum(self.preparing) - len(self.preparing) * median)

    def count_to(self, other: Course) -> int:
        """Count the epochs until the total time stays at most another way's; 0 for never."""
        late = self.prepare_in(self.median) - other.prepare_in(other.median)
        gain = other.median - self.median
        return max(1, math.ceil(late / gain)) if gain > 0 else 0


def take_turns(makers: Mapping[str, Callable[[], Any]], epochs: int, seconds: float) -> dict[str, Course | str]:
    """Run several ways with alternating measured epochs; return their courses, or the error of a failed way.

    Args:
        makers: Functions that make an object with `epoch()`, by name.
        epochs, seconds: Limit of epochs of each; after `seconds` only one.
    """
    courses: dict[str, Course | str] = {}

    def attempt(way: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:
            # Some models cannot be captured, some machines cannot compile, and memory may not hold the tensors of a
            # frame.
            if not way.startswith("resident PyGT, ") and not isinstance(error, torch.OutOfMemoryError):
                raise
            wait_for_gpu()
            courses[way] = str(error).splitlines()[0]
        gc.collect()
        return None

    for way, make in makers.items():
        course = attempt(way, partial(Course, make))
        if course is not None:
            courses[way] = course
    begin = time.perf_counter()
    for turn in range(epochs):
        if turn > 0 and time.perf_counter() - begin > seconds:
            break
        for way, running in list(courses.items()):
            if isinstance(running, Course):
                attempt(way, running.measure)
    return courses


def measure_dynamic_epochs(sets: Mapping[str, Sequence[Data]], models: Sequence[str] = MODELS,
                           ways: Sequence[str] | None = None, window: int = 8, hidden: int = 32, epochs: int = 5,
                           seconds_each: float = 20.0, device: str = "cuda") -> Iterator[Row]:  # fmt: skip
    """Measure seconds of epochs after preparation, their ratios to ours of the same turn, and the preparation.

    Args:
        sets: Snapshots by the name of their graph.
        models, ways: Models and ways to run; None takes every way.
        window, hidden: Snapshots of a frame, and width of the state.
        epochs, seconds_each: Measured epochs of each way, in turns; after `seconds_each` only one.
        device: Device that trains.
    """
    with needs_extra("a comparison with PyTorch Geometric Temporal", "temporal"):
        from torch_geometric_temporal.nn import recurrent as theirs

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    for name, signal in sets.items():
        num_nodes, num_features = signal[0].x.shape
        for kind in models:
            ours = {"ours, stream": _Streamed, "ours, FrameTrainer": Trained}

            def make(way: str, kind: str = kind, signal: Sequence[Data] = signal) -> Any:
                torch.manual_seed(0)
                is_ours = way.startswith("ours")
                model = Model(kind, nn if is_ours else theirs, num_features, num_nodes, hidden).to(where)  # noqa: B023
                return (ours[way] if is_ours else WAYS[way])(model, signal, window, where)  # noqa: B023

            # Kernels are compiled, and speeds measured, once per machine: two frames suffice.
            Course(partial(make, "ours, FrameTrainer", signal=signal[: window + 1]))
            others = [_forget(Course(partial(make, "ours, FrameTrainer"))) for _ in range(_PREPARED - 1)]
            makers = {way: partial(make, way) for way in [*(WAYS if ways is None else ways), *ours]}
            frames = f"frames of {window} of {len(signal)} snapshots"
            yield from _tell(f"dynamic/{name}/{kind}", take_turns(makers, epochs, seconds_each), frames, others)


def _forget(course: Course) -> Course:
    """Release the object that the course ran."""
    course.run = None
    return course


def _tell(case: str, courses: Mapping[str, Course | str], frames: str, others: Sequence[Course]) -> Iterator[Row]:
    done = {way: course for way, course in courses.items() if isinstance(course, Course)}
    losses = _tell_losses({way: course.losses for way, course in done.items()})
    for way, course in courses.items():
        if isinstance(course, str):
            yield Row(case, f"{way}, failed", "ms", 0, 0, 0, note=course)
        else:
            yield Row.of(case, way, "ms", [1e3 * s for s in course.measured], note=f"{frames}; {losses[way]}")
    ours = done["ours, FrameTrainer"]
    for way, course in done.items():
        if not way.startswith("ours"):
            yield _compare(case, f"{way} over ours", course, ours)
    for way in _BESIDE_STREAM:
        if way in done:
            yield _compare(case, f"{way} over ours, stream", done[way], done["ours, stream"])
    if "PyGT-A" in done:
        ahead = done["PyGT-A"]
        prepared = [*others, ours]
        yield Row.of(case, "preparation over an epoch of PyGT-A", "x",
                     [course.prepare_in(ours.median) / ahead.median for course in prepared],
                     note="made and trained for two epochs, less two epochs; kernels compiled before")  # fmt: skip
        yield from _tell_preparation(case, prepared)
        yield Row.of(case, "no more time in all than PyGT-A after", "epochs", [ours.count_to(ahead)], note="0: never")
    trainer = ours.run.trainer
    yield Row.of(case, "moved to the GPU an epoch", "MB", [trainer.history[-1]["moved_bytes"] / 1e6],
                 note="; ".join(trainer.decisions))  # fmt: skip


def _tell_losses(losses: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Describe the loss of one epoch of each way, and its relative distance to the first way, such as PyGT."""
    epoch = min(_COMPARED, *map(len, losses.values()))
    first, expected = next((way, given[epoch - 1]) for way, given in losses.items())
    told = {}
    for way, given in losses.items():
        loss = given[epoch - 1]
        told[way] = f"loss of epoch {epoch} {loss:.7g}"
        if way != first:
            told[way] += f", {abs(loss - expected) / abs(expected):.1e} from {first}'s"
    return told


def _compare(case: str, metric: str, theirs: Course, ours: Course) -> Row:
    """Compare epochs: their time over ours of the same turn."""
    turns = zip(theirs.measured, ours.measured, strict=False)
    return Row.of(case, metric, "x", [slow / fast for slow, fast in turns])


def _tell_preparation(case: str, prepared: Sequence[Course]) -> Iterator[Row]:
    """Break down the time before the measured epochs of `FrameTrainer`; stages are from the last."""
    costs = prepared[-1].run.trainer.costs
    stages = {lane: sum(cost.seconds.get(lane, 0.0) for cost in costs) for lane in LANES}
    told = ", ".join(f"{lane} {1e3 * seconds:.1f} ms" for lane, seconds in stages.items() if seconds)
    yield Row.of(case, "preparation, made", "ms", [1e3 * ours.making for ours in prepared])
    yield Row.of(case, "preparation, first epoch", "ms", [1e3 * (ours.preparing[0] - ours.making) for ours in prepared],
                 note=f"frame by frame {told}; the rest is between them: recording, and the host's")  # fmt: skip
    yield Row.of(case, "preparation, second epoch", "ms", [1e3 * ours.preparing[1] for ours in prepared])


def mean_ratios(rows: Sequence[Row]) -> Iterator[Row]:
    """Compute geometric mean, least and largest of each ratio over all cases."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if " over ours" in row.metric:
            ratios.setdefault(row.metric, []).append(row.p50)
    for metric, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        yield Row("dynamic/all", metric, "x", min(values), mean, max(values),
                  note=f"least, geometric mean and largest of {len(values)} cases")  # fmt: skip
