"""Layers that do not compute rows which the next layer drops.

PyG's models drop the outermost hop after each layer (`num_sampled_nodes_per_hop`), which was computed although no edge
leads there. An accelerated model knows before, and gives its convolutions the rows to compute, as PyG gives them in a
bipartite graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import module as modules
from torch_geometric.nn import conv
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.models import MLP
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils._trim_to_layer import TrimToLayer

from pyg_direct.nn.dispatch import is_plain, propagate
from pyg_direct.nn.module_state import attach, detach, is_attached
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.ops.run_kernel import is_recorded


class Kept(NamedTuple):
    """Rows of a layer's sources, and the rows of its targets that the next layer keeps, the first of them."""

    rows: Tensor
    kept: Tensor


class _Split(torch.autograd.Function):
    """Rows, and the first of them; their gradients are added in the memory for all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.num_kept = x.shape, num_kept
        return x.view_as(x), x.narrow(0, 0, num_kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, kept: Tensor | None) -> tuple[Tensor | None, None]:
        if kept is None or grad is None:
            return (grad if kept is None else F.pad(kept, (0, 0, 0, ctx.shape[0] - ctx.num_kept))), None
        if torch.is_grad_enabled():
            return grad + F.pad(kept, (0, 0, 0, ctx.shape[0] - ctx.num_kept)), None
        # Sums and matrices, the only operations of accelerated convolutions on rows, give new gradients.
        grad.narrow(0, 0, ctx.num_kept).add_(kept)
        return grad, None


# A row of their result depends only on that row of their input.
_BY_ROW = (torch.nn.Identity, torch.nn.Linear, torch.nn.Dropout, torch.nn.ReLU, torch.nn.LeakyReLU, torch.nn.PReLU,
           torch.nn.ELU, torch.nn.CELU, torch.nn.SELU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Mish, torch.nn.Tanh,
           torch.nn.Sigmoid, torch.nn.Softplus, torch.nn.Hardtanh, torch.nn.ReLU6)  # fmt: skip
_HOLDERS = (torch.nn.Sequential, torch.nn.ModuleList, MLP)


# Not for TorchScript, as PyG's own method.
@torch.jit.unused
def forward(self: Any, layer: int, num_sampled_nodes_per_hop: Any, num_sampled_edges_per_hop: Any, x: Any,
         edge_index: Any, edge_attr: Any = None) -> Any:  # fmt: skip
    """Override `forward` of the `TrimToLayer` of an accelerated model."""
    plain, nodes = type(self).forward, num_sampled_nodes_per_hop
    if is_recorded() or not isinstance(nodes, list) or not isinstance(x, Tensor):
        return plain(self, layer, nodes, num_sampled_edges_per_hop, x, edge_index, edge_attr)
    if 0 < layer < len(nodes) and x.shape[0] == sum(nodes[:-layer]):
        # Computed without the rows that are dropped now.
        full = x.new_empty(x.shape[0] + nodes[-layer], 0)
        _, edge_index, edge_attr = plain(self, layer, nodes, num_sampled_edges_per_hop, full, edge_index, edge_attr)
    else:
        x, edge_index, edge_attr = plain(self, layer, nodes, num_sampled_edges_per_hop, x, edge_index, edge_attr)
    convs = self._model.convs
    if layer + 1 < min(len(convs), len(nodes)) and x.shape[0] == sum(nodes[: len(nodes) - layer]):
        num_kept = x.shape[0] - nodes[-(layer + 1)]
        if _computes_rows(convs[layer], x, edge_index, num_kept):
            tracked = torch.is_grad_enabled() and x.requires_grad
            x = Kept(*_Split.apply(x, num_kept)) if tracked else Kept(x, x.narrow(0, 0, num_kept))
    return x, edge_index, edge_attr


def _computes_rows(module: Any, x: Tensor, edge_index: Any, num_kept: int) -> bool:
    """Report whether a convolution may be given rows and targets separately."""
    if not is_accelerated(module) or not is_plain(module, edge_index) or has_hooks(module) or x.dim() != 2:
        return False
    batch = find_batch(edge_index)
    return batch is not None and batch.fits(edge_index, x.shape[0], num_kept)


def is_accelerated(module: Any) -> bool:
    """Report whether a convolution aggregates through accelerated operators if it can."""
    return is_attached(module, "propagate", propagate)


def watch_trimming(model: Any) -> None:
    """Let a model of PyG compute no rows that it drops, if all steps between its convolutions are by row."""
    if not isinstance(model, BasicGNN) or type(model).forward is not BasicGNN.forward or model.jk_mode is not None:
        return
    trimming, between = model._trim, [*model.norms, model.dropout, *([] if model.act is None else [model.act])]
    if (type(trimming) is TrimToLayer and "forward" not in trimming.__dict__
            and all(type(module) in _BY_ROW for module in between)
            and all(is_accelerated(module) and _is_by_row(module) for module in model.convs)):  # fmt: skip
        attach(trimming, forward=forward, _model=model)


def _is_by_row(module: Any) -> bool:
    """Report whether a convolution processes its sums by row, and its weights serve sources and targets."""
    inner = getattr(module, "nn", None)
    parts = [] if inner is None else inner.modules()
    if isinstance(module, (conv.SAGEConv, conv.GATConv, conv.GraphConv)) and not isinstance(module.in_channels, int):
        return False
    return all(isinstance(part, _HOLDERS) or type(part) in _BY_ROW or is_linear(part) for part in parts)


def is_linear(module: Any) -> bool:
    """Report whether this is exactly one of PyG's matrices: programs may override its `forward`."""
    return type(module) is Linear and "forward" not in module.__dict__ and not has_hooks(module)


def has_hooks(module: Any) -> bool:
    """Report whether a hook reads the inputs or outputs of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks or has_global_hooks())  # fmt: skip


def has_global_hooks() -> bool:
    """Report whether a hook of torch reads the inputs or outputs of all modules."""
    return bool(modules._global_forward_pre_hooks or modules._global_forward_hooks or modules._global_backward_pre_hooks
                or modules._global_backward_hooks)  # fmt: skip


def forget_trimming(model: torch.nn.Module) -> None:
    """Undo `watch_trimming`, for a `TrimToLayer`."""
    if is_attached(model, "forward", forward):
        detach(model, "forward", "_model")
