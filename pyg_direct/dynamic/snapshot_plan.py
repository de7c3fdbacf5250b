"""Plan of a sequence of snapshots: its matrices and the aggregated features of the first layer.

The first aggregation of a model depends on neither time nor parameters. So it is computed once for each snapshot,
several snapshots at a time, and kept (PiPAD, section 4.3). It stays on the device while there is room, otherwise in
host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.dynamic.device_caches import (
    Budget,
    MatrixCache,
    RowCache,
    choose_among,
    choose_kept,
    count_bytes,
    count_entries,
)
from pyg_direct.dynamic.matrix_group import build_group, check_groups, describe_edges, lay_apart
from pyg_direct.dynamic.overlapped_work import Ahead, CopyStream, Timeline, take_turns
from pyg_direct.dynamic.sequence_edges import (
    Factors,
    Operator,
    Parts,
    SequenceEdges,
    check_limit,
    find_alike,
    is_weighted,
)
from pyg_direct.errors import ArgumentError
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.rows.upload import upload_large
from pyg_direct.ops.snapshots.aggregate import Part, SnapshotMatrices, aggregate_snapshots, multiply_parts
from pyg_direct.ops.snapshots.slice_csr import MAX_GROUP, EdgeUnion, unite
from pyg_direct.profiling import trace

# The form of snapshots that lie beside each other and share no edges, and the form that `choose_form` chooses.
APART, AUTO = "apart", "auto"
# Rows of a structure are less.
_MOST = 2**31
# Bytes of the rows of a group, from which on a CPU reads them out of its nearest cache. 5,000 nodes of eight snapshots
# take 13.4 ms instead of 11.5 in eight at once for 32 numbers, and 6.7 ms instead of 7.1 for 2 numbers.
_NEAR_BYTES = 2**20


class Group(NamedTuple):
    """Snapshots [first, last) that are aggregated together, in a form."""

    first: int
    last: int
    form: str


def choose_size(num_nodes: int, channels: int, device: torch.device) -> int:
    """Return how many snapshots are aggregated at once: 1, 2, 4 or 8 with rows of N nodes and `channels` numbers."""
    size = MAX_GROUP
    while device.type == "cpu" and size > 1 and 4 * num_nodes * channels * size > _NEAR_BYTES:
        size //= 2
    return size


def choose_form(union: EdgeUnion, num_edges: int, device: torch.device) -> str:
    """Return the form of a group: "mask" on a GPU if half of the other snapshots, or more, have an edge of one.

    Args:
        num_edges: Edges of all its snapshots, each counted in each.
    """
    edges, others = union.keys.numel(), union.num_snapshots - 1
    return "mask" if device.type == "cuda" and 2 * (num_edges - edges) >= others * edges else "split"


def name_matrices(form: str, factors: Sequence[Factors]) -> Hashable:
    """Return the key of a group's matrices."""
    return form, *(id(f) for f in factors)


