"""Recurrent units whose gates are graph convolutions.

- T-GCN (Zhao et al., 2019): a gated recurrent unit whose three inputs are convolutions of the same features.
  `SharedGates` holds folded weights that the steps of a sequence share.
- A3T-GCN (Bai et al., 2021): attention over the states that a T-GCN gives for several periods.
- DCRNN (Li et al., 2018): a gated recurrent unit of diffusion convolutions in both directions.
- GCLSTM (Chen et al., 2018) and GConvGRU (Seo et al., 2016): recurrent units of Chebyshev convolutions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn import ChebConv, GCNConv
from torch_geometric.nn.inits import glorot, zeros

from pyg_direct.dynamic.nn.sparse_conv import (
    Located,
    add_messages,
    check_rows,
    convolve,
    convolve_located,
    expand_chebyshev,
    locate,
)
from pyg_direct.dynamic.sequence_edges import GCN, Chebyshev, Walk, walk_against, walk_along
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


def make_chebyshev(normalization: str | None, lambda_max: Tensor | float | None) -> Chebyshev:
    """Make the operator for these arguments of ChebConv."""
    return Chebyshev(normalization, None if lambda_max is None else float(lambda_max))


def combine(convs: list[Any], terms: list[Tensor]) -> list[Tensor]:
    """Return the results of Chebyshev convolutions from terms that they share: one product for all of them."""
    weight = torch.cat([torch.cat([lin.weight for lin in conv.lins], 1) for conv in convs])
    bias = None if convs[0].bias is None else torch.cat([conv.bias for conv in convs])
    return list(F.linear(torch.cat(terms, 1), weight, bias).chunk(len(convs), 1))


class _Cell(torch.nn.Module):
    """Constructor of the layers below, and of their convolutions."""

    def __init__(self, in_channels: int, out_channels: int, K: int, normalization: str | None = "sym",  # noqa: N803
                 bias: bool = True) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels, self.K = in_channels, out_channels, K
        self.normalization, self.bias = normalization, bias
        self._add_layers()

    def _add_layers(self) -> None:
        raise NotImplementedError

    def _add(self, name: str, channels: int) -> None:
        conv = ChebConv(channels, self.out_channels, K=self.K, normalization=self.normalization, bias=self.bias)
        self.add_module(name, conv)

    def _begin(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Return the state, zeros by default."""
        if state is not None:
            return state
        return torch.zeros(x.shape[0], self.out_channels, dtype=x.dtype, device=x.device)


