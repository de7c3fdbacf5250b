"""Local ids of the nodes of a batch: within each type, seeds first, then hop after hop, ascending within a hop."""

from __future__ import annotations

import torch
from torch import Tensor


class SortedNumbering:
    """Numbers identities by sorting them; its memory depends on the batch alone.

    Args:
        type_ends: Where each type begins in the space of identities, and the end of the last, int64 `[T + 1]`.
    """

    def __init__(self, type_ends: Tensor) -> None:
        self._type_ends = type_ends
        self._known = type_ends.new_empty(0)
        self._locals = type_ends.new_empty(0)
        self._counts = [0] * (type_ends.numel() - 1)

    def start(self, seeds: Tensor, counts: list[int]) -> None:
        """Number the seeds: each type's, one after the other; of a repeated one, the first place counts."""
        places = torch.cat([torch.arange(count, device=seeds.device) for count in counts] or [seeds])
        known, order = seeds.sort(stable=True)
        is_first = torch.ones_like(known, dtype=torch.bool)
        is_first[1:] = known[1:] != known[:-1]
        self._known, self._locals = known[is_first], places[order[is_first]]
        self._counts = list(counts)

    def add(self, sources: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Number those of `sources` (identities, int64 `[E']`) that are new.

        Returns:
            The new identities, ascending; the local id of every source; and how many are new of each type.
        """
        met, places = torch.unique(sources, return_inverse=True)
        at = torch.searchsorted(self._known, met).clamp_(max=max(self._known.numel() - 1, 0))
        is_known = self._known[at] == met if self._known.numel() else torch.zeros_like(met, dtype=torch.bool)
        new = met[~is_known]
        bounds = torch.searchsorted(new, self._type_ends)
        ends = bounds.tolist()
        counts = [b - a for a, b in zip(ends, ends[1:], strict=False)]
        # A type's first new node follows those it has already.
        shifts = torch.tensor([had - end for had, end in zip(self._counts, ends, strict=False)], dtype=torch.int64)
        new_locals = torch.arange(new.numel(), device=new.device)
        new_locals += shifts.to(new.device).repeat_interleave(bounds.diff(), output_size=new.numel())
        locals_of_met = torch.empty_like(met)
        locals_of_met[~is_known] = new_locals
        locals_of_met[is_known] = self._locals[at[is_known]]
        self._known, order = torch.cat([self._known, new]).sort()
        self._locals = torch.cat([self._locals, new_locals])[order]
        self._counts = [had + count for had, count in zip(self._counts, counts, strict=True)]
        return new, locals_of_met[places], counts

    def find(self, sources: Tensor) -> Tensor:
        """Local id of every source, -1 for one without."""
        if not self._known.numel():
            return torch.full_like(sources, -1)
        at = torch.searchsorted(self._known, sources).clamp_(max=self._known.numel() - 1)
        return torch.where(self._known[at] == sources, self._locals[at], -1)
