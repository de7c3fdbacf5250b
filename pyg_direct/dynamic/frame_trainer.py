"""`FrameTrainer`: training over sliding windows of snapshots, with a forward pass, a backward pass and a step each.

The first epoch trains while it prepares: features are aggregated and kept, group by group. From the second frame
on, each frame copies one snapshot to the places of the last. On a GPU the passes are one captured graph if the
model allows it. The graph includes the step if the optimizer allows it.

`FrameMeter` measures each frame of the preparing epoch: bytes, seconds of its stages and memory (PiPAD, section 4.4).
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.dynamic.frame_plan import FramePlan
from pyg_direct.dynamic.overlapped_work import LANES, Timeline
from pyg_direct.dynamic.stream import SnapshotStream, stream
from pyg_direct.errors import ArgumentError, ArgumentTypeError, describe
from pyg_direct.nn.replay.graphed_step import RecordedStep, check_optimizes, forget_gradients, steps_on_gpu
from pyg_direct.nn.replay.model_replay import ordinary_passes
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.argument_checks import check_choice, checks_keywords
from pyg_direct.profiling import sum_lanes, trace
from pyg_direct.runtime.cuda.device import count_allocated, resolve_device
from pyg_direct.runtime.cuda.graph_capture import Recorder, waits_refused
from pyg_direct.typing import Device


class FrameCost(NamedTuple):
    """Cost of a frame.

    Attributes:
        moved_bytes: Bytes copied to the device.
        seconds: Seconds of each stage of `Timeline`; one may lie within another.
        held_bytes: GPU memory at its end; 0 on a CPU.
        peak_bytes: Peak of that memory since its start; 0 on a CPU.
    """

    first: int
    moved_bytes: int
    seconds: dict[str, float]
    held_bytes: int
    peak_bytes: int


class FrameMeter:
    """Meter of the costs of frames, by the spans of a timeline; the GPU is not waited for until they are read.

    Peaks are torch's own, which are reset with every frame.
    """

    def __init__(self, timeline: Timeline, device: torch.device, count_moved: Callable[[], int]) -> None:
        self._timeline, self._device, self._count_moved = timeline, device, count_moved
        self._on_gpu = device.type == "cuda"
        # First snapshot, bytes moved, spans before and after, bytes held and peak.
        self._frames: list[tuple[int, int, int, int, int, int]] = []

    @contextmanager
    def measure(self, first: int) -> Iterator[None]:
        """Measure the block as a frame; a failed block is not recorded."""
        spans, moved, held, peak = self._timeline.count, self._count_moved(), 0, 0
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        if self._on_gpu:
            held, peak, _ = count_allocated(self._device)
        self._frames.append((first, self._count_moved() - moved, spans, self._timeline.count, held, peak))

    def costs(self) -> list[FrameCost]:
        """Return costs of all frames, in order."""
        spans, out = self._timeline.spans(), []
        for first, moved, begin, end, held, peak in self._frames:
            seconds = sum_lanes(spans[begin:end], LANES)
            out.append(FrameCost(first, moved, {lane: s for lane, s in seconds.items() if s}, held, peak))
        return out


TARGETS = ("last", "all")
_Step = Callable[[torch.nn.Module, Any, Any], tuple[Tensor, Any]]


def run_recurrent(model: torch.nn.Module, snapshot: Any, state: Any) -> tuple[Tensor, Any]:
    """Run a model of `(x, edge_index, edge_weight, state)` that returns `(y_hat, state)`."""
    out: tuple[Tensor, Any] = model(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
    return out


def _read_pair(out: Any) -> tuple[Any, Any]:
    """Read the result of a step as a pair; unpacking would split a tensor along its rows."""
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    found = type(out).__name__ + (f" of {len(out)}" if isinstance(out, (tuple, list)) else "")
    raise ArgumentTypeError(f"step must return (y_hat, state), got a {found}: for a model that returns y_hat alone "
                            "give step=run_stateless, of pyg_direct.dynamic.frame_trainer")  # fmt: skip


def run_stateless(model: torch.nn.Module, snapshot: Any, state: Any) -> tuple[Tensor, Any]:
    """Run a model of `(x, edge_index, edge_weight)` that returns `y_hat`."""
    y_hat = model(snapshot.x, snapshot.edge_index, snapshot.edge_attr)
    if isinstance(y_hat, (tuple, list)):
        raise ArgumentTypeError(f"model must return y_hat alone with step=run_stateless, got a {type(y_hat).__name__} "
                                f"of {len(y_hat)}: for (y_hat, state) give step=run_recurrent")  # fmt: skip
    return y_hat, None


@dataclass
class _Epoch:
    """State of an unfinished epoch, which an exception may have interrupted.

    Attributes:
        done: Number of trained frames, and the sum of their losses: one tuple, so that both count the same frames.
        seconds, moved_bytes: Time and bytes of it so far.
    """

    done: tuple[int, Tensor]
    seconds: float = 0.0
    moved_bytes: int = 0
    meters: list[FrameMeter] = field(default_factory=list)


class FrameTrainer:
    """Trainer of a model over the frames of a signal, `window` snapshots each, one snapshot apart.

    Every frame starts without a state, and layers with `reinitialize_weight()` start again; it ends with a step.

    Snapshots have all attributes of the signal's snapshots. If a step reads messages of several numbers an edge, frames
    are not replayed. The same holds for an attribute that differs between snapshots and is no tensor of one shape.
    `decisions` gives the reason.

    If an exception interrupts an epoch, the first or any other, the next call of `train_epoch` continues it. It repeats
    the failed frame as a whole, so that parameters get the step of each frame once. The loss, time and bytes cover all
    frames of the epoch. Only the partial work of an interrupted optimizer step remains.

    Args:
        model: Any module; layers of `pyg_direct.dynamic.nn` in it share work between snapshots, others get the same
            features and edges.
        signal: A signal as for `stream`, or a stream.
        optimizer: Optimizer of the parameters of `model`. Its steps are replayed with the passes if all its groups are
            `capturable` with a tensor of the GPU for the learning rate.
        window: W, snapshots of a frame.
        loss: `loss(y_hat, y)`, a number.
        target: Take the loss of the "last" snapshot of a frame, or the mean over "all".
        step: Call of the model, `step(model, snapshot, state) -> (y_hat, state)`; `run_stateless` of this file is for
            models without a state. It must not write to features, edges or weights of the snapshot.
        device, memory: As for `stream`. A given stream has its own: `memory` must then be left out, and `device` equal
            the stream's if it is given.
        replay: Replay frames as a CUDA graph from the second on; None does so if it works.

    Attributes:
        plan: Plan of the snapshots.
        history: For each epoch its mean `loss`, `seconds`, `moved_bytes` to the device, and True or False for
            `replayed`.
        decisions: Choices and their reasons, in words.
        costs: Measured cost of each frame of the first epoch; on a GPU each resets torch's peak of memory. Data kept on
            the GPU later leaves twice the memory that they needed.

    Raises:
        ArgumentError, ArgumentTypeError, MemoryLimitError: named argument, rule and value.
        DeviceError: `device` is not there.

    Example:
        >>> from torch_geometric.nn import GCNConv
        >>> from pyg_direct.dynamic.frame_trainer import run_stateless
        >>> model = GCNConv(3, 1)
        >>> graph = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), y=torch.zeros(3, 1))
        >>> trainer = FrameTrainer(model, [graph] * 4, torch.optim.Adam(model.parameters()), window=2,
        ...                        step=run_stateless, device="cpu")
        >>> trainer.train_epoch() > 0, trainer
        (True, FrameTrainer(GCNConv, 4 snapshots, window=2, Adam, cpu, 1 epoch trained))
    """

    @checks_keywords
    def __init__(self, model: torch.nn.Module, signal: Any, optimizer: torch.optim.Optimizer, *, window: int = 8,
                 loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss, target: str = "last",
                 step: _Step = run_recurrent, device: Device = None, memory: int | str | None = None,
                 replay: bool | None = None) -> None:  # fmt: skip
        if not isinstance(model, torch.nn.Module):
            raise ArgumentTypeError(f"model must be a torch.nn.Module, got {model!r}")
        for name, function in (("loss", loss), ("step", step)):
            if not callable(function):
                raise ArgumentTypeError(f"{name} must be callable, got {function!r}")
        _check_optimizer(optimizer)
        check_optimizes(optimizer, model)
        check_choice("target", target, TARGETS)
        is_stream = isinstance(signal, SnapshotStream)
        if is_stream and memory is not None:
            raise ArgumentError(f"memory must be given to `stream` where signal is a stream, got {memory!r}")
        given = signal if is_stream else stream(signal, device, memory=memory, keep="host")
        if given.plan is None:
            raise ArgumentError("signal must be homogeneous, got snapshots of several node types")
        if is_stream and device is not None and resolve_device(device) != given.plan.device:
            raise ArgumentError(f"device must be that of the stream, {given.plan.device}, got {device}")
        if isinstance(window, bool) or not isinstance(window, (int, np.integer)):
            raise ArgumentTypeError(f"window must be an integer, got {window!r}")
        if not 1 <= window <= len(given):
            raise ArgumentError(f"window must lie in [1, {len(given)}], the number of snapshots, got {window}")
        snapshots = [given[t] for t in range(len(given))]
        for name in ("x", "y"):
            _check_shapes(name, [snapshot.get(name) for snapshot in snapshots])
        weights = [part.edge_weight for part in given.plan.parts] + [snapshot.edge_attr for snapshot in snapshots]
        for name, values in (("x", [part.x for part in given.plan.parts]), ("edge_attr", weights)):
            if any(value is not None and value.requires_grad for value in values):
                raise ArgumentError(f"{name} must not ask for gradients, which a stream without frames has: got "
                                    "requires_grad=True")  # fmt: skip
        self.model, self.optimizer, self.window = model, optimizer, int(window)
        self.loss, self.target, self.step = loss, target, step
        self.plan = given.plan
        self._times = given.times
        self._frame = FramePlan(self.plan, self._times, snapshots, self.window)
        self._recorded = RecordedStep()
        self._may_replay = replay is not False and self.plan.device.type == "cuda"
        self._must_replay = replay is True
        # State of the optimizer when its step became a part of the graph; None if it is not a part.
        self._captured_step: list[Any] | None = None
        self._frame.has_slots = self._may_replay
        self._epoch: _Epoch | None = None
        self.history: list[dict[str, Any]] = []
        self.decisions: list[str] = []
        self.costs: list[FrameCost] = []
        if replay and not self._may_replay:
            raise ArgumentError(f"replay must not be asked for on {self.plan.device}")

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield type(self.model).__name__
        yield show_count(len(self._times), "snapshot")
        yield f"window={self.window}"
        yield type(self.optimizer).__name__
        yield str(self.plan.device)
        yield f"{show_count(len(self.history), 'epoch')} trained"

    @property
    def num_frames(self) -> int:
        """Frames of an epoch."""
        return len(self._times) - self.window + 1

    def train_epoch(self) -> float:
        """Train over all frames, in order, or the rest of an interrupted epoch; return the mean loss of all."""
        self.model.train()
        begin, moved = time.perf_counter(), self.plan.count_moved()
        if self._epoch is None:
            self._epoch = _Epoch((0, torch.zeros((), device=self.plan.device)))
        epoch = self._epoch
        try:
            self._go_on(epoch)
        finally:
            epoch.seconds += time.perf_counter() - begin
            epoch.moved_bytes += self.plan.count_moved() - moved
        mean = float(epoch.done[1]) / self.num_frames
        self.history.append({"loss": mean, "seconds": epoch.seconds, "moved_bytes": epoch.moved_bytes,
                             "replayed": self._recorded.graph is not None})  # fmt: skip
        self._epoch = None
        return mean

    def _go_on(self, epoch: _Epoch) -> None:
        """Train over the remaining frames of an epoch."""
        if self._captured_step is not None and self._captured_step != self._describe_step():
            # A graph would go on with their old values.
            self._drop_graph()
        if self.history and self._may_replay and self._recorded.graph is None:
            self._record()
        if self.history:
            self._train_frames(epoch)
        else:
            self._prepare(epoch)

    def _train_frames(self, epoch: _Epoch, meter: FrameMeter | None = None) -> None:
        timeline, begin = self.plan.timeline, epoch.done[0]
        try:
            for first in range(begin, self.num_frames):
                if first == begin + 1 and not self.history and self._may_replay:
                    # All results of the first one exist.
                    self._record()
                with nullcontext() if meter is None else meter.measure(self._times[first]):
                    with trace(timeline, "move"):
                        self._frame.move(first)
                    # Before passes that the host takes long to queue.
                    self._frame.prefetch()
                    with trace(timeline, "passes"):
                        cost = self._run_frame()
                    if self._captured_step is None:
                        with trace(timeline, "step"):
                            self.optimizer.step()
                    epoch.done = first + 1, epoch.done[1] + cost
        finally:
            # Also for an interrupted frame.
            self._frame.forget()

    def _prepare(self, epoch: _Epoch) -> None:
        """Train over the frames and measure them, the first one without a graph."""
        self._drop_graph()
        given = self.plan.timeline
        self.plan.timeline = timeline = given or Timeline(self.plan.device)
        meter = FrameMeter(timeline, self.plan.device, self.plan.count_moved)
        epoch.meters.append(meter)
        try:
            self._train_frames(epoch, meter)
        finally:
            self.plan.timeline = given
        self.costs = [cost for meter in epoch.meters for cost in meter.costs()]
        self.plan.budget.need = max((cost.peak_bytes - cost.held_bytes for cost in self.costs), default=0)
        self._frame.settle_frames()

    def trace_epoch(self) -> Timeline:
        """Train over all frames and return the timeline of its stages; its `draw(path)` makes a picture."""
        self.plan.timeline = timeline = Timeline(self.plan.device)
        try:
            self.train_epoch()
        finally:
            self.plan.timeline = None
        return timeline

    def fit(self, epochs: int) -> list[float]:
        """Train for some epochs; return their mean losses.

        Args:
            epochs: Number of epochs.
        """
        return [self.train_epoch() for _ in range(epochs)]

    def _run_frame(self) -> Tensor:
        if self._recorded.graph is not None:
            return self._recorded.replay()
        self.optimizer.zero_grad(set_to_none=True)
        cost = self._compute()
        cost.backward()
        return cost.detach()

    def _compute(self) -> Tensor:
        """Compute the loss of the frame."""
        # Casts that a caller's autocast caches belong to parameters before the last step.
        torch.clear_autocast_cache()
        for module in self.model.modules():
            begin_anew: Any = getattr(module, "reinitialize_weight", None)
            if begin_anew is not None:
                begin_anew()
        state, costs = None, []
        for place, snapshot in enumerate(self._frame.get_snapshots()):
            with ordinary_passes:
                y_hat, state = _read_pair(self.step(self.model, snapshot, state))
            if self.target == "all" or place == self.window - 1:
                costs.append(self.loss(y_hat, snapshot.y))
        self._frame.check_unwritten()
        self._frame.finish()
        self._frame.forget()
        return costs[0] if len(costs) == 1 else torch.stack(costs).mean()

    def _record(self) -> None:
        """Capture the passes of a frame, if the model allows it."""
        try:
            self._try_record()
            return
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not str(error).startswith("CUDA error"):
                self._go_on_without(error)
                return
        # Here the tensors of the failed capture have no references any more.
        try:
            self._try_record(empties=True)
        except RuntimeError as error:
            self._go_on_without(error)

    def _go_on_without(self, error: Exception) -> None:
        """Train frames one operation after the other from now on."""
        if self._must_replay:
            raise error
        torch.cuda.synchronize(self.plan.device)
        self._may_replay, self._captured_step = False, None
        self._frame.others.free()
        forget_gradients(self.model, self.optimizer)
        self.decisions.append(f"frames are not replayed: {describe(error)}")

    def _try_record(self, *, empties: bool = False) -> None:
        self._frame.move(0)
        self._frame.others.fix(0)
        self._frame.is_recording = True
        try:
            with warnings.catch_warnings():
                # torch warns about empty graphs, if the model was refused at once, and that it does not find all waits.
                warnings.simplefilter("ignore")
                recorder = Recorder(self.plan.device, 0, empties=empties)
                self._recorded.record(recorder, self._compute, self.model, self.optimizer, self._may_capture_step,
                                      waits_refused)  # fmt: skip
            self._captured_step = self._describe_step() if self._recorded.steps_inside else None
            what = "frames are" if self._captured_step is None else "frames and steps are"
            self.decisions.append(f"{what} replayed as one CUDA graph")
        finally:
            self._frame.is_recording = False

    def _may_capture_step(self) -> bool:
        """Report whether a step runs entirely on the GPU, with an existing state."""
        stepped = (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)
        return steps_on_gpu(self.optimizer) and all(p in self.optimizer.state for p in stepped)

    def _describe_step(self) -> list[Any]:
        """Describe the state of a captured step: options, addresses of learning rates and of the optimizer's state."""
        groups, known = self.optimizer.param_groups, self.optimizer.state.values()
        options = [value for group in groups for name, value in group.items() if name != "params"]
        values = [*options, *(value for state in known for value in state.values())]
        return [value.data_ptr() if isinstance(value, Tensor) else value for value in values]

    def _drop_graph(self) -> None:
        self._recorded.drop()
        self._captured_step = None

    def _tell_most(self) -> str:
        seconds = {lane: max(cost.seconds.get(lane, 0.0) for cost in self.costs) for lane in LANES}
        stages = [f"{lane} {1e3 * most:.3g} ms" for lane, most in seconds.items() if most]
        moved = max(cost.moved_bytes for cost in self.costs)
        memory = [f"{self.plan.budget.need / 1e6:.3g} MB of memory"] if self.plan.budget.need else []
        return ", ".join([*stages, f"{moved / 1e6:.3g} MB to the device", *memory])

    def summary(self) -> str:
        """Return sizes, decisions and the course of the epochs, in lines."""
        lines = self.plan.summary().splitlines()
        lines += [f"frames: {self.num_frames} of {self.window} snapshots", *self.decisions]
        if self.costs:
            lines.append(f"most that a frame of the first epoch took: {self._tell_most()}")
        lines += [
            f"epoch {number}: loss {epoch['loss']:.4g}, {epoch['seconds']:.3f} s, {epoch['moved_bytes'] / 1e6:.3g} MB "
            f"to the device{', replayed' if epoch['replayed'] else ''}"
            for number, epoch in enumerate(self.history, 1)
        ]
        return "\n".join(lines)


