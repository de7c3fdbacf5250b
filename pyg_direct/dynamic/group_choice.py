"""Choice of the snapshots of a sequence that are aggregated together, made when a layer first asks, for rows of its
width.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial

import torch

from pyg_direct.dynamic.conv_operators import Factors, Operator
from pyg_direct.dynamic.group_tuner import Option, Speeds, choose_groups, find_values
from pyg_direct.dynamic.matrix_group import build_group
from pyg_direct.dynamic.overlapped_work import Ahead, Timeline
from pyg_direct.dynamic.sequence_edges import Parts, SequenceEdges, find_alike
from pyg_direct.dynamic.speed_probe import find_speeds
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices
from pyg_direct.ops.snapshots.slice_csr import MAX_GROUP

# The form of snapshots that lie beside each other and share no edges.
APART = "apart"
# Rows of a structure are less.
_MOST = 2**31
_Known = tuple[Operator, bool, int]


def name_matrices(form: str, factors: Sequence[Factors]) -> Hashable:
    """Return the key of a group's matrices."""
    return form, *(id(f) for f in factors)


class GroupChoice:
    """The groups of a sequence of snapshots.

    If features are aggregated once, by structures that the device makes of edges in its memory, snapshots stay
    separate. Finding their shared edges would take longer than reading all edges. With twelve snapshots of 5.5 million
    edges on an H100, finding them and choosing two groups took 15 of the 69 ms of a first epoch.

    Args:
        parts: The snapshots, in order.
        num_nodes: N of all of them.
        device: Device of the layers.
        group_size: Snapshots of a group; "auto" chooses for every eight of them, including the form.
        form: Form of groups whose size is given.
        edges: Edges of the snapshots.
        ahead: Thread that slices snapshots before they are needed.

    Attributes:
        decisions: Choices in words.
    """

    def __init__(self, parts: Sequence[Parts], num_nodes: int, device: torch.device, group_size: int | str, form: str,
                 edges: SequenceEdges, ahead: Ahead) -> None:  # fmt: skip
        self._parts, self._num_nodes, self._device, self._edges, self._ahead = parts, num_nodes, device, edges, ahead
        self._group_size, self._form = group_size, form
        # Groups by operator, weighting and first snapshot of a block, and by numbers of a row: None for rows that are
        # aggregated once, snapshots apart.
        self._groups: dict[_Known, dict[int | None, list[Option]]] = {}
        # Matrices that a thread built before they were requested.
        self._built: dict[Hashable, SnapshotMatrices] = {}
        self.decisions: list[str] = []

    def find_block(self, time: int) -> tuple[int, int]:
        """Return the snapshots among which groups are chosen, or the group if its size is given."""
        size = self._group_size if isinstance(self._group_size, int) else MAX_GROUP
        first = time - time % size
        return find_alike(self._parts, time, first, min(first + size, len(self._parts)))

    def find(self, operator: Operator, time: int, weighted: bool, channels: int, once: bool = False) -> Option:
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
            known[width] = self._choose_here(operator, low, high, weighted, width)
        return next(option for option in known[width] if option.first <= time < option.last)

    def _are_apart(self, low: int, high: int) -> bool:
        """Report whether rows that are aggregated once are computed snapshot by snapshot, side by side."""
        is_open = self._group_size == "auto" and self._edges.are_on_device
        return is_open and (high - low) * self._num_nodes < _MOST

    def _choose_here(self, operator: Operator, low: int, high: int, weighted: bool,
                     width: int | None) -> list[Option]:  # fmt: skip
        """Choose the groups of a block, and record them in words; a `width` of None is for snapshots apart."""
        is_told = self._group_size == "auto" and high - low > 1
        if width is None:
            if is_told:
                self.decisions.append(f"snapshots {low} to {high - 1}: apart, as features are aggregated once")
            return [Option(low, high, APART, 0.0, 0.0)]
        made = self._ahead.finish((operator, weighted, low, width))
        chosen, built = made or self._choose(operator, low, high, weighted, width)
        self._built.update(built)
        if is_told:
            self.decisions += map(str, chosen)
        return chosen

    def _choose(self, operator: Operator, low: int, high: int, weighted: bool, channels: int,
                build: bool = False) -> tuple[list[Option], dict[Hashable, SnapshotMatrices]]:  # fmt: skip
        """Choose the groups of snapshots [low, high), and with `build` make the matrices of each, on the host."""
        speeds = self._tell_speeds(low, high)
        with self._edges.in_one_thread(low, high):
            factors = [self._edges.factorise(operator, t, weighted) for t in range(low, high)]
            if speeds is None:
                chosen = [Option(low, high, self._form, 0.0, 0.0)]
            else:
                keys = [f.keys for f in factors]
                chosen = choose_groups(keys, channels, speeds, low, find_values(factors), self._num_nodes)
            built = {}
            for option in chosen if build else ():
                group = factors[option.first - low : option.last - low]
                built[name_matrices(option.form, group)] = build_group(group, self._num_nodes, option.form)
        return chosen, built

    def _tell_speeds(self, low: int, high: int) -> Speeds | None:
        """Return the speeds of the device, if a choice needs them."""
        if isinstance(self._group_size, int) or high - low == 1:
            return None
        return self._edges.tell_speeds(find_speeds(self._device))

    def begin(self, operator: Operator, time: int, weighted: bool, channels: int, timeline: Timeline | None) -> None:
        """Let a thread slice the block that `time` begins, if it has not been chosen and a thread pays."""
        low, high = self.find_block(time)
        if channels not in self._groups.get((operator, weighted, low), {}) and self._edges.are_for_thread(low, high):
            # Measured here, while no training runs in parallel.
            self._tell_speeds(low, high)
            work = partial(self._choose, operator, low, high, weighted, channels, True)
            self._ahead.begin((operator, weighted, low, channels), work, timeline)

    def take_built(self, key: Hashable) -> SnapshotMatrices | None:
        """Return matrices that a thread built, once."""
        return self._built.pop(key, None)

    def list_known(self, operator: Operator, time: int, weighted: bool) -> Iterator[Option]:
        """List the groups that a snapshot is in, chosen so far, for rows of any width."""
        known = self._groups.get((operator, weighted, self.find_block(time)[0]), {})
        for groups in known.values():
            yield from (group for group in groups if group.first <= time < group.last and group.form != APART)

    def halve(self, operator: Operator, weighted: bool, group: Option) -> None:
        """Replace a group whose rows do not fit the device at once by two."""
        middle = group.first + 2 ** ((group.last - group.first - 1).bit_length() - 1)
        for known in self._groups[operator, weighted, self.find_block(group.first)[0]].values():
            if group in known:
                place = known.index(group)
                known[place : place + 1] = [group._replace(last=middle), group._replace(first=middle)]
        self.decisions.append(f"snapshots {group.first} to {group.last - 1}: memory ran out, in two groups")
