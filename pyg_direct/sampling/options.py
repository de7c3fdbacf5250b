"""What the general sampler samples around seeds: PyG's options, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pyg_direct.errors import ArgumentError
from pyg_direct.graph.hetero import HeteroTopo
from pyg_direct.graph.relation import EdgeType
from pyg_direct.ops.check import check_fanouts
from pyg_direct.sampling.sample import check_hops, largest_fanout

# Keys of hops must differ from each other only; the bound keeps plans comparable with those of homogeneous graphs.
_MAX_HOPS = 31
_SUBGRAPHS = ("directional", "bidirectional", "induced")
_STRATEGIES = ("uniform", "last")
_COMPARISONS = ("<=", "<")


@dataclass(frozen=True)
class GeneralRecipe:
    """What is sampled around seeds.

    Attributes:
        fanouts: Neighbors a node, per hop, -1 for all; or these for each relation.
        replace: Draw with replacement.
        disjoint: Each seed gets a tree of its own: a node met from two seeds stands twice. Always so with times.
        subgraph_type: `directional`: the edges sampled. `bidirectional`: these in both directions, once each.
            `induced`: all edges of the graph among the nodes sampled (of one tree, and allowed by time).
        temporal_strategy: `uniform`: allowed edges are equally likely (or by weight). `last`: the latest are taken;
            of equal times those that come later in the row.
        time_comparison: `<=`: edges up to the time of the seed are allowed, as in PyG. `<`: before it.
        time_window: Only edges after the seed's time minus this are allowed; None for no limit.
        weighted: Choose edges by their weights; without effect where the topology has none.
    """

    fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]]
    replace: bool = False
    disjoint: bool = False
    subgraph_type: str = "directional"
    temporal_strategy: str = "uniform"
    time_comparison: str = "<="
    time_window: int | None = None
    weighted: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (("subgraph_type", self.subgraph_type, _SUBGRAPHS),
                                   ("temporal_strategy", self.temporal_strategy, _STRATEGIES),
                                   ("time_comparison", self.time_comparison, _COMPARISONS)):  # fmt: skip
            if value not in known:
                raise ArgumentError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        window = self.time_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or not 0 <= window < 2**63):
            raise ArgumentError(f"time_window must be None or an integer in [0, 2**63), got {window!r}")

    @cached_property
    def max_degree(self) -> int | None:
        """Upper bound of the edges of one relation that a node of a sample has; None where all neighbors are taken."""
        return largest_fanout(self.fanouts.values() if isinstance(self.fanouts, Mapping) else [self.fanouts])

    def table(self, topo: HeteroTopo) -> np.ndarray:
        """Fanouts by hop and relation, int64 `[H, R]`.

        Raises:
            ArgumentError: a relation that is unknown or missing, or relations with different numbers of hops.
        """
        fanouts = self.fanouts
        if not isinstance(fanouts, Mapping):
            fanouts = dict.fromkeys(topo.edge_types, fanouts)
            # A graph without relations has hops too.
            check_fanouts("fanouts", self.fanouts)  # type: ignore[arg-type]
        for edge_type in fanouts:
            if edge_type not in topo.edge_types:
                raise ArgumentError(f"fanouts must name known relations, got {edge_type} of {topo.edge_types}")
        for edge_type in topo.edge_types:
            if edge_type not in fanouts:
                raise ArgumentError(f"fanouts must name every relation, {edge_type} is missing")
        rows = [check_fanouts(f"fanouts[{edge_type}]", fanouts[edge_type]) for edge_type in topo.edge_types]
        hops = {len(row) for row in rows}
        if len(hops) > 1:
            raise ArgumentError(f"fanouts must have the same number of hops for every relation, got {sorted(hops)}")
        if not rows and not isinstance(self.fanouts, Mapping):
            return np.zeros((len(self.fanouts), 0), np.int64)
        num_hops = hops.pop() if hops else 0
        check_hops(rows[0] if rows else [], _MAX_HOPS, "fanouts")
        return np.array(rows, dtype=np.int64).reshape(len(rows), num_hops).T
