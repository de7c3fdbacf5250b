"""Keys of batches: all draws of a batch are functions of (seed, epoch, number of the batch)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.ops.sampling.draw_random import derive_key

_WORD = 2**64
# Takes the place of an epoch, for calls outside any epoch.
_DIRECT_CALLS = 2**63
_SHUFFLES = 2**63 + 1
_WORKERS = 2**63 + 2
_NORMS = 2**63 + 3
# Keys of so many batches are derived together, as one alone takes as long as the launch of a kernel.
_TOGETHER = 256


def check_seed(seed: int | None) -> int | None:
    """Return the unsigned 64-bit seed of an argument; None if draws follow torch's generator (see `draw_seed`)."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise ArgumentTypeError(f"seed must be an integer or None, got {seed!r}")
    return int(seed) % _WORD


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed, in [0, 2**63), from a generator; None is torch's own on the CPU.

    As a DataLoader of torch's draws one in each epoch, so that a program's later numbers are the same as there.
    """
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


class EpochKey(NamedTuple):
    """All that is random in an epoch follows from this.

    Attributes:
        seed: Seed of the loader; for one without, the seed drawn as the epoch began.
        epoch: Number of the epoch; 0 if `seed` was drawn for it alone.
    """

    seed: int
    epoch: int

    def of_batch(self, number: int) -> int:
        """Key of a batch of the epoch."""
        return batch_key(self.seed, self.epoch, number)

    def of_order(self) -> int:
        """Key of the order of the epoch's seeds."""
        return shuffle_key(self.seed, self.epoch)


def batch_key(seed: int, epoch: int, number: int) -> int:
    """Key of the batch `number` of an epoch."""
    return _batch_keys(seed, epoch, number // _TOGETHER)[number % _TOGETHER]


@functools.lru_cache(maxsize=64)
def _batch_keys(seed: int, epoch: int, block: int) -> list[int]:
    numbers = np.arange(_TOGETHER, dtype=np.uint64) + np.uint64(block * _TOGETHER)
    keys: list[int] = derive_key(seed, epoch, numbers).tolist()
    return keys


def call_key(seed: int | None, number: int) -> int:
    """Key of the call `number` of a sampler that is used outside an epoch.

    Without a seed one is drawn for the call from torch's generator, which torch seeds anew in worker processes.

    A worker process of a DataLoader has a copy of the sampler, which counts its own calls. There the key is a function
    of the seed too that torch gives the worker for an epoch. Otherwise all workers would draw the same in every epoch.
    """
    if seed is None:
        return int(derive_key(draw_seed(), _DIRECT_CALLS, 0))
    worker = torch.utils.data.get_worker_info()
    if worker is not None:
        seed = int(derive_key(seed, _WORKERS, worker.seed))
    return int(derive_key(seed, _DIRECT_CALLS, number))


def shuffle_key(seed: int, epoch: int) -> int:
    """Key of the order of an epoch's seeds."""
    return int(derive_key(seed, _SHUFFLES, epoch))


def norm_key(seed: int, number: int) -> int:
    """Key of the batch `number` among the batches that norms of nodes and edges are counted in."""
    return int(derive_key(seed, _NORMS, number))
