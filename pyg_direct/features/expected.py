"""How often sampling reads each row, computed from the graph instead of counted: the chance that a batch meets a node.

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
        indptr, indices: Topology: `csr_topo.indptr`, `csr_topo.indices`.
        input_nodes: Nodes that batches begin with, int32 or int64 `[S]`.
        num_neighbors: Fanout of each hop; -1 for all neighbors.
        batch_size: Of them in a batch.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    check_ids("input_nodes", input_nodes)
    # What they hold on a GPU would be waited for.
    (check_topology_kinds if isinstance(indptr, Tensor) and indptr.is_cuda else check_topology)(indptr, indices)
    num_nodes = indptr.numel() - 1
    fanouts = check_fanouts("num_neighbors", num_neighbors)
    input_nodes = check_ids("input_nodes", input_nodes.cpu(), num_nodes).long().to(indptr.device)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ArgumentError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    degree = indptr[1:] - indptr[:-1]
    chance = torch.zeros(num_nodes, device=indptr.device)
    if input_nodes.numel() == 0:
        return chance
    chance[input_nodes] = min(1.0, batch_size / input_nodes.numel())
    expanded = chance
    with Bar(len(fanouts) * indices.numel(), "ranking rows by expected reads", "edges") as bar:
        for fanout in fanouts:
            picks = 1.0 if fanout < 0 else (fanout / degree.clamp(min=1)).clamp(max=1.0)
            # Just below 1, whose logarithm there is none of.
            weights = -torch.log1p(-(expanded * picks).clamp(max=1 - 1e-6))
            after = 1 - (1 - chance) * torch.exp(-spread_values(indptr, indices, weights, bar))
            expanded, chance = after - chance, after
    return chance
