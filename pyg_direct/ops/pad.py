"""Sampled batches in places of fixed size (see `kernels/pad.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.kernels import pad as kernels
from pyg_direct.ops.check import check_ids
from pyg_direct.ops.launch import grid_for, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.ops.upload import upload


def pad_edges(edge_index: Tensor, nodes: Sequence[int], edges: Sequence[int], node_places: Sequence[int],
              edge_places: Sequence[int], out: Tensor) -> None:  # fmt: skip
    """Write the edges of a batch to places of fixed size for each hop; nothing waits for the GPU.

    A node of hop h that is the i-th of its hop becomes the i-th of the places of hop h. Places left over hold loops of
    nodes behind those of the batch, shared out evenly among them; edges stay sorted by target.

    Args:
        edge_index: Local (source, target), int32 or int64 `[2, E]`, sorted by target; edges of hop h lead to the nodes
            of hop h.
        nodes: New nodes of each hop, seeds first, H + 1 numbers.
        edges: Edges of each hop, H numbers.
        node_places, edge_places: Places for both, as many numbers.
        out: `[2, sum(edge_places)]`, contiguous, of the dtype and device of `edge_index`.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    num_hops = len(edges)
    if not num_hops + 1 == len(nodes) == len(node_places) == len(edge_places) + 1:
        raise ArgumentError(f"nodes and node_places must have one number more than edges and edge_places, got "
                            f"{len(nodes)}, {len(node_places)}, {len(edges)} and {len(edge_places)}")  # fmt: skip
    if not fits(nodes, edges, node_places, edge_places):
        raise ArgumentError(f"node_places and edge_places must hold {list(nodes)} nodes and {list(edges)} edges, and "
                            f"a node more where edges are left over, got {list(node_places)} and "
                            f"{list(edge_places)}")  # fmt: skip
    if edge_index.shape != (2, sum(edges)) or out.shape != (2, sum(edge_places)) or not out.is_contiguous():
        raise ArgumentError(f"edge_index and out must be [2, {sum(edges)}] and [2, {sum(edge_places)}], got "
                            f"{tuple(edge_index.shape)} and {tuple(out.shape)}")  # fmt: skip
    if out.dtype != edge_index.dtype or out.device != edge_index.device:
        raise ArgumentError(f"out must be {edge_index.dtype} on {edge_index.device}, got {out.dtype} on {out.device}")
    if out.numel() == 0:
        return
    row, target = (check_ids("edge_index", ids, sum(nodes)) for ids in edge_index.unbind(0))
    # Lists of equal length.
    lists = (0, *accumulate(nodes)), (0, *accumulate(edges), 0), (0, *accumulate(node_places)), \
        (0, *accumulate(edge_places), 0)  # fmt: skip
    table = upload(torch.tensor([number for numbers in lists for number in numbers]), out.device)
    if runs_on_gpu(out):
        run_gpu(kernels.pad_edges_gpu, grid_for(sum(edge_places), out), row, target, table, num_hops, out.view(-1))
    else:
        run_cpu(kernels.pad_edges_cpu, row, target, table, num_hops, out.view(-1))


def fits(nodes: Sequence[int], edges: Sequence[int], node_places: Sequence[int], edge_places: Sequence[int],
         most_edges: int | None = None) -> bool:  # fmt: skip
    """Whether a batch finds room, with at most `most_edges` of the edges left over for each of the nodes left over."""
    if any(count > places for count, places in zip((*nodes, *edges), (*node_places, *edge_places), strict=True)):
        return False
    for hop, (count, places) in enumerate(zip(edges, edge_places, strict=True)):
        spare_nodes, spare_edges = node_places[hop] - nodes[hop], places - count
        if spare_edges > 0 and (
            spare_nodes == 0 or (most_edges is not None and spare_edges > most_edges * spare_nodes)
        ):
            return False
    return True
