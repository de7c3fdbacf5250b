"""DCRNN (Li et al., 2018): a gated recurrent unit of diffusion convolutions in both directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_direct.dynamic.conv_operators import Walk, walk_against, walk_along
from pyg_direct.dynamic.nn.sparse_conv import Located, add_messages, convolve_located, locate
from pyg_direct.ops.snapshots.run_recurrent_cells import mix

_Step = Callable[[Tensor], Tensor]
_WALKS = Walk(), Walk(is_against=True)


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


class DCRNN(torch.nn.Module):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    A gated recurrent unit of diffusion convolutions in both directions (Li et al., ICLR 2018). The first diffusion step
    of features is made for several snapshots of `pyg_direct.dynamic.stream` at once, and the diffused features are
    kept. So only the state is diffused from step to step, once for the gates that share it. The adjacency is never made
    dense.

    Args:
        in_channels, out_channels: Features of a node, and of its state.
        K: Steps of the diffusion, including the one that stays.
        bias: Add a bias to convolutions; as in PyTorch Geometric Temporal, it must be True.

    Example:
        >>> x, ring = torch.eye(3), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> DCRNN(3, 4, K=2)(x, ring).shape
        torch.Size([3, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, K: int, bias: bool = True) -> None:  # noqa: N803
        super().__init__()
        self.in_channels, self.out_channels, self.K, self.bias = in_channels, out_channels, K, bias
        for gate in ("z", "r", "h"):
            self.add_module(f"conv_x_{gate}", DConv(in_channels + out_channels, out_channels, K, bias))

    def forward(self, X: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None,  # noqa: N803
                H: Tensor | None = None) -> Tensor:  # noqa: N803 # fmt: skip
        """Return the next state from a snapshot's features and the state before.

        Args:
            X: Features, floats `[N, in_channels]`.
            edge_index: Edges, int64 `[2, E]`, sources first.
            edge_weight: A weight for each edge, floats `[E]` or `[E, 1]`; None for 1.
            H: The state before, floats `[N, out_channels]`; None for zeros.

        Returns:
            The next state, floats `[N, out_channels]`.

        Raises:
            ArgumentError: the edges belong to a snapshot of a stream, and `X` has one dimension; or the numbers of
                weights and of edges differ, and `K` is more than 1.
            RuntimeError: an edge occurs several times or has weight 0, and `K` is more than 1.
        """
        found = locate(X, edge_index, edge_weight)
        if H is None:
            H = torch.zeros(X.shape[0], self.out_channels, dtype=X.dtype, device=X.device)  # noqa: N806
        steps: list[_Step] = []
        if found is not None:
            steps = [partial(convolve_located, found, operator=walk) for walk in _WALKS]
        elif self.K > 1:
            walks = (walk(edge_index, edge_weight) for walk in (walk_along, walk_against))
            steps = [partial(add_messages, edge_index=edges, weight=weight) for edges, weight in walks]
        if found is not None and found.holds(X) and self.K > 1:
            # The plan keeps the results of the first steps.
            firsts, key = [step(X) for step in steps], ("diffused", found.weighted, self.K)
            later = found.plan.keep(key, found.time, lambda: _go_on(X, firsts, steps, self.K)) if self.K > 2 else []
            features = _join_terms(X, firsts, later)
        else:
            features = _diffuse(X, steps, self.K)
        if found is not None and self.K > 1:
            _check_edges(found)
        state = _diffuse(H, steps, self.K)
        gates = self._combine([self.conv_x_z, self.conv_x_r], features, state).sigmoid()
        update, reset = gates.split(self.out_channels, 1)
        proposed = self._combine([self.conv_x_h], features, _diffuse(H * reset, steps, self.K)).tanh()
        return mix(proposed, H, update)

    def _combine(self, convs: list[Any], features: Tensor, state: Tensor) -> Tensor:
        """Return the results of convolutions, which are linear in the diffused features and state."""
        weight = torch.cat([_join(conv.weight) for conv in convs], 2)
        of_features, of_state = (w.flatten(0, 1) for w in weight.split([self.in_channels, self.out_channels], 1))
        out = features @ of_features + state @ of_state
        return out if convs[0].bias is None else out + torch.cat([conv.bias for conv in convs])


def _join(weight: Tensor) -> Tensor:
    """Return [2 K - 1, in, out]: both directions stay for their first step, so these weights are added."""
    return torch.cat([weight[:, 0].sum(0, keepdim=True), weight[:, 1:].flatten(0, 1)])


def _check_edges(found: Located) -> None:
    """Raise unless a snapshot's edges can be walked against; the edges of others in its group need not be."""
    refusal = found.plan.factorise(_WALKS[1], found.time, found.weighted).refusal
    if refusal is not None:
        raise RuntimeError(f"{refusal}, at snapshot {found.plan.tell_time(found.time)}")


def _diffuse(x: Tensor, steps: list[_Step], order: int) -> Tensor:
    """Return terms side by side, [N, (2 K - 1) C]."""
    if order == 1:
        return x
    firsts = [step(x) for step in steps]
    return _join_terms(x, firsts, _go_on(x, firsts, steps, order))


def _go_on(x: Tensor, firsts: list[Tensor], steps: list[_Step], order: int) -> list[Tensor]:
    """Return terms of each direction after its first, T_k = 2 A T_{k-1} - x."""
    later = []
    for step, term in zip(steps, firsts, strict=True):
        for _ in range(2, order):
            term = 2 * step(term) - x
            later.append(term)
    return later


def _join_terms(x: Tensor, firsts: list[Tensor], later: list[Tensor]) -> Tensor:
    """Return the rows, then the terms of each direction."""
    half = len(later) // 2
    return torch.cat([x, firsts[0], *later[:half], firsts[1], *later[half:]], 1)
