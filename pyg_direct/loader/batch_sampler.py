"""Batches of an epoch as positions of the input nodes, and the rank's share of them in distributed training."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.ops.argument_checks import check_choice
from pyg_direct.ops.sampling.draw_random import permute
from pyg_direct.runtime.comm.heartbeat import open_store
from pyg_direct.runtime.comm.host_group import gather, has_group
from pyg_direct.sampling.random_key import EpochKey

UNEVEN = ("pad", "drop", "keep")
# Numbers the loaders of a process whose batches the process group shares, so that equal loaders have equal numbers.
_NUMBERS = count()
# Seconds in which the store of the process group answers.
_PATIENCE = 60.0


@dataclass(frozen=True)
class Share:
    """A process's share of the batches of an epoch: `rank`, `rank + count`, `rank + 2 * count`, ...

    The batches of an epoch and their numbers do not depend on `count`.

    Attributes:
        rank: This process, from 0.
        uneven: Rule if `count` does not divide the number of batches; see `NeighborLoader`.
        num_steps: Batches of this process, if processes with own seeds agreed on it; otherwise None.
    """

    rank: int = 0
    count: int = 1
    uneven: str = "pad"
    num_steps: int | None = field(default=None, kw_only=True)

    def count_steps(self, num_batches: int) -> int:
        """Count the batches of this process."""
        if self.num_steps is not None:
            return self.num_steps
        if self.uneven == "drop":
            return num_batches // self.count
        if self.uneven == "keep":
            return max(0, -(-(num_batches - self.rank) // self.count))
        return -(-num_batches // self.count)

    def number_of(self, step: int) -> int:
        """Return the global number of the batch of a step; numbers beyond the last batch repeat seeds as padding."""
        return self.rank + step * self.count


class Ranks:
    """Arguments `ranks` and `uneven` of a loader.

    Args:
        ranks: None for one process, or (rank, number of processes). `"auto"` is the process group, otherwise torchrun's
            environment, at the start of an epoch; so a loader may be made before the group, and sent to other
            processes.
        uneven: `pad`, `drop` or `keep`.

    Attributes:
        num_steps: See `Share`; may be set while `ranks` is None.
    """

    def __init__(self, ranks: Any, uneven: str) -> None:
        check_choice("uneven", uneven, UNEVEN)
        if ranks is not None and ranks != "auto":
            is_pair = isinstance(ranks, (tuple, list)) and len(ranks) == 2
            if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) for n in ranks):
                raise ArgumentTypeError(f"ranks must be None, 'auto' or (rank, number of processes), got {ranks!r}")
            if not 0 <= ranks[0] < ranks[1]:
                raise ArgumentError(f"ranks must have a rank in [0, {ranks[1]}), got {ranks[0]}")
        self.ranks, self.uneven = ranks, uneven
        self.num_steps: int | None = None
        self._number = next(_NUMBERS) if ranks == "auto" else None
        self._is_compared = False

    def compare(self, arguments: Mapping[str, Any]) -> None:
        """Compare arguments of a loader with those of the first process that comes here, once; waits for nobody.

        Args:
            arguments: Those that must be equal in every process for the shares to be of one epoch, by name.

        Raises:
            ArgumentError: an argument differs from that of another rank.
        """
        if self._is_compared or self.ranks != "auto" or self.resolve().count == 1 or not has_group():
            return
        self._is_compared = True
        own = {**arguments, "uneven": self.uneven}
        # The store of torchrun's agent outlives the processes that it restarts.
        started = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
        key = hashlib.sha256(repr((started, self._number)).encode()).hexdigest()[:24]
        word = json.dumps([dist.get_rank(), own])
        try:
            rank, first = json.loads(open_store(_PATIENCE).compare_set(f"pyg_direct/loader/{key}", "", word))
        except (NotImplementedError, RuntimeError):
            # A store of the program's that cannot do it, or that is gone, as the collectives will say.
            return
        for name, value in own.items():
            if first[name] != value:
                raise ArgumentError(f"{name} must be equal in every process of ranks='auto', got {value!r} in rank "
                                    f"{dist.get_rank()} and {first[name]!r} in rank {rank}")  # fmt: skip

    def resolve(self) -> Share:
        """Return this process's share at this moment."""
        if self.ranks is None:
            return Share(num_steps=self.num_steps)
        if self.ranks != "auto":
            return Share(self.ranks[0], self.ranks[1], self.uneven)
        if has_group():
            return Share(dist.get_rank(), dist.get_world_size(), self.uneven)
        # torchrun's environment; the program may create its process group later, or need none.
        return Share(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), self.uneven)

    def agree_on_seed(self, seed: int, device: torch.device) -> int:
        """Return the seed of rank 0 in every process; collective."""
        if self.resolve().count == 1:
            return seed
        if self.ranks != "auto" or not has_group():
            raise ArgumentError(f"seed must be given with ranks={self.ranks!r} and no process group, equal in every "
                                "process, got None")  # fmt: skip
        agreed: int = gather(seed, device if device.type == "cuda" else None)[0]
        return agreed


# Seeds up to which two numbers of each are put in the epoch's order at once.
FEW_SEEDS = 1 << 24
# Batches whose seeds are cut out of the epoch's order at a time.
_TOGETHER = 64


class Seeds(NamedTuple):
    """Seeds of a batch: positions among the input nodes, int64 `[B]`, and the nodes, `[B]`.

    The nodes have their times beside them, `[B, 2]`, if the loader looks them up for a whole epoch; likewise both ends
    of links.
    """

    positions: Tensor
    nodes: Tensor


