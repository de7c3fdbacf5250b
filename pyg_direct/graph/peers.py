"""The arrays of a topology over the memories of a clique, where one GPU cannot hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_direct.runtime.group import give_to_host, has_group
from pyg_direct.runtime.peer import p2pCliqueTopo
from pyg_direct.runtime.spread import GRANULE, Spread

# Chunks of an array on each GPU.
_PARTS = 16


def spread_over_peers(arrays: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The arrays as `device` reads them, each shared out over the GPUs of its clique.

    In a `torch.distributed` group the clique is among the GPUs of its processes on this host, all of which call this;
    the arrays are then those of the first of them. Else it is among all GPUs of the host.

    Args:
        arrays: Tensors with items, anywhere.
        device: A GPU.

    Raises:
        MemoryLimitError: they do not fit the memory of the clique.
    """

    def make(devices: list[int]) -> list[tuple[list[int], list[Spread]]]:
        cliques = p2pCliqueTopo(devices).p2p_clique.values()
        return [(clique, [_spread(array, clique) for array in arrays]) for clique in cliques]

    if has_group():
        made = give_to_host(make, device.index)
    else:
        everyone = list(range(torch.cuda.device_count()))
        clique = next(c for c in p2pCliqueTopo(everyone).p2p_clique.values() if device.index in c)
        made = make(clique)
    spreads = next(spreads for clique, spreads in made if device.index in clique)
    return [spread.view(device.index).view(array.dtype).view(array.shape)
            for spread, array in zip(spreads, arrays, strict=True)]  # fmt: skip


def _spread(array: Tensor, clique: Sequence[int]) -> Spread:
    num_bytes = array.numel() * array.element_size()
    chunk_bytes = math.ceil(num_bytes / (_PARTS * len(clique) * GRANULE)) * GRANULE
    owners = [clique[number % len(clique)] for number in range(math.ceil(num_bytes / chunk_bytes))]
    spread = Spread.allocate(num_bytes, chunk_bytes, owners)
    # A copy from one GPU to another runs on the first, which must be the one that this memory is mapped for.
    index = array.device.index if array.is_cuda and array.device.index in clique else clique[0]
    array = array if array.device.index == index else array.cpu()
    spread.view(index).view(array.dtype).copy_(array.view(-1))
    torch.cuda.synchronize(index)
    return spread
