"""T-GCN (Zhao et al., 2019): a gated recurrent unit whose three inputs are convolutions of the same features.

`SharedGates` holds folded weights that the steps of a sequence share.

A3T-GCN (Bai et al., 2021) is attention over the states that a T-GCN gives for several periods.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv

from pyg_direct.dynamic.conv_operators import GCN
from pyg_direct.dynamic.nn.sparse_conv import convolve, locate
from pyg_direct.ops.snapshots.run_recurrent_cells import (
    fold_features,
    fold_gates,
    fold_states,
    mix,
    step_by_torch,
    step_folded,
    step_gated,
    suits_folded,
    suits_gpu,
)


class _Folded(NamedTuple):
    weights: Tensor
    parameters: list[Tensor]
    # State of the parameters at folding: the version of each, and whether it required a gradient.
    states: list[tuple[int, bool]]
    # True after gradients have returned through them, or if none will.
    is_spent: list[bool]


class SharedGates:
    """Folded parameters of a layer from `fold_gates`, shared by consecutive steps, each of which begins with the state
    of the one before. Gradients of all steps return to the parameters together.

    They are made again for other states, after a change of parameters, and after gradients have returned. The same
    holds if no gradients are taken, and if a CUDA graph is captured, which will be replayed with other parameters. A
    copy of a layer shares nothing.
    """

    def __init__(self) -> None:
        # The state after the last step, and its folded parameters: one tuple, for threads.
        self._last: tuple[weakref.ref[Tensor], _Folded] | None = None

    def __deepcopy__(self, memo: Any) -> SharedGates:
        return SharedGates()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedGates, ()

    def fold(self, state: Tensor, parameters: list[Tensor]) -> _Folded:
        """Return the folded parameters of a step that begins with `state`."""
        last = self._last
        if (
            last is not None
            and last[0]() is state
            and torch.is_grad_enabled()
            and _are(last[1], parameters)
            and not (state.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return last[1]
        is_spent = [False]
        weights = fold_gates(parameters, is_spent)
        if not weights.requires_grad:
            return _Folded(weights, parameters, [], [True])
        return _Folded(weights, parameters, [(p._version, p.requires_grad) for p in parameters], is_spent)

    def keep(self, state: Tensor, folded: _Folded) -> None:
        """Keep them for a step that begins with the state that this one returned."""
        self._last = None if folded.is_spent[0] else (weakref.ref(state), folded)


def _are(folded: _Folded, parameters: Sequence[Tensor]) -> bool:
    """Report whether these parameters would fold to the same now, with separate gradients."""
    return not folded.is_spent[0] and all(
        mine is own and (own._version, own.requires_grad) == state
        for mine, own, state in zip(folded.parameters, parameters, folded.states, strict=True)
    )


# Nodes, on a CPU and on a GPU, for which products take less time than the calls that would save some.
_FEW = {"cpu": 2**9, "cuda": 2**14}


class TGCN(torch.nn.Module):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    A gated recurrent unit whose inputs are graph convolutions (Zhao et al., 2019). The three convolutions see the same
    features and edges. So these are aggregated once, and if `pyg_direct.dynamic.stream` knows them, never again.

    Args:
        in_channels, out_channels: Features of a node, and of its state.
        improved, cached, add_self_loops: As in `GCNConv`.

    Example:
        >>> x, ring = torch.eye(3), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> TGCN(3, 4)(x, ring).shape
        torch.Size([3, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, improved: bool = False, cached: bool = False,
                 add_self_loops: bool = True) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.improved, self.cached, self.add_self_loops = improved, cached, add_self_loops
        for gate in ("z", "r", "h"):
            conv = GCNConv(in_channels, out_channels, improved=improved, cached=cached, add_self_loops=add_self_loops)
            self.add_module(f"conv_{gate}", conv)
            self.add_module(f"linear_{gate}", torch.nn.Linear(2 * out_channels, out_channels))
        self._shared = SharedGates()

    @property
    def operator(self) -> GCN:
        """Operator that aggregates the features."""
        return GCN(self.improved, self.add_self_loops)

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Tensor | None = None,  # noqa: N803
                H: Tensor | None = None) -> Tensor:  # noqa: N803 # fmt: skip
        """Return the next state from a snapshot's features and the state before.

        Args:
            X: Features, floats `[N, in_channels]`.
            edge_index: Edges, int64 `[2, E]`, sources first, or a transposed `SparseTensor`.
            edge_weight: A weight for each edge, floats `[E]`; None for 1.
            H: The state before, floats `[N, out_channels]`; None for zeros.

        Returns:
            The next state, floats `[N, out_channels]`.

        Raises:
            ArgumentError: the edges belong to a snapshot of a stream, and `X` has one dimension.
        """
        found = None if self.cached else locate(X, edge_index, edge_weight)
        if H is None:
            H = torch.zeros(X.shape[0], self.out_channels, dtype=X.dtype, device=X.device)  # noqa: N806
        if self.cached:
            # PyG then keeps the matrix of the first graph for all that follow.
            inputs = torch.cat([conv(X, edge_index, edge_weight) for conv in self._convs()], 1)
            return step_by_torch(self._fold_states(inputs), H, *fold_states(self._list_parameters()))
        window = None
        if found is not None and found.holds(X):
            window = found.plan.get_window(self.operator, found.weighted)
        parameters = self._list_parameters()
        if found is None or window is None:
            aggregated = convolve(X, edge_index, edge_weight, self.operator)
            if suits_folded(aggregated, H, parameters):
                folded = self._shared.fold(H, parameters)
                state = step_folded(aggregated, H, folded.weights)
                self._shared.keep(state, folded)
                return state
            if X.shape[0] <= _FEW.get(X.device.type, 0):
                return self._step_gate_by_gate(aggregated, H)
            return self.advance(aggregated, H)
        # Folded weights, and rows of snapshots, once for a frame.
        key = id(self), torch.is_grad_enabled()
        once = found.plan.once
        rows = once((*key, found.weighted, "rows"), lambda: window.unbind(0))[found.time]
        if suits_folded(rows, H, parameters):
            return step_folded(rows, H, once((*key, "folded"), lambda: fold_gates(parameters)))
        left = once((*key, "left"), lambda: fold_features(parameters))
        right = once((*key, "right"), lambda: fold_states(parameters))
        if suits_gpu(rows, H, left[0]):
            return step_gated(rows, H, *left, *right)
        # All snapshots of a frame in one product.
        inputs = once((*key, found.weighted), lambda: torch.nn.functional.linear(window, *left).unbind(0))
        return step_by_torch(inputs[found.time], H, *right)

    def advance(self, aggregated: Tensor, H: Tensor) -> Tensor:  # noqa: N803
        """Return the next state from aggregated features, and the state before.

        Args:
            aggregated: Features that `operator` has aggregated, floats `[N, in_channels]`.
            H: The state before, floats `[N, out_channels]`.

        Returns:
            The next state, floats `[N, out_channels]`.
        """
        parameters = self._list_parameters()
        if suits_folded(aggregated, H, parameters):
            return step_folded(aggregated, H, fold_gates(parameters))
        left, right = fold_features(parameters), fold_states(parameters)
        if suits_gpu(aggregated, H, left[0]):
            return step_gated(aggregated, H, *left, *right)
        return step_by_torch(torch.nn.functional.linear(aggregated, *left), H, *right)

    def _step_gate_by_gate(self, aggregated: Tensor, H: Tensor) -> Tensor:  # noqa: N803
        """Return the next state from aggregated features, in the fewest calls."""
        convs = self._convs()
        weight, bias = torch.cat([conv.lin.weight for conv in convs]), torch.cat([conv.bias for conv in convs])
        inputs = torch.nn.functional.linear(aggregated, weight, bias).split(self.out_channels, 1)
        linear_z, linear_r, linear_h = self._linears()
        update = linear_z(torch.cat([inputs[0], H], 1)).sigmoid()
        reset = linear_r(torch.cat([inputs[1], H], 1)).sigmoid()
        proposed = linear_h(torch.cat([inputs[2], H * reset], 1)).tanh()
        return mix(proposed, H, update)

    def _convs(self) -> list[Any]:
        return [self.conv_z, self.conv_r, self.conv_h]

    def _linears(self) -> list[Any]:
        return [self.linear_z, self.linear_r, self.linear_h]

    def _list_parameters(self) -> list[Tensor]:
        """List the parameters as `fold_gates` takes them."""
        convs, linears = self._convs(), self._linears()
        return [*[conv.lin.weight for conv in convs], *[conv.bias for conv in convs],
                *[linear.weight for linear in linears], *[linear.bias for linear in linears]]  # fmt: skip

    def _fold_states(self, convolved: Tensor) -> Tensor:
        """Return the part of the gates from convolved features `[N, 3 * out_channels]`."""
        parts = convolved.split(self.out_channels, 1)
        return torch.cat([
            torch.nn.functional.linear(part, linear.weight[:, : self.out_channels], linear.bias)
            for part, linear in zip(parts, self._linears(), strict=True)
        ], 1)  # fmt: skip


class A3TGCN(torch.nn.Module):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    Attention over the states that a T-GCN gives for several periods (A3T-GCN; Bai et al., 2021). All periods are
    aggregated at once.

    Args:
        in_channels, out_channels: Features of a node in a period, and of its state.
        periods: Number of periods.
        improved, cached, add_self_loops: As in `GCNConv`.

    Example:
        >>> x, ring = torch.ones(3, 2, 5), torch.tensor([[0, 1, 2], [1, 2, 0]])  # 5 periods
        >>> A3TGCN(2, 4, periods=5)(x, ring).shape
        torch.Size([3, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, periods: int, improved: bool = False,
                 cached: bool = False, add_self_loops: bool = True) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels, self.periods = in_channels, out_channels, periods
        self.improved, self.cached, self.add_self_loops = improved, cached, add_self_loops
        self._base_tgcn = TGCN(in_channels, out_channels, improved, cached, add_self_loops)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._attention = torch.nn.Parameter(torch.empty(periods, device=device))
        torch.nn.init.uniform_(self._attention)

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Tensor | None = None,  # noqa: N803
                H: Tensor | None = None) -> Tensor:  # noqa: N803 # fmt: skip
        """Return the attended state of features of all periods.

        Args:
            X: Features, floats `[N, in_channels, periods]`.
            edge_index: Edges, int64 `[2, E]`, sources first, or a transposed `SparseTensor`.
            edge_weight: A weight for each edge, floats `[E]`; None for 1.
            H: The state that every period begins with, floats `[N, out_channels]`; None for zeros.

        Returns:
            The attended state, floats `[N, out_channels]`.

        Raises:
            ArgumentError: the edges belong to a snapshot of a stream, and `X` has one dimension.
        """
        shares = self._attention.softmax(0)
        cell = self._base_tgcn
        if self.cached:
            each = [cell(X[:, :, p], edge_index, edge_weight, H) for p in range(self.periods)]
            return torch.einsum("p,pnc->nc", shares, torch.stack(each))
        aggregated = convolve(X, edge_index, edge_weight, cell.operator)[:, :, : self.periods]
        if H is None:
            H = torch.zeros(X.shape[0], self.out_channels, dtype=X.dtype, device=X.device)  # noqa: N806
        # Every period starts from the same state, so periods act as more nodes.
        rows = aggregated.permute(2, 0, 1).flatten(0, 1)
        states = cell.advance(rows, H.repeat(self.periods, 1)).view(self.periods, *H.shape)
        return torch.einsum("p,pnc->nc", shares, states)
