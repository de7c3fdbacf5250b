"""Pairs of nodes whose edges a batch is sampled without, such as the links that it predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pyg_direct.graph.hetero import PlacedHetero
from pyg_direct.graph.relation import EdgeType
from pyg_direct.ops.upload import upload

# Sources and targets by relation, ids within their types, int64 `[2, P]`; pairs need not be edges.
Excluded: TypeAlias = Mapping[EdgeType, Tensor]


def list_pairs(topology: PlacedHetero, excluded: Sequence[Excluded]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List the pairs of several batches on the device that samples, int64 `[P]` each.

    Returns:
        (relation, node that the relation expands, its neighbor in the id space of all types, batch) of each pair;
        relations and batches by number.
    """
    topo, device = topology.topo, topology.device
    relations = {kind: number for number, kind in enumerate(topo.edge_types)}
    parts = [(relations[kind], batch, pairs) for batch, own in enumerate(excluded) for kind, pairs in own.items()
             if kind in relations and pairs.numel()]  # fmt: skip
    if not parts:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return none, none, none, none
    pairs = torch.cat([part.to(device) for *_, part in parts], 1)
    sizes = [part.shape[1] for *_, part in parts]
    numbers, batches = np.array([part[:2] for part in parts], np.int64).T
    own = np.stack([numbers, topo.type_starts[topo.reached[numbers]], batches])
    relation, first, batch = upload(np.repeat(own, sizes, 1), device).unbind()
    expanded, reached = (pairs[1], pairs[0]) if topo.direction == "in" else (pairs[0], pairs[1])
    return relation, expanded, reached + first, batch
