"""Choice of the plan that serves a topology."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.ops.local_ids.relabel_nodes import choose_method
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_cpu import CpuPlan
from pyg_direct.sampling.uniform_gpu import GpuPlan, SortingPlan

Plan = CpuPlan | GpuPlan | SortingPlan
# Choosing by N alone assumes a batch so large that sorting it costs as much as scanning a bitmap.
_TYPICAL_EDGES = 1 << 20
# Loaders over one topology with equal recipes share a plan, as long as one of them lives.
_PLANS: WeakValueDictionary[tuple[int, Recipe], GpuPlan] = WeakValueDictionary()


def is_captured_on(device: torch.device) -> bool:
    """Report whether plans on a device are captured graphs, `GpuPlan`, unless there are too many nodes for bitmaps."""
    return device.type == "cuda" or SIMULATED


def open_plan(topology: PlacedTopology, recipe: Recipe, *, method: str = "auto") -> Plan:
    """Open the plan for a topology and a recipe; all of them give equal batches.

    Args:
        method: How nodes are numbered: `bitmap`, `sort`, or `auto` by the number of nodes.
    """
    if method == "auto":
        method = choose_method(topology.num_nodes, _TYPICAL_EDGES)
    if method == "sort":
        return SortingPlan(topology, recipe)
    if is_captured_on(topology.device):
        plan = _PLANS.get((id(topology), recipe))
        if plan is None:
            # It keeps the topology, so that the id stays its own.
            plan = _PLANS[id(topology), recipe] = GpuPlan(topology, recipe)
        return plan
    return CpuPlan(topology, recipe)
