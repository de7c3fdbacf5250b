"""Snapshots of a frame at fixed places, so that the work on one frame can be replayed for the next.

Snapshots of a frame also have attributes beside features, edges, weights and targets: messages, masks, days (`Others`).
Each frame gets its own snapshots' attributes. A recorded frame reads fixed places instead, and attributes of equal
shape are moved there with every frame. If a frame reads any other value that differs between snapshots, it is not
recorded (`NotReplayableError`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from pyg_direct.dynamic.sequence_edges import Factors, Operator
from pyg_direct.dynamic.snapshot import LazyTensor, tag, was_written
from pyg_direct.dynamic.snapshot_plan import SnapshotPlan
from pyg_direct.errors import ArgumentError, PygDirectError
from pyg_direct.ops.local_ids.build_csr import repeat_each
from pyg_direct.ops.snapshots.aggregate import multiply_slices
from pyg_direct.ops.snapshots.slice_csr import SlicedCSR, count_slices, flag_rows, place_slices

# A snapshot that no frame has: its slices are skipped.
_NONE = 255
# Edges that are sorted at once, unless one snapshot has more. A sort takes some 64 bytes of memory for each edge, and
# on a CPU torch wakes all its threads for more.
_MOST_EDGES = {"cuda": 1 << 22, "cpu": 1 << 15}


class _Side(NamedTuple):
    """Edges of some consecutive snapshots by one of their ends, snapshot after snapshot.

    Attributes:
        time: Snapshot of each node that has edges, counted from the first of these, int64 `[R]`.
        node: The node, int64 `[R]`.
        counts: Its edges, int64 `[R]`.
        others: The other end of each edge, int32 `[E]`.
        weight: fp32 or float64 `[E]`.
    """

    times: range
    time: Tensor
    node: Tensor
    counts: Tensor
    num_slices: list[int]
    others: Tensor
    weight: Tensor

    @classmethod
    def of(cls, times: range, ends: Tensor, num_nodes: int, others: Tensor, weight: Tensor) -> _Side:
        """Make it from ends given as snapshot * N + node, ascending; waits for their device."""
        ids, counts = torch.unique_consecutive(ends, return_counts=True)
        time = torch.div(ids, max(1, num_nodes), rounding_mode="floor")
        num_slices = ids.new_zeros(len(times)).index_add_(0, time, count_slices(counts))
        return cls(times, time, ids - time * num_nodes, counts, num_slices.tolist(), others.int(), weight)


def merge_factors(factors: Factors, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return targets, sources and weights of d + a * W * b, edges by target."""
    keys, weight = factors.keys, factors.weight
    rows = torch.div(keys, max(1, num_nodes), rounding_mode="floor")
    dtype = next((f.dtype for f in (weight, factors.row, factors.diagonal) if f is not None), torch.float32)
    weight = torch.ones(keys.numel(), dtype=dtype, device=keys.device) if weight is None else weight
    weight = weight if factors.row is None else weight * factors.row[rows]
    weight = weight if factors.column is None else weight * factors.column[keys - rows * num_nodes]
    if factors.diagonal is not None:
        loops = torch.arange(num_nodes, device=keys.device) * (num_nodes + 1)
        keys, order = torch.sort(torch.cat([keys, loops]), stable=True)
        weight = torch.cat([weight, factors.diagonal])[order]
        rows = torch.div(keys, max(1, num_nodes), rounding_mode="floor")
    return rows, keys - rows * num_nodes, weight


def _count_edges(factors: Factors, num_nodes: int) -> int:
    return factors.keys.numel() + (0 if factors.diagonal is None else num_nodes)


