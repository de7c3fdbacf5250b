"""The snapshots of a frame at fixed places, so that the work on one frame can be replayed for the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch_geometric.data import Data

from pyg_direct.dynamic.lazy import LazyTensor, tag
from pyg_direct.dynamic.operator import Operator
from pyg_direct.dynamic.plan import SnapshotPlan
from pyg_direct.errors import PygDirectError


class NotReplayableError(PygDirectError, RuntimeError):
    """What a model does with a frame depends on more than arrays of fixed size."""


class FramePlan(SnapshotPlan):
    """The plan of `window` snapshots that move through those of another plan.

    Times are places within the frame. Aggregated features, features and targets lie in arrays of their own, which
    `move` fills; a step of one snapshot copies one.
    """

    def __init__(self, real: SnapshotPlan, times: range, targets: list[Tensor], window: int) -> None:
        super().__init__([real.parts[time] for time in times[:window]], real.device)
        # Structures and rows are the real plan's.
        self.real, self.times, self.window, self.first = real, times, window, 0
        self.is_recording = self._is_moving = False
        self._targets = targets
        self._windows: dict[tuple[Operator, bool], Tensor] = {}
        self._features: Tensor | None = None
        self._once: dict[Hashable, Any] = {}
        self.y = torch.stack(targets[:window])

    def move(self, first: int) -> None:
        """Let the frame begin at snapshot `first`."""
        # What an exception left half moved is filled anew.
        step, self.first = -1 if self._is_moving else first - self.first, first
        self._is_moving = True
        self.parts = tuple(self.real.parts[time] for time in self.times[first : first + self.window])
        self._once.clear()
        for (operator, weighted), rows in self._windows.items():
            self._fill(rows, step, partial(self._aggregate_at, operator, weighted))
        if self._features is not None:
            self._fill(self._features, step, self._features_at)
        self._fill(self.y, step, self._targets.__getitem__)
        self._is_moving = False

    def prefetch(self) -> None:
        """Begin to copy what the next frame has and this one has not."""
        following = self.first + self.window
        if following < len(self.times):
            for operator, weighted in self._windows:
                self.real.prefetch_features(operator, self.times[following], weighted)

    def _aggregate_at(self, operator: Operator, weighted: bool, number: int) -> Tensor:
        return self.real.aggregate_features(operator, self.times[number], weighted)

    def _features_at(self, number: int) -> Tensor:
        x = self.real.parts[self.times[number]].x
        assert x is not None, "checked when the trainer was made"
        if x.device != self.device:
            self.real.moved_bytes += x.numel() * x.element_size()
        return x

    def _fill(self, rows: Tensor, step: int, read: Callable[[int], Tensor]) -> None:
        kept = self.window - step
        if 0 < step < self.window:
            rows[:kept].copy_(rows[step:].clone())
        fresh = range(max(0, kept), self.window) if step > 0 else range(self.window) if step < 0 else range(0)
        for place in fresh:
            rows[place].copy_(read(self.first + place), non_blocking=True)

    def get_snapshots(self) -> list[Data]:
        """The snapshots of the frame; their tensors are read only where a layer needs them."""
        return [Data(x=self._make(place, "x"), edge_index=self._make(place, "edge_index"),
                     edge_attr=self._make(place, "edge_weight"), y=self.y[place],
                     num_nodes=self.num_nodes) for place in range(self.window)]  # fmt: skip

    def _make(self, place: int, role: str) -> Tensor | None:
        part = self.parts[place]
        like = {"x": part.x, "edge_index": part.edge_index, "edge_weight": part.edge_weight}[role]
        if like is None:
            return None
        if like.device == self.device:
            return tag(like.view_as(like), self, place, role)
        load = partial(self._load_features, place) if role == "x" else partial(self._load_edges, like)
        return tag(LazyTensor(like, self.device, load), self, place, role)

    def _load_features(self, place: int) -> Tensor:
        if self._features is None:
            self._check_recording("features that no frame before asked for")
            self._features = torch.stack([self._features_at(self.first + p) for p in range(self.window)]).to(
                self.device
            )
        return self._features[place]

    def _load_edges(self, like: Tensor) -> Tensor:
        self._check_recording("edges")
        return like.to(self.device)

    def _check_recording(self, what: str) -> None:
        if self.is_recording:
            raise NotReplayableError(f"the model reads {what}")

    def get_window(self, operator: Operator, weighted: bool) -> Tensor:
        """Aggregated features of the frame, `[W, N, F]`."""
        key = operator, weighted
        if key not in self._windows:
            self._check_recording("aggregated features that no frame before asked for")
            rows = [self._aggregate_at(operator, weighted, self.first + place) for place in range(self.window)]
            self._windows[key] = torch.stack(rows)
        return self._windows[key]

    def aggregate_features(self, operator: Operator, time: int, weighted: bool = True) -> Tensor:
        """The aggregated features at a place of the frame."""
        return self.get_window(operator, weighted)[time]

    def aggregate(self, operator: Operator, time: int, x: Tensor, weighted: bool = True) -> Tensor:
        """Aggregate other rows at a place of the frame, differentiably."""
        self._check_recording("edges")
        return self.real.aggregate(operator, self.times[self.first + time], x, weighted)

    def aggregate_window(self, operator: Operator, x: Tensor, weighted: bool = True, first: int = 0) -> Tensor:
        """Aggregate other rows of consecutive snapshots of the frame, differentiably."""
        self._check_recording("edges")
        if self.times.step == 1:
            return self.real.aggregate_window(operator, x, weighted, self.times[self.first + first])
        apart = enumerate(x.unbind(1), first)
        return torch.stack([self.aggregate(operator, time, rows, weighted) for time, rows in apart], 1)

    def keep(self, key: Hashable, time: int, make: Callable[[], Any]) -> Any:
        """What `make()` gives for the snapshot at a place; made once."""
        self._check_recording("what is kept of single snapshots")

        def make_apart() -> Any:
            # What lies in the arrays of the frame is another snapshot's soon.
            return pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, make())

        return self.real.keep(key, self.times[self.first + time], make_apart)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make()` gives, made once in a frame."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]
