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
from pyg_direct.sampling.key import EpochKey

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
    shuffle = is_shuffled(loader) if can_share(loader) else "by a sampler or generator"
    return {"num_seeds": len(loader.dataset), "batch_size": loader.batch_size,  # type: ignore[arg-type]
            "shuffle": shuffle, "drop_last": loader.drop_last}  # fmt: skip


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Whether a loader that `can_share` shuffles its input."""
    return type(loader.sampler) is RandomSampler


def order_of_epoch(loader: DataLoader[Any], key: EpochKey) -> Tensor:
    """Positions in the order of an epoch of a loader that `can_share`, int64 on the CPU.

    Shuffling is a function of the epoch's key, so that an epoch can be resumed and is equal on every machine.
    """
    count = len(loader.dataset)  # type: ignore[arg-type]
    if not is_shuffled(loader):
        return torch.arange(count, device="cpu")
    return permute(count, key=key.of_order(), device=getattr(loader, "device", "cpu"))


def open_positions(loader: DataLoader[Any]) -> Iterator[Any] | None:
    """What a sampler of the user's gives in an epoch that begins; None where the loader orders its input itself."""
    if can_share(loader):
        return None
    return _draw_where_generators_are(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def iterate_batches(loader: DataLoader[Any], key: EpochKey, first: int, nodes: Tensor, share: Share,
                    given: Iterator[Any] | None) -> Iterator[tuple[int, Seeds]]:  # fmt: skip
    """(number, seeds) of a process's batches of an epoch from its batch `first` on; `nodes` are the input nodes, `[S]`,
    and `given` is what `open_positions` gave.

    Numbers are global: process r of w gets r, r + w, ... by its `share` or under a `DistributedSampler`, so that no two
    share keys.
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
    for number, positions in enumerate(_take(given, share.num_steps)):
        if number >= first:
            chosen = torch.as_tensor(positions, dtype=torch.int64, device="cpu").reshape(-1)
            yield share.number_of(number) * stride + offset, Seeds(chosen, _pick(nodes, chosen))


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
        # Not by brackets, which wake torch's threads for a few thousand items.
        return nodes.index_select(0, positions)
    except IndexError as error:
        low, high = (int(v) for v in torch.aminmax(positions))
        raise IdError(f"the sampler must give positions of input nodes, in [0, {len(nodes)}), got "
                      f"{low if low < 0 else high}") from error  # fmt: skip
