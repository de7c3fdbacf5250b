"""Choice of the plan that serves a topology."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_cpu import CpuPlan
from pyg_direct.sampling.uniform_gpu import GpuPlan

Plan = CpuPlan | GpuPlan
# Loaders over one topology with equal recipes share a plan, as long as one of them lives.
_PLANS: WeakValueDictionary[tuple[int, Recipe], GpuPlan] = WeakValueDictionary()


def is_captured_on(device: torch.device) -> bool:
    """Report whether plans on a device are captured graphs, `GpuPlan`."""
    return device.type == "cuda" or SIMULATED


def open_plan(topology: PlacedTopology, recipe: Recipe) -> Plan:
    """Open the plan for a topology and a recipe; all of them give equal batches."""
    if not is_captured_on(topology.device):
        return CpuPlan(topology, recipe)
    plan = _PLANS.get((id(topology), recipe))
    if plan is None:
        # It keeps the topology, so that the id stays its own.
        plan = _PLANS[id(topology), recipe] = GpuPlan(topology, recipe)
    return plan
