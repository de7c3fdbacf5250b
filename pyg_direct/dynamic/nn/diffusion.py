"""DCRNN (Li et al., 2018): a gated recurrent unit of diffusion convolutions in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_direct.dynamic.group import build_group
from pyg_direct.dynamic.nn.convolve import add_messages, locate
from pyg_direct.dynamic.operator import Sum
from pyg_direct.dynamic.plan import SnapshotPlan
from pyg_direct.dynamic.snapshot import order_edges
from pyg_direct.ops.snapshots import SnapshotMatrices, aggregate_snapshots

_Step = Callable[[Tensor], Tensor]


class DConv(torch.nn.Module):
    """Parameters of a diffusion convolution: `weight` [2, K, in_channels, out_channels] and `bias`."""

    def __init__(self, in_channels: int, out_channels: int, K: int, bias: bool = True) -> None:  # noqa: N803
        super().__init__()
        assert K > 0
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = torch.nn.Parameter(torch.empty(2, K, in_channels, out_channels))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        torch.nn.init.xavier_uniform_(self.weight)
        torch.nn.init.zeros_(self.bias)


def _walks(edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """(edges, their weights) of a step along the edges and of one against them.

    As in PyTorch Geometric Temporal: a step along weighs an edge by the degree of its source, one against them goes
    over the edges in the order of their targets, but takes the degrees in the order in which edges were given.
    """
    row, col = edge_index
    size = int(edge_index.max()) + 1 if edge_index.numel() else 0
    weight = torch.ones(row.numel(), device=row.device) if edge_weight is None else edge_weight
    merged, place = torch.unique(row * size + col, return_inverse=True)
    value = weight.new_zeros(merged.numel()).index_add_(0, place, weight)
    source, target = merged // max(1, size), merged % max(1, size)
    degree_out = weight.new_zeros(size).index_add_(0, source, value)
    degree_in = weight.new_zeros(size).index_add_(0, target, value)
    order = torch.argsort(target[value != 0], stable=True)
    against = torch.stack([target[value != 0][order], source[value != 0][order]])
    if against.shape[1] != row.numel():
        raise RuntimeError(
            f"edge_index must hold each edge once, with a weight other than 0: {row.numel()} edges are "
            f"{against.shape[1]} different ones"
        )
    return (edge_index, degree_out.reciprocal()[row]), (against, degree_in.reciprocal()[row])


def _build(plan: SnapshotPlan, time: int, weighted: bool) -> list[SnapshotMatrices]:
    part = plan.parts[time]
    weight = None if part.edge_weight is None or not weighted else part.edge_weight.cpu()
    factors = [
        Sum().factorise(order_edges(edges, shares, plan.num_nodes))
        for edges, shares in _walks(part.edge_index.cpu(), weight, plan.num_nodes)
    ]
    return [build_group([f], plan.num_nodes).to(plan.device) for f in factors]


class DCRNN(torch.nn.Module):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    The diffused features are kept for the snapshots of `pyg_direct.dynamic.stream`, so that only the state is diffused
    from step to step, once for the gates that share it; and the adjacency is never made dense.

    Args:
        in_channels, out_channels: Features of a node, and of its state.
        K: Steps of the diffusion, the one that stays included.
        bias: Whether convolutions have one; as there, it must be True.
    """

    def __init__(self, in_channels: int, out_channels: int, K: int, bias: bool = True) -> None:  # noqa: N803
        super().__init__()
        self.in_channels, self.out_channels, self.K, self.bias = in_channels, out_channels, K, bias
        for gate in ("z", "r", "h"):
            self.add_module(f"conv_x_{gate}", DConv(in_channels + out_channels, out_channels, K, bias))

    def forward(self, X: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None,  # noqa: N803
                H: Tensor | None = None) -> Tensor:  # noqa: N803 # fmt: skip
        """The next state, `[N, out_channels]`, of features `[N, in_channels]` and the state, zeros by default."""
        if H is None:
            H = torch.zeros(X.shape[0], self.out_channels, dtype=X.dtype, device=X.device)  # noqa: N806
        found = locate(X, edge_index, edge_weight)
        steps: list[_Step]
        if found is None:
            walks = _walks(edge_index, edge_weight, X.shape[0])
            steps = [lambda rows, walk=walk: add_messages(rows, *walk) for walk in walks]  # type: ignore[misc]
            features = _diffuse(X, steps, self.K)
        else:
            plan, time = found.plan, found.time
            matrices = plan.keep(("walks", found.weighted), time, lambda: _build(plan, time, found.weighted))
            steps = [lambda rows, m=m: _multiply(rows, m) for m in matrices]  # type: ignore[misc]
            if found.holds(X):
                features = plan.keep(("diffused", found.weighted, self.K), time, lambda: _diffuse(X, steps, self.K))
            else:
                features = _diffuse(X, steps, self.K)
        state = _diffuse(H, steps, self.K)
        gates = self._combine([self.conv_x_z, self.conv_x_r], features, state).sigmoid()
        update, reset = gates.split(self.out_channels, 1)
        proposed = self._combine([self.conv_x_h], features, _diffuse(H * reset, steps, self.K)).tanh()
        return torch.lerp(proposed, H, update)

    def _combine(self, convs: list[Any], features: Tensor, state: Tensor) -> Tensor:
        """What convolutions make of the diffused features and state, which they are linear in."""
        weight = torch.cat([_join(conv.weight) for conv in convs], 2)
        of_features, of_state = (w.flatten(0, 1) for w in weight.split([self.in_channels, self.out_channels], 1))
        out = features @ of_features + state @ of_state
        return out if convs[0].bias is None else out + torch.cat([conv.bias for conv in convs])


def _join(weight: Tensor) -> Tensor:
    """[2 K - 1, in, out]: both directions stay for their first step, so these weights are added."""
    return torch.cat([weight[:, 0].sum(0, keepdim=True), weight[:, 1:].flatten(0, 1)])


def _multiply(rows: Tensor, matrices: SnapshotMatrices) -> Tensor:
    padded = torch.nn.functional.pad(rows, (0, 0, 0, matrices.num_nodes - rows.shape[0]))
    return aggregate_snapshots(padded.unsqueeze(1), matrices).squeeze(1)[: rows.shape[0]]


def _diffuse(x: Tensor, steps: list[_Step], order: int) -> Tensor:
    """Terms side by side, [N, (2 K - 1) C]: the rows, then those of each direction, T_k = 2 A T_{k-1} - x from the
    third on.
    """
    out = [x]
    for step in steps:
        term = x
        for k in range(1, order):
            term = step(x) if k == 1 else 2 * step(term) - x
            out.append(term)
    return torch.cat(out, 1)
