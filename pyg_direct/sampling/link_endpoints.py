"""Link ends: the pairs of nodes whose edges a batch leaves out, and links as seeds of a plan on a GPU.

`list_pairs` lists the excluded pairs, such as the links that a batch predicts. `Ends` are links that a plan on a
GPU samples around: negatives are drawn in its graph, and the ends are placed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pyg_direct.graph.hetero_topo import EdgeType, PlacedHetero
from pyg_direct.ops.rows.upload import upload

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


class Ends:
    """The ends of links and of uniform negatives, as seeds of a plan with `unique_seeds`.

    Args:
        sources, targets: Nodes at either end of the links, int64 `[L]` on the CPU, checked before.
        more_sources, more_targets: Negatives at either end, drawn under the key of the batch as `draw_negatives` does.
        has_labels: Whether a label is wanted for each pair of a source and a target.
    """

    is_cuda = False

    def __init__(self, sources: Tensor, targets: Tensor, more_sources: int, more_targets: int,
                 has_labels: bool) -> None:  # fmt: skip
        self.sources, self.targets = sources, targets
        self.more_sources, self.has_labels = more_sources, has_labels
        self.num_links = sources.shape[0]
        self.num_pairs = self.num_links + more_sources
        self._count = self.num_pairs + self.num_links + more_targets

    def numel(self) -> int:
        """How many ends there are."""
        return self._count

    def __getitem__(self, place: int) -> Tensor:
        """Return a given end, by its place among all."""
        return self.sources[place] if place < self.num_links else self.targets[place - self.num_pairs]


class PlacedEnds(NamedTuple):
    """Places of the ends of links in a batch.

    Attributes:
        places: Local ids: sources, sources of negatives, targets, targets of negatives; int64 `[n]`.
        labels: 1 for given links and 0 for negatives, float32 `[L + negatives]`; empty unless asked for.
    """

    places: Tensor
    labels: Tensor
