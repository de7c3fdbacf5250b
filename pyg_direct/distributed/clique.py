"""Where a graph in parts lies in the memories of GPUs that NVLink joins, or in that of one GPU. Collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.features.clique import PARTS
from pyg_direct.features.feature import Feature
from pyg_direct.graph.peers import spread_over_peers
from pyg_direct.graph.placed import PlacedTopology, interleave
from pyg_direct.ops.general import Rows
from pyg_direct.runtime.size import parse_size
from pyg_direct.runtime.spread import GRANULE


def move_arrays(arrays: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Arrays that all processes see, shared out over the GPUs of all of them."""
    filled = [array for array in arrays if array.numel()]
    # Objects go over the current GPU of each process, which need not be the one that samples.
    with torch.cuda.device(device):
        views = iter(spread_over_peers(filled, device) if filled else [])
    return [next(views) if array.numel() else array.to(device) for array in arrays]


def place_on_gpus(rows: Rows, device: torch.device, rank: int, size: int) -> PlacedTopology:
    """The rows of all nodes of a graph without types: each GPU has the offsets, and they share the neighbors.

    Args:
        rows: In memory that all processes see, or of the only one.
        device: A GPU.
        rank, size: This process, and their number.
    """
    indptr, (indices, edge_ids) = rows.indptr.to(device), rows[1:3]
    where = "cuda" if size == 1 else "peer"
    if not indices.numel() or not indices.dtype == edge_ids.dtype == torch.int32:
        both = move_arrays([indices, edge_ids], device) if size > 1 else [indices.to(device), edge_ids.to(device)]
        return PlacedTopology(indptr, both[0], both[1], where)
    if size == 1:
        pairs, neighbors, ids = interleave(indices, edge_ids, device)
        return PlacedTopology(indptr, neighbors, ids, where, pairs=pairs)
    # Of the others, only the sizes are read.
    halves = torch.stack([indices, edge_ids], 1) if rank == 0 else indices[:1, None].expand(indices.numel(), 2)
    (halves,) = move_arrays([halves], device)
    return PlacedTopology(indptr, halves[:, 0], halves[:, 1], where, pairs=halves.view(torch.int64).view(-1))


def make_feature(rows: Tensor, device: torch.device, size: int, device_cache_size: int | str, placement: str
                 ) -> Feature:  # fmt: skip
    """Rows that all processes see, hot ones shared out over their GPUs; of one process, as it has them.

    Args:
        rows: All of them, on the CPU.
        device: A GPU.
        size: Number of processes.
        device_cache_size: GPU memory of each, a share of it being one of its part of the rows.
        placement: Host memory of one process.
    """
    if size == 1:
        feature = Feature(device=device, device_cache_size=device_cache_size, placement=placement)
        return feature.from_cpu_tensor(rows)
    budget = fit_cache(rows.numel() * rows.element_size(), size, device_cache_size)
    shared: dict[str, Any] = {"device_list": "group", "cache_policy": "p2p_clique_replicate", "cold_policy": "pinned"}
    with torch.cuda.device(device):
        return Feature(device=device, device_cache_size=budget, **shared).from_cpu_tensor(rows)


def fit_cache(num_bytes: int, size: int, device_cache_size: int | str) -> int:
    """GPU memory in bytes that each of `size` processes gives to rows of so many bytes; of all rows where the sizes add
    up to them.
    """
    own = -(-num_bytes // size)
    budget = parse_size(device_cache_size, own)
    # All of them take whole chunks.
    return budget if budget < own else min(size * own, own + PARTS * GRANULE)
