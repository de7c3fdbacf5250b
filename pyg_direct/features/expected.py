"""How often sampling reads each row, computed from the graph instead of counted: the chance that a batch meets a node,
or samples an edge.

A node is met by a hop if one of the rows that the hop expands picks it, each with chance min(1, k / degree); chances of
different rows are taken for independent. One pass over the edges a hop, where a run that counts needs an epoch to tell
the rows of the middle apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.ops.check import check_fanouts, check_ids, check_topology, check_topology_kinds
from pyg_direct.ops.expected import spread_values
from pyg_direct.progress import Bar


def expected_reads(indptr: Tensor, indices: Tensor, input_nodes: Tensor, num_neighbors: Sequence[int],
                   batch_size: int) -> Tensor:  # fmt: skip
    """Chance of each node to be in a batch, float32 `[N]`, on the device of the topology. Pass it as
    `Feature(hotness=)`.

    Args:
        indptr: Row offsets, int64 `[N + 1]`: `csr_topo.indptr`.
        indices: Neighbors, int32 or int64 `[E]`: `csr_topo.indices`.
        input_nodes: Nodes that batches begin with, int32 or int64 `[S]`; one may be listed several times.
        num_neighbors: Fanout of each hop; -1 for all neighbors.
        batch_size: Of them in a batch.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    return _compute(indptr, indices, input_nodes, num_neighbors, batch_size)[0]


def expected_edge_reads(indptr: Tensor, indices: Tensor, input_nodes: Tensor, num_neighbors: Sequence[int],
                        batch_size: int, eid: Tensor | None = None) -> Tensor:  # fmt: skip
    """Chance of each edge to be in a batch, float32 `[E]` by edge id, on the device of the topology. Pass it as
    `Feature(hotness=)` for rows of edges. It takes 8 bytes an edge beside the result.

    An edge is sampled if a hop expands its target and picks it, with chance min(1, k / degree); as a batch expands a
    node once, the chances of its hops add up.

    Args:
        indptr, indices, input_nodes, num_neighbors, batch_size: See `expected_reads`.
        eid: Edge ids, int32 or int64 `[E]`: `csr_topo.eid`. None: the position of an edge is its id.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    picked = _compute(indptr, indices, input_nodes, num_neighbors, batch_size)[1]
    num_edges = indices.numel()
    # All edges of a target have one chance.
    reads = picked.repeat_interleave(indptr[1:] - indptr[:-1], output_size=num_edges)
    if eid is None:
        return reads
    eid = check_ids("eid", eid, num_edges)
    if eid.numel() != num_edges:
        raise ArgumentError(f"eid must hold an id for each of the {num_edges} edges, got {eid.numel()}")
    if eid.is_cuda and num_edges > 0:
        check_ids("eid", torch.stack(torch.aminmax(eid)).cpu(), num_edges)
    return torch.zeros_like(reads).index_copy_(0, eid.to(reads.device).long(), reads)


def _compute(indptr: Tensor, indices: Tensor, input_nodes: Tensor, num_neighbors: Sequence[int], batch_size: int
             ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(chance of each node to be in a batch, chance of each edge that leads to it), float32 `[N]` both."""
    check_ids("input_nodes", input_nodes)
    # What they hold on a GPU would be waited for.
    (check_topology_kinds if isinstance(indptr, Tensor) and indptr.is_cuda else check_topology)(indptr, indices)
    num_nodes = indptr.numel() - 1
    fanouts = check_fanouts("num_neighbors", num_neighbors)
    input_nodes = check_ids("input_nodes", input_nodes.cpu(), num_nodes).long().to(indptr.device)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ArgumentError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    degree = indptr[1:] - indptr[:-1]
    chance, picked = torch.zeros(2, num_nodes, device=indptr.device)
    if input_nodes.numel() == 0:
        return chance, picked
    copies = torch.zeros_like(chance).index_add_(0, input_nodes, torch.ones_like(chance[:1]).expand(len(input_nodes)))
    # Of a node that is listed several times, any of which brings it.
    chance = 1 - (1 - min(1.0, batch_size / input_nodes.numel())) ** copies
    expanded = chance
    with Bar(len(fanouts) * indices.numel(), "ranking rows by expected reads", "edges") as bar:
        for fanout in fanouts:
            picks = 1.0 if fanout < 0 else (fanout / degree.clamp(min=1)).clamp(max=1.0)
            picked = picked + expanded * picks
            # Just below 1, whose logarithm there is none of.
            weights = -torch.log1p(-(expanded * picks).clamp(max=1 - 1e-6))
            after = 1 - (1 - chance) * torch.exp(-spread_values(indptr, indices, weights, bar))
            expanded, chance = after - chance, after
    return chance, picked