def _check_optimizer(optimizer: Any) -> None:
    """Raise unless its steps follow a backward pass."""
    if not callable(getattr(optimizer, "step", None)) or not callable(getattr(optimizer, "zero_grad", None)):
        raise ArgumentTypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    options = inspect.signature(optimizer.step).parameters.values()
    if any(option.default is option.empty and option.kind is option.POSITIONAL_OR_KEYWORD for option in options):
        raise ArgumentTypeError(f"optimizer must step without a closure, got {type(optimizer).__name__}: loop over "
                                "`stream` for it")  # fmt: skip


def _check_shapes(name: str, values: list[Tensor | None]) -> None:
    """Raise unless an attribute exists in all snapshots, in one shape."""
    shapes = [None if value is None else tuple(value.shape) for value in values]
    if None in shapes:
        other, advice = shapes.index(None), f"give {name} to every snapshot, or loop over `stream`, which needs none"
    else:
        other = next((time for time, shape in enumerate(shapes) if shape != shapes[0]), 0)
        advice = "a loop over `stream` takes any"
    if shapes[other] is None or other > 0:
        got = " and ".join(f"{shapes[time]} at {time}" for time in sorted({0, other}))
        raise ArgumentError(f"{name} must have one shape in all snapshots of frames, got {got}; {advice}")
