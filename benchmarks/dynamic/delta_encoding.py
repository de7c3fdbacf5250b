"""Edges of a snapshot encoded as changes since the previous one, and their decoding on the device (ESDG, SC'21).

Plans do not use this encoding, as it does not win (case `dynamic_delta`). Measured on 8 snapshots, by the share of
edges that change per step: with 1 %, changes take 8 % fewer bytes than the union that plans send. With 2 % they take no
fewer, and with 5 % a fifth more. In addition, each snapshot would have to be merged and sliced on the device. On a GPU
with enough room, structures are made there and not sent at all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.dynamic.sequence_edges import Factors


class EdgeDelta(NamedTuple):
    """Changes from the edges of one snapshot to the edges of another.

    Attributes:
        removed: Positions among the earlier edges, int32 `[R]`, ascending.
        rows, cols: Targets and sources of added edges, int32 `[A]` each, in the order of their keys.
        weight: Weights, fp32: of the added edges `[A]`, of all edges `[E]` if weights of kept edges changed, or None if
            all are ones.
    """

    removed: Tensor
    rows: Tensor
    cols: Tensor
    weight: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Count the bytes to send."""
        return sum(4 * part.numel() for part in self if part is not None)

    def to(self, device: torch.device, non_blocking: bool = False) -> EdgeDelta:
        """Copy to a device."""
        return EdgeDelta(*(None if p is None else p.to(device, non_blocking=non_blocking) for p in self))  # type: ignore[arg-type]


def find_delta(before: Factors, after: Factors, num_nodes: int) -> EdgeDelta:
    """Find the changes between two snapshots of N nodes, on the device of both."""
    places = _locate(before.keys, after.keys)
    kept = places >= 0
    removed = (~kept).nonzero().view(-1)
    is_new = torch.ones(after.keys.numel(), dtype=torch.bool, device=after.keys.device)
    is_new[places[kept]] = False
    added = after.keys[is_new]
    rows = torch.div(added, max(1, num_nodes), rounding_mode="floor")
    weight = after.weight
    if weight is not None and before.weight is not None and torch.equal(weight[~is_new], before.weight[kept]):
        weight = weight[is_new]
    return EdgeDelta(removed.int(), rows.int(), (added - rows * num_nodes).int(), weight)


def _locate(keys: Tensor, among: Tensor) -> Tensor:
    """Find the position of each key among others, both ascending; -1 for missing keys."""
    if among.numel() == 0:
        return torch.full_like(keys, -1)
    places = torch.searchsorted(among, keys).clamp_(max=among.numel() - 1)
    return places.masked_fill_(among[places] != keys, -1)


def apply_delta(before: Factors, delta: EdgeDelta, num_nodes: int) -> tuple[Tensor, Tensor | None]:
    """Compute keys and weights of a snapshot from the previous one and the changes, on the device of both.

    Edges kept and edges added are both in order, so that they are merged and not sorted.
    """
    is_kept = torch.ones(before.keys.numel(), dtype=torch.bool, device=before.keys.device)
    is_kept[delta.removed.long()] = False
    kept, added = before.keys[is_kept], delta.rows.long() * num_nodes + delta.cols
    count = kept.numel() + added.numel()
    places = torch.searchsorted(kept, added) + torch.arange(added.numel(), device=added.device)
    is_new = torch.zeros(count, dtype=torch.bool, device=kept.device)
    is_new[places] = True

    def merge(old: Tensor, new: Tensor) -> Tensor:
        return old.new_empty(count).masked_scatter_(~is_new, old).masked_scatter_(is_new, new)

    weight = delta.weight
    if weight is not None and weight.numel() != count:
        old = torch.ones_like(kept, dtype=weight.dtype) if before.weight is None else before.weight[is_kept]
        weight = merge(old, weight)
    return merge(kept, added), weight
