"""Which batches of an epoch are this process's, where several train together."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.runtime.group import gather, has_group

UNEVEN = ("pad", "drop", "keep")


@dataclass(frozen=True)
class Share:
    """One process's part of the batches of an epoch: `rank`, `rank + count`, `rank + 2 * count`, ...

    The batches of an epoch and their numbers are the same for any `count`.

    Attributes:
        rank: This process, from 0.
        count: Number of processes.
        uneven: What happens where `count` does not divide the number of batches; see `NeighborLoader`.
        num_steps: Batches of this process, where processes with seeds of their own agreed on it; else None.
    """

    rank: int = 0
    count: int = 1
    uneven: str = "pad"
    num_steps: int | None = field(default=None, kw_only=True)

    def count_steps(self, num_batches: int) -> int:
        """Batches of this process."""
        if self.num_steps is not None:
            return self.num_steps
        if self.uneven == "drop":
            return num_batches // self.count
        if self.uneven == "keep":
            return max(0, -(-(num_batches - self.rank) // self.count))
        return -(-num_batches // self.count)

    def number_of(self, step: int) -> int:
        """Global number of the batch of a step; from the number of batches on, seeds are repeated to pad."""
        return self.rank + step * self.count


class Ranks:
    """The arguments `ranks` and `uneven` of a loader.

    Args:
        ranks: None for one process; `"auto"`: the process group, or what torchrun says, when an epoch starts, so that a
            loader may be made before the group and sent to other processes; or (rank, number of processes).
        uneven: `pad`, `drop` or `keep`.

    Attributes:
        num_steps: See `Share`; may be set while `ranks` is None.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """

    def __init__(self, ranks: Any, uneven: str) -> None:
        if uneven not in UNEVEN:
            raise ArgumentError(f"uneven must be one of {', '.join(UNEVEN)}, got {uneven!r}")
        if ranks is not None and ranks != "auto":
            is_pair = isinstance(ranks, (tuple, list)) and len(ranks) == 2
            if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) for n in ranks):
                raise ArgumentTypeError(f"ranks must be None, 'auto' or (rank, number of processes), got {ranks!r}")
            if not 0 <= ranks[0] < ranks[1]:
                raise ArgumentError(f"ranks must have a rank in [0, {ranks[1]}), got {ranks[0]}")
        self.ranks, self.uneven = ranks, uneven
        self.num_steps: int | None = None

    def resolve(self) -> Share:
        """This process's share, now."""
        if self.ranks is None:
            return Share(num_steps=self.num_steps)
        if self.ranks != "auto":
            return Share(self.ranks[0], self.ranks[1], self.uneven)
        if has_group():
            return Share(dist.get_rank(), dist.get_world_size(), self.uneven)
        # What torchrun sets; the program may come to its process group later, or need none.
        return Share(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), self.uneven)

    def agree_on_seed(self, seed: int, device: torch.device) -> int:
        """The seed of rank 0 in every process; called by all of them.

        Raises:
            ArgumentError: there is no process group to ask.
        """
        if self.resolve().count == 1:
            return seed
        if self.ranks != "auto" or not has_group():
            raise ArgumentError(f"seed must be given with ranks={self.ranks!r} and no process group, equal in every "
                                "process, got None")  # fmt: skip
        agreed: int = gather(seed, device if device.type == "cuda" else None)[0]
        return agreed