def _sort(factors: Sequence[Factors], times: range, num_nodes: int) -> tuple[_Side, _Side]:
    """Sort the edges of some snapshots by target and by source."""
    merged = [merge_factors(factors[time], num_nodes) for time in times]
    offsets = [number * num_nodes for number in range(len(times))]
    rows, cols, weight = (torch.cat(parts) for parts in zip(*merged, strict=True))
    targets, sources = (
        torch.cat([ends[side] + offset for ends, offset in zip(merged, offsets, strict=True)]) for side in (0, 1)
    )
    # Edges of a source stay by target.
    sources, order = torch.sort(sources, stable=True)
    return (_Side.of(times, targets, num_nodes, cols, weight),
            _Side.of(times, sources, num_nodes, rows[order], weight[order]))  # fmt: skip


def _cut(counts: Sequence[int], most: int) -> Iterator[range]:
    """Return ranges of consecutive snapshots that have at most `most` edges together; a larger snapshot is alone."""
    first = total = 0
    for time, count in enumerate(counts):
        if time > first and total + count > most:
            yield range(first, time)
            first, total = time, 0
        total += count
    yield range(first, len(counts))


def _spread(counts: Sequence[int], room: int, device: torch.device) -> Tensor:
    """Return the places of concatenated items in segments of one size, by the number of items of each."""
    gaps = [number * room - before for number, before in enumerate(accumulate(counts[:-1], initial=0))]
    total = sum(counts)
    each = torch.tensor([gaps, counts], device=device)
    return torch.arange(total, device=device) + repeat_each(each[0], each[1], total)