class GCLSTM(_Cell):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    An LSTM whose state goes through Chebyshev convolutions (Chen et al., 2018). The four convolutions see the same
    state, which is aggregated once for all of them.

    Args:
        in_channels, out_channels: Features of a node, and of its state.
        K, normalization, bias: As in `ChebConv`.

    Example:
        >>> x, ring = torch.eye(3), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> hidden, cell = GCLSTM(3, 4, K=2)(x, ring)
        >>> hidden.shape, cell.shape
        (torch.Size([3, 4]), torch.Size([3, 4]))
    """

    def _add_layers(self) -> None:
        for gate in ("i", "f", "c", "o"):
            self._add(f"conv_{gate}", self.out_channels)
            self.register_parameter(f"W_{gate}", Parameter(torch.empty(self.in_channels, self.out_channels)))
            self.register_parameter(f"b_{gate}", Parameter(torch.empty(1, self.out_channels)))
        for gate in ("i", "f", "c", "o"):
            glorot(getattr(self, f"W_{gate}"))
        for gate in ("i", "f", "c", "o"):
            zeros(getattr(self, f"b_{gate}"))

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Tensor | None = None,  # noqa: N803
                H: Tensor | None = None, C: Tensor | None = None,  # noqa: N803
                lambda_max: Tensor | float | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the next state and cell state from a snapshot's features and those before.

        Args:
            X: Features, floats `[N, in_channels]`.
            edge_index: Edges, int64 `[2, E]`, sources first, or a transposed `SparseTensor`.
            edge_weight: A weight for each edge, floats `[E]`; None for 1.
            H: The state before, floats `[N, out_channels]`; None for zeros.
            C: The cell state before, floats `[N, out_channels]`; None for zeros.
            lambda_max: The largest eigenvalue of the Laplacian, a number, or a float tensor `[]`; None takes PyG's
                default, twice the Laplacian's largest entry.

        Returns:
            State and cell state, floats `[N, out_channels]` each.

        Raises:
            ArgumentError: the edges belong to a snapshot of a stream, and `X` has one dimension.
        """
        check_rows(X, edge_index)
        H, C = self._begin(X, H), self._begin(X, C)  # noqa: N806
        terms = expand_chebyshev(H, edge_index, edge_weight, make_chebyshev(self.normalization, lambda_max), self.K)
        gates = "ifco"
        from_state = combine([getattr(self, f"conv_{gate}") for gate in gates], terms)
        weight = torch.cat([getattr(self, f"W_{gate}") for gate in gates], 1)
        bias = torch.cat([getattr(self, f"b_{gate}") for gate in gates], 1)
        inputs = torch.addmm(bias, X, weight).chunk(4, 1)
        admit, forget, content, expose = (a + b for a, b in zip(inputs, from_state, strict=True))
        C = forget.sigmoid() * C + admit.sigmoid() * content.tanh()  # noqa: N806
        return expose.sigmoid() * C.tanh(), C


class GConvGRU(_Cell):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    A gated recurrent unit of Chebyshev convolutions (Seo et al., 2016). The convolutions of the features share one set
    of terms, which is kept for the snapshots of `pyg_direct.dynamic.stream`. The convolutions of the state share
    another.

    Args:
        in_channels, out_channels: Features of a node, and of its state.
        K, normalization, bias: As in `ChebConv`.

    Example:
        >>> x, ring = torch.eye(3), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> GConvGRU(3, 4, K=2)(x, ring).shape
        torch.Size([3, 4])
    """

    def _add_layers(self) -> None:
        for gate in ("z", "r", "h"):
            for kind, channels in (("x", self.in_channels), ("h", self.out_channels)):
                self._add(f"conv_{kind}_{gate}", channels)

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Tensor | None = None,  # noqa: N803
                H: Tensor | None = None, lambda_max: Tensor | float | None = None) -> Tensor:  # noqa: N803 # fmt: skip
        """Return the next state from a snapshot's features and the state before.

        Args:
            X: Features, floats `[N, in_channels]`.
            edge_index: Edges, int64 `[2, E]`, sources first, or a transposed `SparseTensor`.
            edge_weight: A weight for each edge, floats `[E]`; None for 1.
            H: The state before, floats `[N, out_channels]`; None for zeros.
            lambda_max: The largest eigenvalue of the Laplacian, a number, or a float tensor `[]`; None takes PyG's
                default, twice the Laplacian's largest entry.

        Returns:
            The next state, floats `[N, out_channels]`.

        Raises:
            ArgumentError: the edges belong to a snapshot of a stream, and `X` has one dimension.
        """
        check_rows(X, edge_index)
        H = self._begin(X, H)  # noqa: N806
        operator = make_chebyshev(self.normalization, lambda_max)

        def expand(rows: Tensor) -> list[Tensor]:
            return expand_chebyshev(rows, edge_index, edge_weight, operator, self.K)

        x_z, x_r, x_h = combine([self.conv_x_z, self.conv_x_r, self.conv_x_h], expand(X))
        h_z, h_r = combine([self.conv_h_z, self.conv_h_r], expand(H))
        update, reset = (x_z + h_z).sigmoid(), (x_r + h_r).sigmoid()
        proposed = (x_h + combine([self.conv_h_h], expand(H * reset))[0]).tanh()
        return mix(proposed, H, update)
