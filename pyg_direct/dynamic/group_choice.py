"""Groups of the snapshots of a sequence that are aggregated together, and the form of their shared edges.

The rule follows measurements of every group of eight snapshots in both forms. On an H100 and an H200 eight at once were
the fastest in all of 72 cells: under a mask if snapshots share most edges, otherwise split. On a CPU "split" is at most
4 % slower than the faster form. Wide rows of many snapshots leave its nearest cache there, so that rows bound the size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from pyg_direct.dynamic.conv_operators import Factors, Operator
from pyg_direct.dynamic.matrix_group import build_group
from pyg_direct.dynamic.overlapped_work import Ahead, Timeline
from pyg_direct.dynamic.sequence_edges import Parts, SequenceEdges, find_alike
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices
from pyg_direct.ops.snapshots.slice_csr import MAX_GROUP, EdgeUnion, unite

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
        union: Edges of the group.
        num_edges: Edges of all its snapshots, each counted in each.
        device: Device of the layers.
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
        parts: The snapshots, in order.
        num_nodes: N of all of them.
        device: Device of the layers.
        group_size: Snapshots of a group; "auto" chooses by `choose_size` and `choose_form` among every eight of them.
        form: Form of groups whose size is given.
        edges: Edges of the snapshots.
        ahead: Thread that slices snapshots before they are needed.

    Attributes:
        decisions: Choices in words.
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
            operator, time, weighted: Operator, snapshot and weighting.
            channels: Numbers of a row.
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
