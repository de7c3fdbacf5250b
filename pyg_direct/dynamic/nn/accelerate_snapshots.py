"""`accelerate`: PyG's own convolutions in a model of snapshots aggregate through the plan of the snapshot.

A convolution keeps its class, parameters and hooks. Its instance gets its own `propagate`, or a `forward` if PyG
normalizes edges there. Every unusual case goes PyG's own way.

`patch` replaces PyTorch Geometric Temporal's recurrent layers under their own names, for unedited programs.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.dynamic import nn
from pyg_direct.dynamic.nn.gated_units import combine, make_chebyshev
from pyg_direct.dynamic.nn.sparse_conv import Located, convolve_located, expand_chebyshev, locate
from pyg_direct.dynamic.sequence_edges import GCN, Mean, Operator, Sum
from pyg_direct.errors import ArgumentTypeError, needs_extra
from pyg_direct.nn.dispatch import STEPS
from pyg_direct.nn.module_state import attach

_HOOKS = ("_propagate_forward_pre_hooks", "_propagate_forward_hooks", "_message_forward_pre_hooks",
          "_message_forward_hooks", "_aggregate_forward_pre_hooks", "_aggregate_forward_hooks",
          "_message_and_aggregate_forward_pre_hooks", "_message_and_aggregate_forward_hooks")  # fmt: skip


_OPERATORS: dict[type, Operator] = {aggr.SumAggregation: Sum(), aggr.MeanAggregation: Mean()}


def accelerate(model: torch.nn.Module) -> list[str]:
    """Let PyG's convolutions in a model share the work between snapshots of `pyg_direct.dynamic.stream`.

    It finds SAGEConv, GraphConv and GINConv with sums or means, GCNConv and ChebConv with sums. The first one's
    aggregate of a snapshot's features is kept for all epochs, and any other rows are aggregated by the plan's sparse
    matrices. Results and gradients equal PyG's up to rounding. PyG's own code runs for subclasses, `cached=True`, other
    aggregations, hooks on messages, autocast, numbers that are not float32, and edges of no stream.

    Args:
        model: Any module; it is changed in place.

    Returns:
        Names of the convolutions that were changed.

    Raises:
        ArgumentTypeError: `model` is no module.

    Example:
        >>> from torch_geometric.nn import GCNConv
        >>> accelerate(torch.nn.ModuleList([GCNConv(4, 8), torch.nn.Linear(8, 1)]))
        ['0']
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    changed = []
    for name, module in model.named_modules():
        own = _OWN.get(type(module))
        # An override by another acceleration stays.
        if own is not None and not {"forward", "propagate"} & module.__dict__.keys():
            attach(module, **{own.__name__: own})
            changed.append(name)
    return changed


def _locate(module: Any, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Located | None:
    """Return the snapshot, if the convolution is exactly a product with its matrix."""
    if (
        not isinstance(x, Tensor)
        or x.dim() != 2
        or x.dtype != torch.float32
        or torch.is_autocast_enabled(x.device.type)
        or torch.compiler.is_compiling()
        or (module.flow, module.node_dim) != ("source_to_target", -2)
        or getattr(module, "decomposed_layers", 1) > 1
        or getattr(module, "explain", False)
        or not module.__dict__.keys().isdisjoint(STEPS)
        or any(getattr(module, hooks, None) for hooks in _HOOKS)
    ):
        return None
    found = locate(x, edge_index, edge_weight)
    return found if found is not None and found.plan.parts[found.time].num_nodes == x.shape[0] else None


def _is_sum(module: Any) -> bool:
    """Report whether messages are added up, as normalized ones are by default."""
    return type(module.aggr_module) is aggr.SumAggregation


def propagate(self: Any, edge_index: Any, size: Any = None, **inputs: Any) -> Tensor:
    """Override `propagate`: sums and means of neighbors."""
    pair, weight = inputs.get("x"), inputs.get("edge_weight")
    x = pair[0] if isinstance(pair, tuple) and pair[0] is pair[1] else None
    operator = _OPERATORS.get(type(self.aggr_module))
    found = None if operator is None or size is not None else _locate(self, x, edge_index, weight)
    if found is None or operator is None:
        out: Tensor = type(self).propagate(self, edge_index, size=size, **inputs)
        return out
    assert isinstance(x, Tensor), "found so"
    return convolve_located(found, x, operator)


class _GCN:
    def forward(self: Any, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Override `forward` of GCNConv."""
        found = None if self.cached or not _is_sum(self) else _locate(self, x, edge_index, edge_weight)
        if found is None:
            return conv.GCNConv.forward(self, x, edge_index, edge_weight)
        operator = GCN(self.improved, self.add_self_loops, self.normalize)
        # The rows that are kept, or the narrower ones.
        if found.holds(x) or self.in_channels <= self.out_channels:
            out = self.lin(convolve_located(found, x, operator))
        else:
            out = convolve_located(found, self.lin(x), operator)
        return out if self.bias is None else out + self.bias


class _Cheb:
    def forward(self: Any, x: Any, edge_index: Any, edge_weight: Tensor | None = None, batch: Tensor | None = None,
                lambda_max: Any = None) -> Tensor:  # fmt: skip
        """Override `forward` of ChebConv."""
        single = lambda_max is None or not isinstance(lambda_max, Tensor) or lambda_max.numel() == 1
        is_open = batch is None and single and _is_sum(self)
        found = _locate(self, x, edge_index, edge_weight) if is_open else None
        if found is None:
            return conv.ChebConv.forward(self, x, edge_index, edge_weight, batch, lambda_max)
        operator = make_chebyshev(self.normalization, lambda_max)
        terms = expand_chebyshev(x, edge_index, edge_weight, operator, len(self.lins))
        return combine([self], terms)[0]


_OWN: dict[type, Any] = {
    conv.GCNConv: _GCN.forward,
    conv.ChebConv: _Cheb.forward,
    **dict.fromkeys((conv.SAGEConv, conv.GraphConv, conv.GINConv), propagate),
}


_PACKAGE = "torch_geometric_temporal"
_replaced: list[tuple[ModuleType, str, Any]] = []


def patch() -> list[str]:
    """Make `torch_geometric_temporal` give accelerated layers, also in modules that imported it before; return their
    names.

    Existing models keep the layers they have.

    Raises:
        ModuleNotFoundError: PyTorch Geometric Temporal is not installed.
    """
    with needs_extra("patch", "temporal"):
        recurrent = importlib.import_module(f"{_PACKAGE}.nn.recurrent")
    theirs = {getattr(recurrent, name): getattr(nn, name) for name in nn.__all__ if hasattr(recurrent, name)}
    for module in [m for key, m in list(sys.modules.items()) if m is not None and not key.startswith("pyg_direct")]:
        for name in nn.__all__:
            value = vars(module).get(name)
            if isinstance(value, type) and value in theirs:
                _replaced.append((module, name, value))
                setattr(module, name, theirs[value])
    return sorted({name for _, name, _ in _replaced})


def unpatch() -> None:
    """Restore the original layers under the replaced names."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)
