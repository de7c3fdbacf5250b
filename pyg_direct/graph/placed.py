"""Topology as kernels see it: three arrays readable by the device that samples, and where each of them lives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyg_direct.runtime.memory import Block, allocate_or_fall_back, move


@dataclass
class PlacedTopology:
    """Compressed rows on the way to a sampler.

    Attributes:
        indptr: int64 `[N + 1]`.
        indices: int32 or int64 `[E]`.
        edge_ids: int32 or int64 `[E]`, or `[0]` when the position of an edge is its id.
        placement: Where `indices` lie: `cuda`, `unified`, `pinned` or `cpu`.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor
    placement: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """E."""
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        """The device that samples."""
        return self.indptr.device

    def check_process(self) -> None:
        """Refuse use in a forked child of the process that placed the arrays."""
        for block in self.blocks:
            block.check_process()


def place_array(source: Tensor, placement: str, device: torch.device, what: str) -> tuple[Tensor, Tensor, Block | None]:
    """(view for the device, tensor to keep on the host side, block) of an array put into `placement`.

    The host-side tensor is the CPU view of the placed bytes where there is one, so that they are not held twice.
    """
    if placement == "cpu":
        return source.cpu(), source, None
    if placement == "cuda":
        return source.to(device), source, None
    if source.is_cuda:
        block = allocate_or_fall_back(source.numel() * source.element_size(), placement, device)
        on_cpu = block.view_on_cpu(source.dtype, source.shape)
        on_cpu.copy_(source)
    else:
        block, on_cpu = move(source, placement, device, what=what), source
    if block.placement == "cpu":
        return on_cpu, on_cpu, block
    return block.view_on_gpu(source.dtype, source.shape, device), on_cpu, block
