"""What is known of a sequence of snapshots: its matrices and the aggregated features of the first layer.

The first aggregation of a model depends on neither time nor parameters, so it is computed once for each snapshot,
several snapshots at a time, and kept (PiPAD, section 4.3): on the device while they fit, else in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.dynamic.group import GROUP_SIZES, build_group
from pyg_direct.dynamic.operator import Factors, Operator
from pyg_direct.dynamic.snapshot import Snapshot, order_edges
from pyg_direct.errors import ArgumentError
from pyg_direct.ops.overlap import MAX_GROUP
from pyg_direct.ops.snapshots import SnapshotMatrices, aggregate_snapshots


class Parts(NamedTuple):
    """Tensors of one snapshot, in host memory or on the device.

    Attributes:
        x: Features `[N, F]`, further dimensions flat; or None.
        edge_index: int64 `[2, E]`.
        edge_weight: One weight an edge, or None.
        num_nodes: N.
    """

    x: Tensor | None
    edge_index: Tensor
    edge_weight: Tensor | None
    num_nodes: int


class SnapshotPlan:
    """Matrices and aggregated features of the snapshots of one sequence, made when first asked for.

    Args:
        parts: The snapshots, in order. Tensors that are the same object are the same in several snapshots.
        device: Where layers compute.
        group_size: Snapshots aggregated at once: 1, 2, 4 or 8.
        form: "split" or "mask", see `group.build_group`.
    """

    def __init__(self, parts: Sequence[Parts], device: torch.device, group_size: int = MAX_GROUP,
                 form: str = "mask") -> None:  # fmt: skip
        if group_size not in GROUP_SIZES:
            raise ArgumentError(f"group_size must be one of 1, 2, 4, 8, got {group_size}")
        self.parts, self.device, self.group_size, self.form = tuple(parts), device, group_size, form
        self.num_nodes = max((part.num_nodes for part in self.parts), default=0)
        self._ordered: dict[Hashable, Snapshot] = {}
        self._factors: dict[Hashable, Factors] = {}
        self._matrices: dict[Hashable, SnapshotMatrices] = {}
        self._aggregated: dict[Hashable, Tensor] = {}
        self._kept: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.parts)

    def order(self, time: int, weighted: bool = True) -> Snapshot:
        """The edges of a snapshot in order, on the host."""
        part = self.parts[time]
        weight = part.edge_weight if weighted else None
        key = id(part.edge_index), id(weight)
        if key not in self._ordered:
            host = None if weight is None else weight.cpu()
            self._ordered[key] = order_edges(part.edge_index.cpu(), host, self.num_nodes)
        return self._ordered[key]

    def factorise(self, operator: Operator, time: int, weighted: bool = True) -> Factors:
        """What an operator makes of a snapshot."""
        snapshot = self.order(time, weighted)
        key = operator, id(snapshot)
        if key not in self._factors:
            self._factors[key] = operator.factorise(snapshot)
        return self._factors[key]

    def get_matrices(self, operator: Operator, first: int, last: int, weighted: bool = True) -> SnapshotMatrices:
        """The matrices of snapshots [first, last), on the device; kept."""
        factors = [self.factorise(operator, t, weighted) for t in range(first, last)]
        key = tuple(id(f) for f in factors)
        if key not in self._matrices:
            self._matrices[key] = build_group(factors, self.num_nodes, self.form).to(self.device)
        return self._matrices[key]

    def aggregate_features(self, operator: Operator, time: int, weighted: bool = True) -> Tensor:
        """The aggregated features of a snapshot, `[N, F]` on the device; those of its whole group are computed at once.

        Raises:
            ArgumentError: the snapshot has no features.
        """
        key = operator, weighted, time
        if key not in self._aggregated:
            first = time - time % self.group_size
            last = min(first + self.group_size, len(self.parts))
            run = _find_alike(self.parts, time, first, last)
            out = self._compute(operator, *run, weighted)
            for t, rows in zip(range(*run), out, strict=True):
                self._aggregated[operator, weighted, t] = rows
        return self._aggregated[key]

    def _compute(self, operator: Operator, first: int, last: int, weighted: bool) -> list[Tensor]:
        features = []
        for part in self.parts[first:last]:
            if part.x is None:
                raise ArgumentError("x must be features of every snapshot that a layer aggregates, got None")
            features.append(F.pad(part.x, (0, 0, 0, self.num_nodes - part.x.shape[0])))
        # The snapshots of a node side by side, so that one read brings them all.
        packed = torch.stack(features, dim=1).to(self.device)
        with torch.no_grad():
            out = aggregate_snapshots(packed, self.get_matrices(operator, first, last, weighted))
        apart = out.transpose(0, 1).contiguous()
        return [rows[: part.num_nodes] for rows, part in zip(apart.unbind(0), self.parts[first:last], strict=True)]

    def keep(self, key: Hashable, time: int, make: Callable[[], Any]) -> Any:
        """What `make()` gives for a snapshot, which must depend on nothing else; made once, without gradients."""
        if (key, time) not in self._kept:
            with torch.no_grad():
                self._kept[key, time] = make()
        return self._kept[key, time]

    def aggregate(self, operator: Operator, time: int, x: Tensor, weighted: bool = True) -> Tensor:
        """Aggregate other rows of a snapshot, `[N, F]` or `[N, ...]`, differentiably."""
        num_nodes = self.parts[time].num_nodes
        if x.shape[0] != num_nodes:
            raise ArgumentError(f"x must have rows of the {num_nodes} nodes of snapshot {time}, got {x.shape[0]}")
        rows = x.reshape(num_nodes, 1, -1)
        if num_nodes < self.num_nodes:
            rows = F.pad(rows, (0, 0, 0, 0, 0, self.num_nodes - num_nodes))
        out = aggregate_snapshots(rows, self.get_matrices(operator, time, time + 1, weighted))
        return out[:num_nodes].reshape(x.shape)

    def describe(self) -> dict[str, Any]:
        """Sizes: snapshots, nodes, edges, bytes of matrices and of aggregated features held."""
        held = {id(m): m.num_bytes for m in self._matrices.values()}
        return {
            "snapshots": len(self.parts),
            "nodes": self.num_nodes,
            "edges": sum(part.edge_index.shape[1] for part in self.parts),
            "matrix_bytes": sum(held.values()),
            "aggregated_bytes": sum(t.numel() * t.element_size() for t in self._aggregated.values()),
        }


def _find_alike(parts: Sequence[Parts], time: int, first: int, last: int) -> tuple[int, int]:
    """The snapshots around `time` in [first, last) whose features have its width and that have any."""

    def width(part: Parts) -> Any:
        return None if part.x is None else (part.x.shape[1:], part.x.dtype)

    low, high = time, time + 1
    while low > first and width(parts[low - 1]) == width(parts[time]):
        low -= 1
    while high < last and width(parts[high]) == width(parts[time]):
        high += 1
    return low, high