def can_share(loader: DataLoader[Any]) -> bool:
    """Check if the order of an epoch follows from the loader's arguments, so that processes can share its batches."""
    batching, sampler = loader.batch_sampler, loader.sampler
    if type(batching) is not BatchSampler or batching.sampler is not sampler:
        return False
    count = len(loader.dataset)  # type: ignore[arg-type]
    # A sampler of the user's may cover only some input nodes.
    if type(sampler) is SequentialSampler:
        return len(sampler.data_source) == count
    return type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None \
        and len(sampler.data_source) == sampler.num_samples == count  # fmt: skip


def describe_batches(loader: DataLoader[Any]) -> dict[str, int | bool | str | None]:
    """Describe the batches of an epoch, apart from its seed; a loader with another description cannot load a state."""
    shuffle = is_shuffled(loader) if can_share(loader) else "by a sampler or generator"
    return {"num_seeds": len(loader.dataset), "batch_size": loader.batch_size,  # type: ignore[arg-type]
            "shuffle": shuffle, "drop_last": loader.drop_last}  # fmt: skip


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Check if a loader that `can_share` shuffles its input."""
    return type(loader.sampler) is RandomSampler


def order_of_epoch(loader: DataLoader[Any], key: EpochKey) -> Tensor:
    """Compute the positions in the order of an epoch of a loader that `can_share`, int64 on the CPU.

    Shuffling is a function of the epoch's key, so that an epoch can be resumed and is equal on every machine.
    """
    count = len(loader.dataset)  # type: ignore[arg-type]
    if not is_shuffled(loader):
        return torch.arange(count, device="cpu")
    if getattr(loader, "_orders_as_torch", False) and loader.seed is None:  # type: ignore[attr-defined]
        # As torch's `RandomSampler`, from the seed that it would have drawn.
        return torch.randperm(count, generator=torch.Generator().manual_seed(key.seed), device="cpu")
    return permute(count, key=key.of_order(), device=getattr(loader, "device", "cpu"))


def open_positions(loader: DataLoader[Any]) -> Iterator[Any] | None:
    """Open the iterator of a user's sampler for the next epoch; None if the loader orders its input itself."""
    if can_share(loader):
        return None
    return _draw_where_generators_are(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def iterate_batches(loader: DataLoader[Any], key: EpochKey, first: int, nodes: Tensor, share: Share,
                    given: Iterator[Any] | None) -> Iterator[tuple[int, Seeds]]:  # fmt: skip
    """Iterate over (number, seeds) of a process's batches of an epoch, from its batch `first` on.

    `nodes` are the input nodes, `[S]`, and `given` is the result of `open_positions`. Numbers are global: process r of
    w gets r, r + w, ... by its `share` or under a `DistributedSampler`, so that no two share keys.
    """
    stride, offset = 1, 0
    if isinstance(loader.sampler, DistributedSampler):
        stride, offset = loader.sampler.num_replicas, loader.sampler.rank
    if given is None:
        order = order_of_epoch(loader, key)
        assert loader.batch_size is not None
        # Looked up for the whole epoch at once, and cut into many batches at once.
        nodes_in_order = nodes.index_select(0, order)
        size = loader.batch_size
        end = len(order) // size * size if loader.drop_last else len(order)
        num_batches = -(-end // size)
        cut, parts = (-1, -1), []
        for number in map(share.number_of, range(first, share.count_steps(num_batches))):
            place = number % num_batches
            # Batches that come again have memory of their own.
            if cut != (number // num_batches, place // _TOGETHER):
                cut = number // num_batches, place // _TOGETHER
                some = slice(cut[1] * _TOGETHER * size, min((cut[1] + 1) * _TOGETHER * size, end))
                # Copies, as batches hold them as `input_id`: views would keep, and save, the order of the whole epoch.
                copies: Any = torch.split_copy(order[some], size)  # type: ignore[func-returns-value]
                parts = list(map(Seeds, copies, nodes_in_order[some].unsafe_split(size)))
            yield number, parts[place % _TOGETHER]
        return
    for number, positions in enumerate(_take(given, share.num_steps)):
        if number >= first:
            chosen = torch.as_tensor(positions, dtype=torch.int64, device="cpu").reshape(-1)
            yield share.number_of(number) * stride + offset, Seeds(chosen, _pick(nodes, chosen))


def _take(batches: Iterator[Any], count: int | None) -> Iterator[Any]:
    """Take the agreed number of batches, repeating the first ones if there are fewer; None takes all."""
    given = []
    for positions in islice(batches, count):
        if count is not None:
            given.append(positions)
        yield positions
    if count is not None and given:
        yield from islice(cycle(given), count - len(given))


def _draw_where_generators_are(source: Any) -> Iterator[Any]:
    """Iterate over a sampler. torch's samplers create tensors on its default device, which may differ from their
    generator's device: without a generator of the user's they use the CPU.
    """
    sampler, positions = source.sampler if type(source) is BatchSampler else source, iter(source)
    if not type(sampler).__module__.startswith("torch."):
        return positions
    return _draw_on(getattr(sampler, "generator", None), positions)


def _draw_on(generator: Any, positions: Iterator[Any]) -> Iterator[Any]:
    while True:
        with torch.device("cpu" if generator is None else generator.device):
            chosen = next(positions, None)
        if chosen is None:
            return
        yield chosen


def _pick(nodes: Tensor, positions: Tensor) -> Tensor:
    try:
        # Not by indexing, which wakes torch's threads for a few thousand items.
        return nodes.index_select(0, positions)
    except IndexError as error:
        low, high = (int(v) for v in torch.aminmax(positions))
        raise IdError(f"the sampler must give positions of input nodes, in [0, {len(nodes)}), got "
                      f"{low if low < 0 else high}") from error  # fmt: skip
