"""A loop for each target of sorted edges, with GCN's weights, and sampled batches in places of fixed size.

See `kernels/aggregate/edge_layout.py`. No launch waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import sub
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.kernels.aggregate import edge_layout as kernels
from pyg_direct.ops.argument_checks import check_ids, check_same_device
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import grid_for, run_cpu, run_gpu, runs_on_gpu


class Looped(NamedTuple):
    """Edges sorted by target, the last of each target its loop.

    Attributes:
        indptr: Offsets of the targets, `[T + 1]`.
        row, target: Source and target of each edge, `[E + T]`.
        weight: Symmetric weights, `[E + T]`, or None.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    weight: Tensor | None


def add_loops(indptr: Tensor, row: Tensor, target: Tensor, num_targets: int,
              dtype: torch.dtype | None = None) -> Looped:  # fmt: skip
    """Append a loop to the edges of each target.

    Args:
        indptr: Offsets of the targets' edges, int32 or int64 `[T + 1]` or longer; those above E count as E.
        row, target: Source and target of each edge, `[E]`, of the dtype of `indptr`. Every target is below T.
        dtype: Also weigh the edges as GCN does, in float32 or float64: 1 / sqrt(d_source * d_target). The degree d
            counts the edges of a target that are no loops, and one loop. Existing loops stay, with weight 0.

    Returns:
        New edges; existing edges keep their order.
    """
    row, target, indptr = check_ids("row", row), check_ids("target", target), check_ids("indptr", indptr)
    check_same_device("row", row, "indptr", indptr)
    if not row.dtype == target.dtype == indptr.dtype or row.shape != target.shape:
        raise ArgumentError(f"row, target and indptr must be of one dtype, and the first two of one length, got "
                            f"{row.dtype} {tuple(row.shape)}, {target.dtype} {tuple(target.shape)}, "
                            f"{indptr.dtype}")  # fmt: skip
    if not 0 <= num_targets < indptr.numel():
        raise ArgumentError(f"num_targets must lie in [0, {indptr.numel() - 1}], got {num_targets}")
    num_edges = row.numel()
    on_gpu = runs_on_gpu(row)
    # No wait for a GPU.
    if num_edges > (num_edges * num_targets if on_gpu else int(indptr[num_targets])):
        raise ArgumentError(f"indptr must give every one of the {num_edges} edges a target below {num_targets=}")
    num_looped = num_edges + num_targets
    # A GPU does not detect edges that were written out of order: they leave places of the result empty.
    memory = (row.new_zeros if on_gpu else row.new_empty)(2 * num_looped + num_targets + 1)
    out_row, out_target, out_indptr = memory.split([num_looped, num_looped, num_targets + 1])
    if num_targets == 0:
        out_indptr.zero_()
    scale = torch.empty(0 if dtype is None else num_targets, dtype=dtype or torch.float32, device=row.device)
    if on_gpu:
        run_gpu(kernels.add_loops_gpu, grid_for(max(num_edges, num_targets), row), indptr, row, target, num_edges,
                num_targets, out_indptr, out_row, out_target, scale)  # fmt: skip
    else:
        run_cpu(kernels.add_loops_cpu, indptr, row, num_edges, out_indptr, out_row, out_target, scale)
    weight = None
    if dtype is not None:
        weight = torch.empty(num_looped, dtype=dtype, device=row.device)
        arrays = out_indptr, out_row, out_target, scale, weight
        if on_gpu:
            run_gpu(kernels.weigh_loops_gpu, grid_for(weight.numel(), row), *arrays)
        else:
            run_cpu(kernels.weigh_loops_cpu, *arrays)
    return Looped(out_indptr, out_row, out_target, weight)


class Targets(NamedTuple):
    """Targets of edges, if they are of another type than the sources. `nodes`: New ones of each hop, H + 1 numbers."""

    nodes: Sequence[int]
    places: Sequence[int]


def write_places(edge_index: Tensor, nodes: Sequence[int], edges: Sequence[int], node_places: Sequence[int],
                 edge_places: Sequence[int], out: Tensor, targets: Targets | None = None) -> None:  # fmt: skip
    """Write the edges of a batch to places of fixed size for each hop, without a wait for the GPU.

    `fits` must hold, and edges have the right form; only ids are checked. The i-th node of hop h takes the i-th place
    of hop h. Unused places of edges hold edges among nodes after the batch's, shared evenly among them; with one node
    type they are loops. Edges stay sorted by target.

    Args:
        edge_index: Local (source, target), int32 or int64 `[2, E]`, sorted by target; edges of hop h lead to the nodes
            of hop h.
        nodes: New nodes of each hop, seeds first, H + 1 numbers; of the sources' type.
        edges: Edges of each hop, H numbers.
        node_places, edge_places: Places for nodes and edges, as many numbers.
        out: `[2, sum(edge_places)]`, contiguous, of the dtype and device of `edge_index`.
        targets: Targets of the edges; None if they have the sources' type.
    """
    if out.numel() == 0:
        return
    num_hops, ends = len(edges), Targets(nodes, node_places) if targets is None else targets
    row, target = (check_ids("edge_index", ids, sum(counts))
                   for ids, counts in zip(edge_index.unbind(0), (nodes, ends.nodes), strict=True))  # fmt: skip
    # Lists of equal length.
    lists = [(0, *accumulate(counts)) for counts in (nodes, (*edges, 0), node_places, (*edge_places, 0), *ends)]
    table = upload(torch.tensor(list(chain.from_iterable(lists)), device="cpu"), out.device)
    if runs_on_gpu(out):
        run_gpu(kernels.pad_edges_gpu, grid_for(sum(edge_places), out), row, target, table, num_hops,
                int(targets is not None), out.view(-1))  # fmt: skip
    else:
        run_cpu(kernels.pad_edges_cpu, row, target, table, num_hops, int(targets is not None), out.view(-1))


def fits(nodes: Sequence[int], edges: Sequence[int], node_places: Sequence[int], edge_places: Sequence[int],
         most_edges: int | None = None, targets: Targets | None = None) -> bool:  # fmt: skip
    """Report whether a batch fits, with at most `most_edges` padding edges for each padding node."""
    # Without a call of Python for each number: a batch with types has hundreds.
    spare_sources = list(map(sub, node_places, nodes))
    spare_targets = spare_sources if targets is None else list(map(sub, targets.places, targets.nodes))
    spare_edges = list(map(sub, edge_places, edges))
    if min(spare_sources) < 0 or min(spare_targets) < 0 or min(spare_edges, default=0) < 0:
        return False
    for hop, spare in enumerate(spare_edges):
        # Edges between two types need a source too.
        if spare > 0 and (
            spare_targets[hop] == 0
            or (targets is not None and spare_sources[hop + 1] == 0)
            or (most_edges is not None and spare > most_edges * spare_targets[hop])
        ):
            return False
    return True