class Slots:
    """Matrices of T snapshots, and the matrices of `window` consecutive ones beside each other.

    Args:
        factors: Factors of each snapshot, in order, on the host or the device.
        window: W, at most `MOST`.

    Attributes:
        sent_bytes: Bytes copied from the host.
    """

    MOST = _NONE

    def __init__(self, factors: Sequence[Factors], num_nodes: int, window: int, device: torch.device) -> None:
        self._counts, times = [_count_edges(f, num_nodes) for f in factors], len(factors)
        made_at = factors[0].keys.device
        parts = _cut(self._counts, _MOST_EDGES[made_at.type])
        sides = list(zip(*(_sort(factors, part, num_nodes) for part in parts), strict=True))
        # One slice more than any snapshot has: it holds the unused edges of a snapshot's segment.
        self._num_slices = max(count for side in sides for part in side for count in part.num_slices) + 1
        self._num_edges = max(self._counts)
        rows = torch.zeros(2, times, self._num_slices, dtype=torch.int32, device=made_at)
        ends = torch.tensor(self._counts, dtype=torch.int32, device=made_at)
        offsets = ends.view(1, times, 1).repeat(2, 1, self._num_slices)
        others = torch.zeros(2, times, self._num_edges, dtype=torch.int32, device=made_at)
        # If all edges of a snapshot have weight one they are fp32 beside float64 ones.
        dtype = max((part.weight.dtype for part in sides[0]), key=lambda dtype: dtype.itemsize)
        weights = torch.zeros(2, times, self._num_edges, dtype=dtype, device=made_at)
        for number, side in enumerate(sides):
            for part in side:
                self._lay(part, rows[number], offsets[number], others[number], weights[number])
        self._all = [array.to(device) for array in (rows, others, weights, offsets)]
        rows, others, weights = (array.new_empty(2, window, array.shape[2]) for array in self._all[:3])
        shape = 2, window * self._num_slices + 1
        offsets = torch.full(shape, window * self._num_edges, dtype=torch.int32, device="cpu")
        self._here = rows, others, weights, offsets.to(device)
        self._base = torch.arange(window, dtype=torch.int32, device=device).unsqueeze(1) * self._num_edges
        snapshot = torch.arange(window, dtype=torch.uint8, device="cpu").unsqueeze(1).repeat(1, self._num_slices)
        snapshot[:, -1] = _NONE
        self._snapshot = snapshot.to(device)
        self.num_nodes, self.window = num_nodes, window
        self.num_bytes = sum(a.numel() * a.element_size() for a in (*self._all, *self._here, self._snapshot))
        self.sent_bytes = self.num_bytes if made_at.type == "cpu" else 0

    def _lay(self, part: _Side, rows: Tensor, offsets: Tensor, others: Tensor, weights: Tensor) -> None:
        """Write edges into the segments of their snapshots."""
        times, device = slice(part.times.start, part.times.stop), rows.device
        segment, first, has_several = place_slices(part.counts, sum(part.num_slices))
        before = torch.tensor([*accumulate(self._counts[times], initial=0)], device=device)
        place = _spread(part.num_slices, self._num_slices, device)
        rows[times].view(-1)[place] = flag_rows(part.node, has_several)[segment]
        offsets[times].view(-1)[place] = (first - before[part.time[segment]]).int()
        place = _spread(self._counts[times], self._num_edges, device)
        others[times].view(-1)[place] = part.others
        weights[times].view(-1)[place] = part.weight.to(weights.dtype)

    @staticmethod
    def count_bytes(factors: Sequence[Factors], num_nodes: int, window: int) -> int:
        """Return an estimate of `num_bytes`."""
        edges = max(_count_edges(f, num_nodes) for f in factors)
        numbers = (number for f in factors for number in (f.weight, f.row, f.column, f.diagonal) if number is not None)
        size = 4 + max((number.element_size() for number in numbers), default=4)
        return 2 * (len(factors) + window) * (size * edges + 9 * (num_nodes + edges // 32))

    def move(self, first: int) -> None:
        """Move snapshots [first, first + W) to their places."""
        part = slice(first, first + self.window)
        *arrays, offsets = self._all
        torch._foreach_copy_(self._here[:3], [array[:, part] for array in arrays])
        places = self._here[3][:, :-1].view(2, self.window, self._num_slices)
        torch.add(offsets[:, part], self._base, out=places)

    def multiply(self, x: Tensor, low: int = 0, transposed: bool = False) -> Tensor:
        """Aggregate rows `[N, W', F]` of the snapshots at places from `low` on, or with `transposed` their gradient."""
        side, part = int(transposed), slice(low, low + x.shape[1])
        rows, others, weights, offsets = self._here
        begin, end = low * self._num_slices, (low + x.shape[1]) * self._num_slices
        piece = SlicedCSR(rows[side, part].view(-1), offsets[side, begin : end + 1], others[side].view(-1),
                          self.num_nodes, self.window, weights[side].view(-1, 1),
                          self._snapshot[part].view(-1))  # fmt: skip
        return multiply_slices(x, piece, low)


# Attributes with fixed places in a frame, or of which a model may read only the shape.
_OWN = ("x", "edge_index", "edge_attr", "y")


class NotReplayableError(PygDirectError, RuntimeError):
    """A model's work on a frame depends on more than arrays of fixed size."""


class Others:
    """Attributes of snapshots that frames pass on.

    Args:
        snapshots: All of them, in order, as a stream gives them.
        window: W, snapshots of a frame.
    """

    def __init__(self, snapshots: Sequence[Any], window: int) -> None:
        self._snapshots, self._window = snapshots, window
        # Fixed places of attributes with one shape in all snapshots, `[W, ...]`; and attributes that a recorded frame
        # must not read.
        self._places: dict[str, Tensor] = {}
        self._moving: frozenset[str] = frozenset()

    def fix(self, first: int) -> None:
        """Make fixed places, filled for the frame that begins at snapshot `first`."""
        keys = {key for snapshot in self._snapshots for key in snapshot.keys()} - {*_OWN}  # noqa: SIM118
        given = {key: [snapshot.get(key) for snapshot in self._snapshots] for key in sorted(keys)}
        changing = {key: values for key, values in given.items() if not _are_same(values)}
        fixed = {key: values for key, values in changing.items() if _are_alike(values)}
        self._places = {key: torch.stack(values[first : first + self._window]) for key, values in fixed.items()}
        self._moving = frozenset(changing.keys() - fixed.keys())

    def free(self) -> None:
        """Remove the fixed places."""
        self._places, self._moving = {}, frozenset()

    def move(self, first: int) -> None:
        """Fill the fixed places for the frame that begins at snapshot `first`."""
        snapshots = self._snapshots[first : first + self._window]
        places = [place for places in self._places.values() for place in places.unbind(0)]
        if places:
            torch._foreach_copy_(places, [snapshot[key] for key in self._places for snapshot in snapshots])

    def take(self, number: int) -> Any:
        """Return a copy of a snapshot, which a program may change."""
        snapshot = copy.copy(self._snapshots[number])
        message = snapshot.get("edge_attr")
        if isinstance(message, LazyTensor):
            # Fetched tensors live as long as the returned snapshot.
            snapshot["edge_attr"] = message.renew()
        return snapshot

    def take_fixed(self, number: int, place: int) -> Any:
        """Return the snapshot for a recording, at a place of the frame."""
        snapshot = copy.copy(self._snapshots[number])
        for key, places in self._places.items():
            snapshot[key] = places[place]
        message = snapshot.get("edge_attr")
        if message is not None:
            snapshot["edge_attr"] = LazyTensor(message, message.device, _refuse_messages)
        store = snapshot.stores[0]
        store._mapping = _Recorded(store._mapping, self._moving)
        return snapshot


class _Recorded(dict[str, Any]):
    """Attributes of a recorded snapshot, of which some must not be read: a replay would go on with their values."""

    def __init__(self, given: dict[str, Any], moving: frozenset[str]) -> None:
        super().__init__(given)
        self._moving = moving

    def _check(self, key: Any) -> None:
        if key in self._moving:
            raise NotReplayableError(f"the model reads {key}, which differs between snapshots and is no tensor of one "
                                     "shape")  # fmt: skip

    def __getitem__(self, key: str) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry as any dict, unless it must not be read."""
        self._check(key)
        return super().get(key, default)

    def __copy__(self) -> _Recorded:
        return _Recorded(self, self._moving)


def _refuse_messages() -> Tensor:
    raise NotReplayableError("the model reads edge_attr, messages of several numbers an edge")


def _are_same(values: Sequence[Any]) -> bool:
    """Report whether an attribute is one object or number in all snapshots."""
    first = values[0]
    if isinstance(first, (bool, int, float, str)):
        return all(type(value) is type(first) and value == first for value in values)
    return all(value is first for value in values)


def _are_alike(values: Sequence[Any]) -> bool:
    """Report whether an attribute is an ordinary tensor of one shape in all snapshots."""
    kinds = {(value.shape, value.dtype, value.device) if _is_plain(value) else None for value in values}
    return len(kinds) == 1 and None not in kinds


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.requires_grad


# Share of the free memory of a GPU that copies which only save time may take.
_SHARE = 0.2
# Most snapshots that are copied ahead, beside a frame's own: at the start of an epoch all snapshots change.
_AHEAD = 2


class FramePlan(SnapshotPlan):
    """Plan of `window` snapshots that move through the snapshots of another plan.

    Times are places within the frame. Aggregated features, features and targets have separate arrays, which `move`
    fills; a step of one snapshot copies one. Other attributes of the snapshots are in `others`.
    """

    def __init__(self, real: SnapshotPlan, times: range, snapshots: Sequence[Any], window: int) -> None:
        super().__init__([real.parts[time] for time in times[:window]], real.device)
        # Structures and rows belong to the real plan.
        self.real, self.times, self.window, self.first = real, times, window, 0
        self.has_weights = real.has_weights
        # True if matrices lie at fixed places too, so that frames can be replayed.
        self.has_slots = self.is_recording = self._is_moving = False
        self._targets = torch.stack([snapshot.y for snapshot in snapshots])
        for snapshot, target in zip(snapshots, self._targets.unbind(0), strict=True):
            # A stacked tensor is not held twice.
            snapshot.y = target
        self.others = Others(snapshots, window)
        self._windows: dict[tuple[Operator, bool], Tensor] = {}
        self._features: Tensor | None = None
        # Rows of all snapshots from which a window is filled; None if they do not all lie on the device.
        self._sources: dict[Hashable, Tensor | None] = {}
        self._slots: dict[tuple[Operator, bool], Slots | None] = {}
        # Operators of later layers, and operators whose first aggregation is made here from copied features.
        self._multiplied: set[tuple[Operator, bool]] = set()
        self._derived: set[tuple[Operator, bool]] = set()
        self._once: dict[Hashable, Any] = {}
        self._deferred: list[tuple[Hashable, Callable[[], None]]] = []
        # Tensors that steps received from the frame: name, place and tensor.
        self._handed: list[tuple[str, int, Tensor]] = []
        self.y = self._targets[:window].clone()

    def tell_time(self, time: int) -> int:
        """Return the snapshot at a place of the frame."""
        return self.times[self.first + time]

    def move(self, first: int) -> None:
        """Move the frame to begin at snapshot `first`."""
        # If an exception interrupted a move, the frame is filled again.
        step, self.first = self.window if self._is_moving else first - self.first, first
        self._is_moving = True
        times = self.times[first : first + self.window]
        self.parts = tuple(self.real.parts[time] for time in times)
        self.real.visit(times)
        self.forget()
        if step == 0:
            # A step may have written to them.
            self.y.copy_(self._targets[first : first + self.window])
        else:
            self._move_windows(step)
            self.others.move(first)
            for slots in self._slots.values():
                if slots is not None:
                    slots.move(first)
        self._is_moving = False

    def _move_windows(self, step: int) -> None:
        part = slice(self.first, self.first + self.window)
        windows, sources = [self.y], [self._targets[part]]
        if self._features is not None:
            source = self._gather_features()
            if source is None:
                self._fill(self._features, step, self._features_at)
            else:
                windows, sources = [*windows, self._features], [*sources, source[part]]
        for (operator, weighted), rows in self._windows.items():
            source = self._gather(operator, weighted)
            if source is None:
                self._fill(rows, step, partial(self._aggregate_at, operator, weighted))
            else:
                windows, sources = [*windows, rows], [*sources, source[part]]
        torch._foreach_copy_(windows, sources)

    def _gather(self, operator: Operator, weighted: bool) -> Tensor | None:
        """Return aggregated features of all snapshots, `[T, N, F]`, once all are on the device."""
        key = operator, weighted
        rows = self._windows[key]
        num_bytes = len(self.times) * rows[0].numel() * rows.element_size()
        if self._sources.get(key) is None and self.real.budget.limit is None and self._fits(num_bytes):
            self._sources[key] = self.real.gather_features(operator, self.times, weighted)
        return self._sources.get(key)

    def _fits(self, num_bytes: int) -> bool:
        """Report whether an allocation takes little of the free memory, or leaves enough of it."""
        return self.real.budget.has_room(num_bytes, _SHARE)

    def _gather_features(self) -> Tensor | None:
        """Return the features of all snapshots, if they take little memory of a device without limit."""
        if "x" not in self._sources:
            x, all_ = self.real.parts[self.times[0]].x, None
            assert x is not None, "checked when the trainer was made"
            if self.real.budget.limit is None and self._fits(len(self.times) * x.numel() * x.element_size()):
                all_ = self.real.gather_given(self.times)
            self._sources["x"] = all_
        return self._sources["x"]

    def prefetch(self) -> None:
        """Begin to copy rows and matrices that the next frame, after the last the first, needs besides this one's."""
        last = len(self.times) - self.window
        following = self.first + 1 if self.first < last else 0
        fresh = [n for n in range(following, following + self.window) if not 0 <= n - self.first < self.window]
        for number in fresh[:_AHEAD]:
            time = self.times[number]
            for operator, weighted in self._multiplied:
                if self._slots.get((operator, weighted)) is None:
                    self.real.prefetch_matrices(operator, time, weighted)
            if self._features is not None:
                self.real.prefetch_given(time)
            for operator, weighted in self._windows.keys() - self._derived:
                self.real.prefetch_features(operator, time, weighted)

    def settle_frames(self) -> None:
        """Choose the data that stays on the device under a limit, after one epoch of all frames.

        First aggregations are not copied if their features and matrices are copied anyway: small ones are computed from
        these.
        """
        if self.real.budget.limit is None:
            return
        multiplied = {key for key in self._multiplied if self._slots.get(key) is None}
        self._derived = multiplied & self._windows.keys() if self._features is not None else set()
        copied = self._windows.keys() - self._derived
        last = len(self.times) - self.window
        frames = [self.times[first : first + self.window] for first in range(last + 1)]
        self.real.settle(frames, copied, self._features is not None)

    def _aggregate_at(self, operator: Operator, weighted: bool, number: int) -> Tensor:
        time = self.times[number]
        if (operator, weighted) in self._derived and not self.real.has_rows(operator, time, weighted):
            assert self._features is not None, "features came before"
            rows = self._features[number - self.first].flatten(1).unsqueeze(1)
            return self.real.multiply_window(operator, rows, weighted, time).squeeze(1)
        return self.real.aggregate_features(operator, time, weighted)

    def _features_at(self, number: int) -> Tensor:
        return self.real.read_features(self.times[number])

    def _fill(self, rows: Tensor, step: int, read: Callable[[int], Tensor]) -> None:
        kept = max(0, self.window - abs(step))
        old, new = max(0, step), max(0, -step)
        if kept:
            rows[new : new + kept].copy_(rows[old : old + kept].clone())
        for place in [*range(new), *range(new + kept, self.window)] if kept else range(self.window):
            rows[place].copy_(read(self.first + place), non_blocking=True)

    def get_snapshots(self) -> list[Any]:
        """Return the snapshots of the frame; their tensors are read only when a layer needs them."""
        return [self._get_snapshot(place) for place in range(self.window)]

    def _get_snapshot(self, place: int) -> Any:
        number = self.first + place
        snapshot = self.others.take_fixed(number, place) if self.is_recording else self.others.take(number)
        snapshot.x, snapshot.edge_index = self._make(place, "x"), self._make(place, "edge_index")
        if self.parts[place].edge_weight is not None:
            snapshot.edge_attr = self._make(place, "edge_weight")
        snapshot.y = self.y[place]
        return snapshot

    def _make(self, place: int, role: str) -> Tensor | None:
        part = self.parts[place]
        like = {"x": part.x, "edge_index": part.edge_index, "edge_weight": part.edge_weight}[role]
        if like is None:
            return None
        if like.device == self.device and not self.has_slots:
            made = tag(like.view_as(like), self, place, role)
        else:
            load = partial(self._load_features, place) if role == "x" else partial(self._load_edges, like)
            made = tag(LazyTensor(like, self.device, load), self, place, role)
        self._handed.append((role, place, made))
        return made

    def check_unwritten(self) -> None:
        """Refuse writes of a step to features, edges or weights, which other frames share."""
        for role, place, made in self._handed:
            if was_written(made):
                name = "edge_attr" if role == "edge_weight" else role
                raise ArgumentError(f"step must not write to {name} of a snapshot, which other frames have too: give "
                                    f"the model a new tensor; it wrote to that of {self.tell_time(place)}")  # fmt: skip

    def _load_features(self, place: int) -> Tensor:
        return self.get_features()[place]

    def get_features(self) -> Tensor:
        """Return features of the frame, `[W, N, F]`."""
        if self._features is None:
            self._check_recording("features that no frame before asked for")
            self._features = torch.stack([self._features_at(self.first + place) for place in range(self.window)])
        return self._features

    def _load_edges(self, like: Tensor) -> Tensor:
        self._check_recording("edges")
        return like.to(self.device)

    def _check_recording(self, what: str) -> None:
        if self.is_recording:
            raise NotReplayableError(f"the model reads {what}")

    def factorise(self, operator: Operator, time: int, weighted: bool = True) -> Factors:
        """Factorize the snapshot at a place of the frame."""
        return self.real.factorise(operator, self.times[self.first + time], weighted)

    def get_window(self, operator: Operator, weighted: bool) -> Tensor:
        """Return aggregated features of the frame, `[W, N, F]`."""
        key = operator, weighted
        if key not in self._windows:
            self._check_recording("aggregated features that no frame before asked for")
            rows = [self._aggregate_at(operator, weighted, self.first + place) for place in range(self.window)]
            self._windows[key] = torch.stack(rows)
        return self._windows[key]

    def aggregate_features(self, operator: Operator, time: int, weighted: bool = True) -> Tensor:
        """Return the aggregated features at a place of the frame."""
        return self.get_window(operator, weighted)[time]

    def at(self, time: int) -> tuple[SnapshotPlan, int]:
        """Return the plan that has the edges of the snapshot at a place of the frame, and its number there."""
        self._check_recording("edges")
        return self.real, self.times[self.first + time]

    def aggregate(self, operator: Operator, time: int, x: Tensor, weighted: bool = True) -> Tensor:
        """Aggregate other rows at a place of the frame, differentiably."""
        real, time = self.at(time)
        return real.aggregate(operator, time, x, weighted)

    def multiply_window(self, operator: Operator, x: Tensor, weighted: bool = True, first: int = 0,
                        transposed: bool = False) -> Tensor:  # fmt: skip
        """Aggregate other rows of consecutive snapshots of the frame; without a gradient."""
        self._multiplied.add((operator, weighted))
        slots = self._find_slots(operator, weighted)
        if slots is not None:
            num_nodes = x.shape[0]
            if num_nodes < slots.num_nodes:
                x = F.pad(x, (0, 0, 0, 0, 0, slots.num_nodes - num_nodes))
            return slots.multiply(x, first, transposed)[:num_nodes]
        self._check_recording("edges")
        if self.times.step == 1:
            return self.real.multiply_window(operator, x, weighted, self.times[self.first + first], transposed)
        apart = (
            self.real.multiply_window(operator, rows, weighted, self.times[self.first + place], transposed)
            for place, rows in enumerate(x.split(1, 1), first)
        )
        return torch.cat(list(apart), 1)

    def _find_slots(self, operator: Operator, weighted: bool) -> Slots | None:
        """Return the matrices of the frame at fixed places, if they take little of the free memory."""
        key = operator, weighted
        if key not in self._slots and self.has_slots and self.window <= Slots.MOST and not self.is_recording:
            factors = [self.real.factorise(operator, time, weighted) for time in self.times]
            # Their keys count the nodes of all snapshots, which may be more than the nodes of the frames.
            num_nodes = self.real.num_nodes
            num_bytes = Slots.count_bytes(factors, num_nodes, self.window)
            self._slots[key] = None
            if self._fits(num_bytes) and self.real.budget.take(num_bytes):
                with self.real.edges.in_one_thread(min(self.times), max(self.times) + 1):
                    slots = Slots(factors, num_nodes, self.window, self.device)
                self._slots[key] = slots
                self.real.moved_bytes += slots.sent_bytes
                slots.move(self.first)
        return self._slots.get(key)

    def keep(self, key: Hashable, time: int, make: Callable[[], Any]) -> Any:
        """Return the result of `make()` for the snapshot at a place; computed once."""
        self._check_recording("what is kept of single snapshots")

        def make_apart() -> Any:
            # The arrays of the frame soon hold another snapshot.
            return pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, make())

        return self.real.keep(key, self.times[self.first + time], make_apart)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make()`, computed once in a frame."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def defer(self, work: Callable[[], None], owner: Hashable = None) -> None:
        """Call work after all snapshots of the frame have gone through the model, or when its owner finishes it."""
        self._deferred.append((owner, work))

    def forget(self) -> None:
        """Drop cached results of the frame, whose graph may hold this plan, and deferred work and tensors of steps."""
        self._once.clear()
        self._deferred.clear()
        self._handed.clear()

    def finish(self, owner: Hashable = None) -> None:
        """Run deferred work: of one owner, or all."""
        due = [(by, work) for by, work in self._deferred if owner in (None, by)]
        self._deferred = [(by, work) for by, work in self._deferred if owner not in (None, by)]
        for _, work in due:
            work()