class GroupChoice:
    """The groups of a sequence of snapshots.

    If features are aggregated once, by structures that the device makes of edges in its memory, snapshots stay
    separate. Finding their shared edges would take longer than reading all edges. With twelve snapshots of 5.5 million
    edges on an H100, finding them took 15 of the 69 ms of a first epoch.

    Args:
        group_size: Snapshots of a group; "auto" chooses by `choose_size` and `choose_form` among every eight of them.
    """

    def __init__(self, parts: Sequence[Parts], num_nodes: int, device: torch.device, group_size: int | str, form: str,
                 edges: SequenceEdges, ahead: Ahead) -> None:  # fmt: skip
        self._parts, self._num_nodes, self._device, self._edges, self._ahead = parts, num_nodes, device, edges, ahead
        self._size = None if isinstance(group_size, str) else group_size
        self._form = AUTO if self._size is None else form
        # Groups by operator, weighting and first snapshot of a block, and by numbers of a row: None for rows that are
        # aggregated once, snapshots apart.
        self._groups: dict[tuple[Operator, bool, int], dict[int | None, list[Group]]] = {}
        # Matrices that a thread built before they were requested.
        self._built: dict[Hashable, SnapshotMatrices] = {}
        self.decisions: list[str] = []

    def find_block(self, time: int) -> tuple[int, int]:
        """Return the snapshots among which groups are chosen, or the group if its size is given."""
        size = self._size or MAX_GROUP
        first = time - time % size
        return find_alike(self._parts, time, first, min(first + size, len(self._parts)))

    def find(self, operator: Operator, time: int, weighted: bool, channels: int, once: bool = False) -> Group:
        """Return the group that a snapshot is aggregated with.

        Args:
            once: True if these rows are aggregated once and kept.
        """
        low, high = self.find_block(time)
        known = self._groups.setdefault((operator, weighted, low), {})
        width = None if once and self._are_apart(low, high) else channels
        if width not in known:
            if width is not None:
                self._built.update(self._ahead.finish((operator, weighted, low, width)) or {})
            elif high - low > 1:
                self.decisions.append(f"snapshots {low} to {high - 1}: apart, as features are aggregated once")
            known[width] = self._cut(low, high, width)
        return next(group for group in known[width] if group.first <= time < group.last)

    def _are_apart(self, low: int, high: int) -> bool:
        """Report whether rows that are aggregated once are computed snapshot by snapshot, side by side."""
        is_open = self._size is None and self._edges.are_on_device
        return is_open and (high - low) * self._num_nodes < _MOST

    def _cut(self, low: int, high: int, width: int | None) -> list[Group]:
        """Cut a block into groups; a `width` of None is for snapshots apart."""
        if width is None:
            return [Group(low, high, APART)]
        size = self._size or choose_size(self._num_nodes, width, self._device)
        return [Group(first, min(first + size, high), self._form) for first in range(low, high, size)]

    def build(self, factors: Sequence[Factors], form: str) -> SnapshotMatrices:
        """Build the matrices of a group, or take them if a thread has built them."""
        made = self._built.pop(name_matrices(form, factors), None)
        return self._build(factors, form) if made is None else made

    def _build(self, factors: Sequence[Factors], form: str) -> SnapshotMatrices:
        union = unite([f.keys for f in factors])
        if form == AUTO:
            form = choose_form(union, sum(f.keys.numel() for f in factors), self._device)
        return build_group(factors, self._num_nodes, form, union=union)

    def begin(self, operator: Operator, time: int, weighted: bool, channels: int, timeline: Timeline | None) -> None:
        """Let a thread slice the block that `time` begins, if it has not been chosen and a thread pays."""
        low, high = self.find_block(time)
        if channels not in self._groups.get((operator, weighted, low), {}) and self._edges.are_for_thread(low, high):
            work = partial(self._build_block, operator, self._cut(low, high, channels), weighted)
            self._ahead.begin((operator, weighted, low, channels), work, timeline)

    def _build_block(self, operator: Operator, groups: Sequence[Group],
                     weighted: bool) -> dict[Hashable, SnapshotMatrices]:  # fmt: skip
        """Build the matrices of all groups of a block, on the host."""
        built = {}
        with self._edges.in_one_thread(groups[0].first, groups[-1].last):
            for first, last, form in groups:
                factors = [self._edges.factorise(operator, t, weighted) for t in range(first, last)]
                built[name_matrices(form, factors)] = self._build(factors, form)
        return built

    def list_known(self, operator: Operator, time: int, weighted: bool) -> Iterator[Group]:
        """List the groups that a snapshot is in, chosen so far, for rows of any width."""
        known = self._groups.get((operator, weighted, self.find_block(time)[0]), {})
        for groups in known.values():
            yield from (group for group in groups if group.first <= time < group.last and group.form != APART)

    def halve(self, operator: Operator, weighted: bool, group: Group) -> None:
        """Replace a group whose rows do not fit the device at once by two."""
        middle = group.first + 2 ** ((group.last - group.first - 1).bit_length() - 1)
        for known in self._groups[operator, weighted, self.find_block(group.first)[0]].values():
            if group in known:
                place = known.index(group)
                known[place : place + 1] = [group._replace(last=middle), group._replace(first=middle)]
        self.decisions.append(f"snapshots {group.first} to {group.last - 1}: memory ran out, in two groups")


