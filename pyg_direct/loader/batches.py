"""Which positions of the input nodes make up each batch of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from pyg_direct.errors import IdError
from pyg_direct.loader.ranks import Share
from pyg_direct.ops.draw import permute
from pyg_direct.sampling.key import shuffle_key

# Batches whose seeds are cut out of an epoch's at once.
_TOGETHER = 64


class Seeds(NamedTuple):
    """The seeds of a batch: their positions among the input nodes, int64 `[B]`, and the nodes themselves, `[B]`; or
    both ends of links, `[B, 2]`."""

    positions: Tensor
    nodes: Tensor


def can_share(loader: DataLoader[Any]) -> bool:
    """Whether the order of an epoch follows from the loader's arguments, so that processes can share its batches."""
    batching, sampler = loader.batch_sampler, loader.sampler
    if type(batching) is not BatchSampler or batching.sampler is not sampler:
        return False
    count = len(loader.dataset)  # type: ignore[arg-type]
    # One of the user's may be over some of the input nodes.
    if type(sampler) is SequentialSampler:
        return len(sampler.data_source) == count
    return type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None \
        and len(sampler.data_source) == sampler.num_samples == count  # fmt: skip


def describe_batches(loader: DataLoader[Any]) -> dict[str, int | bool | str | None]:
    """What an epoch is cut into batches by, beside its seed; a state of a loader is of no use where one differs."""
    shuffle = type(loader.sampler) is RandomSampler if can_share(loader) else "by a sampler or generator"
    return {"num_seeds": len(loader.dataset), "batch_size": loader.batch_size,  # type: ignore[arg-type]
            "shuffle": shuffle, "drop_last": loader.drop_last}  # fmt: skip


def order_of_epoch(loader: DataLoader[Any], seed: int, epoch: int) -> Tensor | None:
    """Positions in the order of an epoch, int64 on the CPU; None when a sampler of the user's decides.

    Shuffling is a function of (seed, epoch), so that an epoch can be resumed and is equal on every machine.
    """
    if not can_share(loader):
        return None
    count = len(loader.dataset)  # type: ignore[arg-type]
    if type(loader.sampler) is SequentialSampler:
        return torch.arange(count, device="cpu")
    return permute(count, key=shuffle_key(seed, epoch), device=getattr(loader, "device", "cpu"))


def iterate_batches(loader: DataLoader[Any], seed: int, epoch: int, first: int, nodes: Tensor,
                    share: Share) -> Iterator[tuple[int, Seeds]]:  # fmt: skip
    """(number, seeds) of a process's batches of an epoch from its batch `first` on; `nodes` are the input nodes, `[S]`.

    Numbers are global: process r of w gets r, r + w, ... by its `share` or under a `DistributedSampler`, so that no two
    share keys.
    """
    if loader.generator is not None:
        # torch's own loaders draw a seed of their workers before an epoch's order.
        torch.empty((), dtype=torch.int64, device=loader.generator.device).random_(generator=loader.generator)
    stride, offset = 1, 0
    if isinstance(loader.sampler, DistributedSampler):
        stride, offset = loader.sampler.num_replicas, loader.sampler.rank
    order = order_of_epoch(loader, seed, epoch)
    if order is not None:
        assert loader.batch_size is not None
        # Looked up for the whole epoch at once, and cut into many batches at once.
        nodes_in_order = nodes.index_select(0, order)
        size = loader.batch_size
        end = len(order) // size * size if loader.drop_last else len(order)
        num_batches = -(-end // size)
        cut, parts = -1, []
        for number in map(share.number_of, range(first, share.count_steps(num_batches))):
            place = number % num_batches
            if place // _TOGETHER != cut:
                cut = place // _TOGETHER
                some = slice(cut * _TOGETHER * size, min((cut + 1) * _TOGETHER * size, end))
                parts = list(map(Seeds, *(ids[some].unsafe_split(size) for ids in (order, nodes_in_order))))
            positions, own = parts[place % _TOGETHER]
            # Batches hold them as `input_id`: a view would keep, and be saved with, the order of the whole epoch.
            yield number, Seeds(positions.clone(), own)
        return
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for number, positions in enumerate(_take(_draw_where_generators_are(source), share.num_steps)):
        if number >= first:
            chosen = torch.as_tensor(positions, dtype=torch.int64, device="cpu").reshape(-1)
            yield number * stride + offset, Seeds(chosen, _pick(nodes, chosen))


def _take(batches: Iterator[Any], count: int | None) -> Iterator[Any]:
    """As many batches as processes agreed on: the first ones anew where there are fewer; None for all."""
    given = []
    for positions in islice(batches, count):
        if count is not None:
            given.append(positions)
        yield positions
    if count is not None and given:
        yield from islice(cycle(given), count - len(given))


def _draw_where_generators_are(source: Any) -> Iterator[Any]:
    """What a sampler gives. Those of torch make tensors on its default device, which their generators need not be of:
    without one of the user's they make their own on the CPU.
    """
    sampler = source.sampler if type(source) is BatchSampler else source
    if not type(sampler).__module__.startswith("torch."):
        yield from source
        return
    generator, positions = getattr(sampler, "generator", None), iter(source)
    while True:
        with torch.device("cpu" if generator is None else generator.device):
            chosen = next(positions, None)
        if chosen is None:
            return
        yield chosen


def _pick(nodes: Tensor, positions: Tensor) -> Tensor:
    try:
        # Not by brackets, which wake torch's threads for a few thousand items.
        return nodes.index_select(0, positions)
    except IndexError as error:
        low, high = (int(v) for v in torch.aminmax(positions))
        raise IdError(f"the sampler must give positions of input nodes, in [0, {len(nodes)}), got "
                      f"{low if low < 0 else high}") from error  # fmt: skip