@take_turns("aggregate_features", "gather_features", "gather_given", "get_matrices", "keep",
            "multiply_window", "prefetch_features", "prefetch_given", "prefetch_matrices", "read_features", "settle",
            "visit", "describe")  # fmt: skip
class SnapshotPlan:
    """Matrices and aggregated features of the snapshots of one sequence, made at the first request.

    Args:
        parts: The snapshots, in order. Tensors that are the same object are the same in several snapshots.
        group_size: Snapshots aggregated at once: 1, 2, 4 or 8. "auto" chooses for every eight of them, including the
            form, by the rule of `choose_group`.
        memory: Bytes on the device for kept data; None sets no limit.
    """

    def __init__(self, parts: Sequence[Parts], device: torch.device, group_size: int | str = "auto",
                 form: str = "mask", memory: int | None = None) -> None:  # fmt: skip
        check_groups(group_size, form)
        self.parts, self.device, self.form = tuple(parts), device, form
        self.num_nodes = max((part.num_nodes for part in self.parts), default=0)
        self.has_weights = any(map(is_weighted, self.parts))
        check_limit(self.parts, memory)
        self.budget = Budget(memory, device)
        self._ahead = Ahead()
        self.edges = SequenceEdges(self.parts, self.num_nodes, device, self.budget, self._ahead)
        self.copies = CopyStream(device)
        self.matrices = MatrixCache(device, self.budget, self.copies)
        self._choice = GroupChoice(self.parts, self.num_nodes, device, group_size, form, self.edges, self._ahead)
        # Choices in words.
        self.decisions = self._choice.decisions
        self.timeline: Timeline | None = None
        self._rows, self._given = (RowCache(device, self.budget, self.copies) for _ in range(2))
        self._kept: dict[Hashable, Any] = {}
        # Structures and features copied from host memory; on a CPU, those that a separate device would be sent.
        self.moved_bytes = 0

    def __len__(self) -> int:
        return len(self.parts)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(len(self.parts), "snapshot")
        yield show_count(self.num_nodes, "node")
        yield str(self.device)

    def tell_time(self, time: int) -> int:
        """Return the snapshot of a time; in plans of a frame times are places."""
        return time

    def factorise(self, operator: Operator, time: int, weighted: bool = True) -> Factors:
        """Factorize a snapshot with an operator."""
        return self.edges.factorise(operator, time, weighted)

    def _count_at_once(self, time: int) -> int:
        """Return the number of snapshots whose features can be aggregated at once within memory."""
        x = self.parts[time].x
        if x is None or self.budget.limit is None:
            return MAX_GROUP
        # Inputs and outputs lie on the device at once.
        row_bytes = 8 * self.num_nodes * x.shape[1:].numel()
        return max(1, min(MAX_GROUP, (self.budget.limit - self.budget.used) // max(1, row_bytes)))

    def get_matrices(self, operator: Operator, first: int, last: int, weighted: bool = True,
                     form: str | None = None, keep: bool = True) -> SnapshotMatrices:  # fmt: skip
        """Return the matrices of snapshots [first, last), on the device; with `keep` they stay if there is room."""
        factors = [self.factorise(operator, t, weighted) for t in range(first, last)]
        form = self.form if form is None else form
        key = name_matrices(form, factors)

        def make() -> SnapshotMatrices:
            with self.edges.in_one_thread(first, last):
                made = self._choice.build(factors, form)
            if last - first > 1:
                self.decisions.append(f"snapshots {first} to {last - 1}: {describe_edges(made)}")
            return made

        return self.matrices.get(key, range(first, last), make, keep)

    def settle(self, frames: Sequence[range], rows: Collection[tuple[Operator, bool]], reads_features: bool) -> None:
        """Choose the data that stays on the device under a limit, once the reads of an epoch are known.

        Args:
            rows: Operators and weightings whose aggregated features are copied if they are not on the device.
            reads_features: True if features as they were given are copied too.
        """
        if self.budget.limit is None:
            return
        count, caches = count_entries(frames), (self._given, self._rows, self.matrices)
        lists = (
            self._given.list_candidates(lambda time: count(range(time, time + 1)) if reads_features else 0),
            self._rows.list_candidates(lambda key: count(range(key[2], key[2] + 1)) if key[:2] in rows else 0),
            self.matrices.list_candidates(count),
        )
        room = self.budget.limit - self.budget.used + sum(cache.device_bytes for cache in caches)
        (given, aggregated, matrices), room, left = choose_among(lists, room)
        whole = choose_kept(self.matrices.list_unpacked(matrices, count), room)
        packed = [key for key in matrices if key not in whole]
        # First others leave, so that there is room for all new ones.
        for change in ("keep_only", "bring"):
            getattr(self._given, change)(given)
            getattr(self._rows, change)(aggregated)
            getattr(self.matrices, change)(whole, packed)
        self.decisions.append(f"memory: of what frames bring, {left:,} bytes are copied in every epoch")

    def visit(self, times: range) -> None:
        """Set the snapshots of a frame: matrices of others leave the device if the budget has no room for them."""
        self.matrices.visit(times)

    def has_rows(self, operator: Operator, time: int, weighted: bool = True) -> bool:
        """Report whether the aggregated features of a snapshot are on the device."""
        return self._rows.is_here((operator, weighted, time))

    def aggregate_features(self, operator: Operator, time: int, weighted: bool = True) -> Tensor:
        """Return aggregated features of a snapshot, `[N, F]` on the device; its group is computed at once."""
        key = operator, weighted, time
        if key not in self._rows:
            channels = self._count_channels(time)
            group = self._choice.find(operator, time, weighted, channels, once=True)
            following = self._choice.find_block(time)[1]
            try:
                if group.form == APART:
                    self.edges.join(range(group.first, group.last), weighted)
                self._begin_following(operator, following, weighted)
                self._keep_group(operator, group, weighted)
                has_room = True
            except torch.OutOfMemoryError:
                if group.last - group.first == 1:
                    raise
                has_room = False
            if not has_room:
                self._halve(operator, weighted, group)
                return self.aggregate_features(operator, time, weighted)
        return self._rows.fetch(key)

    def _halve(self, operator: Operator, weighted: bool, group: Group) -> None:
        """Drop the matrices of a group that memory has no room for, and replace it by two groups."""
        if group.form != APART:
            factors = [self.factorise(operator, time, weighted) for time in range(group.first, group.last)]
            self.matrices.drop(name_matrices(group.form, factors))
        self._choice.halve(operator, weighted, group)

    def _count_channels(self, time: int) -> int:
        """Return the numbers of a row of the features of a snapshot."""
        x = self.parts[time].x
        if x is None:
            raise ArgumentError("x must be features of every snapshot that a layer aggregates, got None")
        return x.shape[1:].numel()

    def _begin_following(self, operator: Operator, time: int, weighted: bool) -> None:
        """Let a thread slice the snapshots from `time` on, if they have not been sliced and it pays."""
        if time < len(self.parts) and self.parts[time].x is not None and (operator, weighted, time) not in self._rows:
            self._choice.begin(operator, time, weighted, self._count_channels(time), self.timeline)

    def gather_features(self, operator: Operator, times: range, weighted: bool = True) -> Tensor | None:
        """Return aggregated features of snapshots of one shape, `[T, N, F]`; None unless all are on the device."""
        return self._rows.gather([(operator, weighted, time) for time in times])

    def prefetch_features(self, operator: Operator, time: int, weighted: bool = True) -> None:
        """Begin to copy aggregated features that are needed soon, in parallel with the device's computation."""
        self._rows.prefetch((operator, weighted, time), self.timeline)

    def prefetch_given(self, time: int) -> None:
        """Begin to copy features that were read before, in parallel with the device's computation."""
        self._given.prefetch(time, self.timeline)

    def prefetch_matrices(self, operator: Operator, time: int, weighted: bool = True) -> None:
        """Begin to copy matrices of a snapshot's group that were copied before, beside the device's computation."""
        for group in self._choice.list_known(operator, time, weighted):
            factors = [self.factorise(operator, t, weighted) for t in range(group.first, group.last)]
            self.matrices.prefetch(name_matrices(group.form, factors), self.timeline)

    def read_features(self, time: int) -> Tensor:
        """Return the features of a snapshot on the device, kept there while the budget lasts."""
        x = self.parts[time].x
        if x is None:
            raise ArgumentError("x must be features of every snapshot that a layer reads, got None")
        if x.device == self.device and x.is_cuda:
            return x
        if time in self._given:
            return self._given.fetch(time)
        self.moved_bytes += x.numel() * x.element_size()
        here = x.to(self.device)
        self._given.store(time, here)
        return here

    def gather_given(self, times: range) -> Tensor:
        """Return the features of snapshots of one shape, `[T, N, F]` on the device; kept ones become parts of it."""
        rows = [self.read_features(time) for time in times]
        kept = self._given.gather(list(times))
        return torch.stack(rows) if kept is None else kept

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make()`; plans of a frame compute it once for all snapshots of a backward pass."""
        return make()

    def defer(self, work: Callable[[], None], owner: Hashable = None) -> None:
        """Call work now; plans of a frame call it after all its snapshots have gone through the model."""
        work()

    def at(self, time: int) -> tuple[SnapshotPlan, int]:
        """Return the plan that has the edges of a snapshot, and its number there."""
        return self, time

    def finish(self, owner: Hashable = None) -> None:
        """Run the deferred work of an owner; no effect without frames."""

    def get_window(self, operator: Operator, weighted: bool) -> Tensor | None:
        """Return aggregated features of all snapshots of a frame, `[W, N, F]`; None without a frame."""
        return None

    def get_features(self) -> Tensor:
        """Return features of all snapshots of a frame, `[W, N, F]`."""
        raise NotImplementedError("only plans of frames have windows")

    def _keep_group(self, operator: Operator, group: Group, weighted: bool) -> None:
        """Aggregate features of a group, of as many snapshots at once as memory allows, and keep or send each away."""
        low = group.first
        while low < group.last:
            times = range(low, min(low + self._count_at_once(low), group.last))
            with trace(self.timeline, "aggregate"):
                out = self._compute_part(operator, range(group.first, group.last), times, weighted, group.form)
            for time, rows in zip(times, out, strict=True):
                # Memory may have run out for others of a group, which is then aggregated again in halves.
                if (operator, weighted, time) not in self._rows:
                    self._rows.store((operator, weighted, time), rows)
            del out, rows
            low = times.stop

    def _compute_part(self, operator: Operator, group: range, times: range, weighted: bool, form: str) -> list[Tensor]:
        """Return aggregated features of some snapshots of a group."""
        features = self._read_flat(times)
        if form == APART:
            with torch.no_grad():
                joined = self.edges.join(times, weighted) if operator.is_local else None
                if joined is None:
                    apart = lay_apart([self.factorise(operator, time, weighted) for time in times], self.num_nodes)
                else:
                    apart = lay_apart([operator.factorise(joined)], joined.num_nodes)
                out = aggregate_snapshots(torch.cat(features).unsqueeze(1), apart)
            out = out.view(len(times), self.num_nodes, -1)
        else:
            # The snapshots of a node side by side, so that one read brings them all.
            packed = torch.stack(features, dim=1)
            if not packed.is_cuda:
                self.moved_bytes += packed.numel() * packed.element_size()
            packed = packed.to(self.device)
            # Layers that follow may request them again; if none does, a bounded budget is for the rows.
            keep = self.budget.limit is None
            with torch.no_grad():
                matrices = self.get_matrices(operator, group.start, group.stop, weighted, form, keep)
                out = aggregate_snapshots(packed, matrices, times.start - group.start)
            out = out.transpose(0, 1).contiguous()
        return [rows[: self.parts[time].num_nodes] for rows, time in zip(out.unbind(0), times, strict=True)]

    def _read_flat(self, times: range) -> list[Tensor]:
        """Return features of snapshots as `[N, F]`, zeros for missing nodes; on a device without memory limit."""
        given = [x for x in (self.parts[time].x for time in times) if x is not None]
        assert len(given) == len(times), "their numbers were counted"
        if self.budget.limit is None and self.device.type != "cpu":
            self.moved_bytes += sum(x.numel() * x.element_size() for x in given if x.device != self.device)
            given = upload_large(given, self.device)
        flat = [x.reshape(x.shape[0], x.shape[1:].numel()) for x in given]
        return [F.pad(x, (0, 0, 0, self.num_nodes - x.shape[0])) if x.shape[0] < self.num_nodes else x for x in flat]

    def keep(self, key: Hashable, time: int, make: Callable[[], Any]) -> Any:
        """Return the result of `make()` for a snapshot, which depends on nothing else; kept if the budget lasts."""
        if (key, time) in self._kept:
            return self._kept[key, time]
        with torch.no_grad():
            made = make()
        if self.budget.take(count_bytes(made)):
            self._kept[key, time] = made
        return made

    def aggregate(self, operator: Operator, time: int, x: Tensor, weighted: bool = True) -> Tensor:
        """Aggregate other rows of a snapshot, `[N, F]` or `[N, ...]`, differentiably."""
        num_nodes = self.parts[time].num_nodes
        if x.shape[0] != num_nodes:
            raise ArgumentError(f"x must have rows of the {num_nodes} nodes of snapshot {time}, got {x.shape[0]}")
        rows = x.reshape(num_nodes, 1, x.shape[1:].numel())
        if num_nodes < self.num_nodes:
            rows = F.pad(rows, (0, 0, 0, 0, 0, self.num_nodes - num_nodes))
        out = aggregate_snapshots(rows, self.get_matrices(operator, time, time + 1, weighted))
        return out[:num_nodes].reshape(x.shape)

    def multiply_window(self, operator: Operator, x: Tensor, weighted: bool = True, first: int = 0,
                        transposed: bool = False) -> Tensor:  # fmt: skip
        """Aggregate rows `[N, W, F]` of snapshots from `first` on, or with `transposed` their gradient."""
        num_nodes, last = x.shape[0], first + x.shape[1]
        x = F.pad(x, (0, 0, 0, 0, 0, self.num_nodes - num_nodes)) if num_nodes < self.num_nodes else x
        while True:
            try:
                # No reference is held here, so that they are freed with the error.
                return multiply_parts(x, self._find_parts(operator, first, last, weighted, x.shape[2]),
                                      transposed)[:num_nodes]  # fmt: skip
            except torch.OutOfMemoryError:
                groups = list(self._find_groups(operator, first, last, weighted, x.shape[2]))
                largest = max(groups, key=lambda group: group.last - group.first)
                if largest.last - largest.first == 1:
                    raise
            # Here the results have no references any more.
            self._halve(operator, weighted, largest)

    def _find_groups(self, operator: Operator, time: int, last: int, weighted: bool, channels: int) -> Iterator[Group]:
        while time < last:
            yield (group := self._choice.find(operator, time, weighted, channels))
            time = group.last

    def _find_parts(self, operator: Operator, time: int, last: int, weighted: bool, channels: int) -> Iterator[Part]:
        for group in self._find_groups(operator, time, last, weighted, channels):
            matrices = self.get_matrices(operator, group.first, group.last, weighted, group.form)
            low = max(time, group.first)
            yield Part(matrices, low - group.first, min(group.last, last) - low)

    def summary(self) -> str:
        """Return sizes and choices, a line each."""
        return "\n".join([*(f"{name}: {value:,}" for name, value in self.describe().items()), *self.decisions])

    def describe(self) -> dict[str, Any]:
        """Return sizes: snapshots, nodes, edges; bytes of matrices, features and their aggregates held; bytes copied to
        the device so far (on a CPU, the bytes that a separate device would be sent).
        """
        return {
            "snapshots": len(self.parts),
            "nodes": self.num_nodes,
            "edges": sum(part.edge_index.shape[1] for part in self.parts),
            "matrix_bytes": self.matrices.num_bytes,
            "aggregated_bytes": self._rows.device_bytes,
            "aggregated_host_bytes": self._rows.host_bytes,
            "feature_bytes": self._given.device_bytes,
            "moved_bytes": self.count_moved(),
        }

    def count_moved(self) -> int:
        """Return bytes copied to the device so far, as in `describe`."""
        return self.moved_bytes + sum(c.moved_bytes for c in (self.edges, self.matrices, self._rows, self._given))
