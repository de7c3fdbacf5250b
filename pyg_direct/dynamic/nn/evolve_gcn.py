"""EvolveGCN (Pareja et al., 2020): a convolution whose weights a recurrent layer carries across snapshots.

`EvolveTogether` computes the weights of EvolveGCN-O for all snapshots of a frame, and their products with
aggregated features. The weights depend on each other but on no features. All their steps therefore come first, and
one product follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import GRU
from torch_geometric.nn import TopKPooling
from torch_geometric.nn.inits import glorot

from pyg_direct.dynamic.nn.recurrent_step import get_parameters, set_apart, step_gates, step_gates_backward, step_gru
from pyg_direct.dynamic.nn.sparse_conv import check_rows, convolve, convolve_located, convolve_plain, locate
from pyg_direct.dynamic.sequence_edges import GCN
from pyg_direct.ops.run_kernel import is_asked_again, pull_by_torch


class EvolveTogether(torch.autograd.Function):
    """Rows `[N, F]` of each snapshot and weights `[1, F, F]` of each, from those of the first and a GRU."""

    @staticmethod
    def forward(ctx: Any, aggregated: Tensor, weight: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        ctx.set_materialize_grads(False)
        of_input, of_state, bias, state_bias = parameters
        both = torch.cat([of_input, of_state]).t()
        states, kept = [weight[0]], []
        for _ in range(aggregated.shape[0]):
            from_input, from_state = (states[-1] @ both).chunk(2, 1)
            state, saved = step_gates(from_input, from_state, states[-1], bias, state_bias)
            states.append(state)
            kept.append(saved)
        ctx.save_for_backward(aggregated, weight, *parameters)
        ctx.states, ctx.kept = states, kept
        weights = torch.stack(states[1:])
        return *set_apart(torch.bmm(aggregated, weights)), *set_apart(weights.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        aggregated, _, of_input, of_state, *_ = ctx.saved_tensors
        if is_asked_again(grads):
            return pull_by_torch(_evolve_by_torch, ctx.saved_tensors, ctx.needs_input_grad, grads)
        window = aggregated.shape[0]
        back: Tensor | None = None
        gates: list[tuple[Tensor, Tensor]] = []
        last = 0
        for place in reversed(range(window)):
            of_rows, of_weight = grads[place], grads[window + place]
            if of_rows is not None:
                seen = aggregated[place].t()
                back = seen @ of_rows if back is None else torch.addmm(back, seen, of_rows)
            if of_weight is not None:
                back = of_weight[0] if back is None else back + of_weight[0]
            if back is None:
                continue
            last = last or place + 1
            of_gates, of_state_gates, back = step_gates_backward(back, ctx.kept[place])
            gates.append((of_gates, of_state_gates))
            back = torch.addmm(torch.addmm(back, of_gates, of_input), of_state_gates, of_state)
        if back is None:
            return None, *[None] * 5
        before = torch.cat(ctx.states[:last][::-1])
        whole = [torch.cat(parts) for parts in zip(*gates, strict=True)]
        return None, back.unsqueeze(0), *(part.t() @ before for part in whole), *(part.sum(0) for part in whole)


def _evolve_by_torch(aggregated: Tensor, weight: Tensor, *parameters: Tensor) -> list[Tensor]:
    """Compute `EvolveTogether` by torch's functions."""
    weights = [weight[0]]
    for _ in range(aggregated.shape[0]):
        weights.append(torch.gru_cell(weights[-1], weights[-1], *parameters))
    rows = [part @ weight for part, weight in zip(aggregated, weights[1:], strict=True)]
    return [*rows, *(weight.unsqueeze(0) for weight in weights[1:])]


_NARROW = (torch.bfloat16, torch.float16)


class _Evolve(torch.nn.Module):
    """Common base of both forms."""

    def __init__(self, in_channels: int, improved: bool, cached: bool, normalize: bool, add_self_loops: bool) -> None:
        super().__init__()
        self.in_channels, self.improved, self.cached = in_channels, improved, cached
        self.normalize, self.add_self_loops = normalize, add_self_loops
        self.initial_weight = torch.nn.Parameter(torch.empty(1, in_channels, in_channels))
        self.weight: Tensor | None = None

    @property
    def operator(self) -> GCN:
        """Operator that aggregates the features."""
        return GCN(self.improved, self.add_self_loops, self.normalize)

    def reset_parameters(self) -> None:
        """Draw the weights that evolution begins with."""
        glorot(self.initial_weight)

    def reinitialize_weight(self) -> None:
        """Restart evolution with the next snapshot."""
        self.weight = None

    def _convolve(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Tensor:
        assert self.weight is not None, "the weights evolve before they are used"
        weight = self.weight.squeeze(0)
        if torch.is_autocast_enabled(x.device.type) or (x.dtype in _NARROW and x.dtype == weight.dtype):
            return self._convolve_narrow(x, weight, edge_index, edge_weight)
        return convolve(x, edge_index, edge_weight, self.operator) @ weight

    def _convolve_narrow(self, x: Tensor, weight: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Tensor:
        """Convolve if a product has fewer bits than its addend: the sum then has as many bits as the addend."""
        found = locate(x, edge_index, edge_weight)
        # Without normalization, sums of features may be too large for a narrow product.
        if found is None or not self.normalize or not found.holds(x):
            ones = torch.get_default_dtype()
            return convolve_plain(x @ weight, edge_index, edge_weight, self.operator, ones)
        product = convolve_located(found, x, self.operator) @ weight
        wide = torch.get_default_dtype() if edge_weight is None else edge_weight.dtype
        return product.to(torch.promote_types(product.dtype, wide))


class _Steps:
    """Steps of a frame, all computed at once; each snapshot that asks takes the next.

    Args:
        window: Aggregated features, `[W, N, F]`.
    """

    def __init__(self, window: Tensor, layer: EvolveGCNO) -> None:
        self.window, self.taken, self.before = window, 0, layer.weight
        weight = layer.initial_weight if layer.weight is None else layer.weight
        out = EvolveTogether.apply(window, weight, *get_parameters(layer.recurrent_layer))
        self.rows, self.weights = out[: len(window)], out[len(window) :]

    def follow(self, weight: Tensor | None) -> bool:
        """Report whether the next step begins with these weights."""
        return self.taken < len(self.weights) and weight is self.before

    def take(self, place: int) -> tuple[Tensor, Tensor]:
        """Return the rows of the snapshot at a place of the frame, and the weights that they were convolved with."""
        step, self.taken, self.before = self.taken, self.taken + 1, self.weights[self.taken]
        weight = self.weights[step]
        return self.rows[step] if step == place else self.window[place] @ weight[0], weight


class EvolveGCNO(_Evolve):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    A convolution whose weights a recurrent layer carries from snapshot to snapshot (EvolveGCN-O; Pareja et al., AAAI
    2020). As in PyTorch Geometric Temporal, `weight` is carried on until `reinitialize_weight()`, across epochs too.

    Args:
        in_channels: Features of a node.
        improved, normalize, add_self_loops: As in `GCNConv`.
        cached: Without effect, as in PyTorch Geometric Temporal.

    Example:
        >>> x, ring = torch.eye(3), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> EvolveGCNO(in_channels=3)(x, ring).shape
        torch.Size([3, 3])
    """

    def __init__(self, in_channels: int, improved: bool = False, cached: bool = False, normalize: bool = True,
                 add_self_loops: bool = True) -> None:  # fmt: skip
        super().__init__(in_channels, improved, cached, normalize, add_self_loops)
        self.recurrent_layer = GRU(in_channels, in_channels, 1)
        for parameter in self.recurrent_layer.parameters():
            parameter.requires_grad = True
            parameter.retain_grad()
        self.reset_parameters()

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:  # noqa: N803
        """Return features convolved with the weights of the next step.

        Args:
            X: Features, floats `[N, in_channels]`.
            edge_index: Edges, int64 `[2, E]`, sources first, or a transposed `SparseTensor`.
            edge_weight: A weight for each edge, floats `[E]`; None for 1.

        Returns:
            The convolved features, floats `[N, in_channels]`.

        Raises:
            ArgumentError: the edges belong to a snapshot of a stream, and `X` has one dimension.
        """
        found = locate(X, edge_index, edge_weight)
        if found is not None and found.holds(X) and not torch.is_autocast_enabled(X.device.type):
            window = found.plan.get_window(self.operator, found.weighted)
            if window is not None:
                key = id(self), torch.is_grad_enabled(), found.weighted
                steps = found.plan.once(key, lambda: _Steps(window, self))
                if steps.follow(self.weight):
                    rows, self.weight = steps.take(found.time)
                    return rows
        weight = self.initial_weight if self.weight is None else self.weight
        self.weight = step_gru(self.recurrent_layer, weight, weight)
        return self._convolve(X, edge_index, edge_weight)


class EvolveGCNH(_Evolve):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    A convolution whose weights evolve by the features of snapshots (EvolveGCN-H; Pareja et al., AAAI 2020). The nodes
    with the highest scores, as many as there are channels, drive the weights with their features.

    Args:
        num_of_nodes: Number of nodes.
        in_channels: Features of a node.
        improved, normalize, add_self_loops: As in `GCNConv`.
        cached: Without effect, as in PyTorch Geometric Temporal.

    Example:
        >>> x, ring = torch.ones(3, 2), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> EvolveGCNH(num_of_nodes=3, in_channels=2)(x, ring).shape
        torch.Size([3, 2])
    """

    def __init__(self, num_of_nodes: int, in_channels: int, improved: bool = False, cached: bool = False,
                 normalize: bool = True, add_self_loops: bool = True) -> None:  # fmt: skip
        super().__init__(in_channels, improved, cached, normalize, add_self_loops)
        self.num_of_nodes = num_of_nodes
        self.ratio = in_channels / num_of_nodes
        self.pooling_layer = TopKPooling(in_channels, self.ratio)
        self.recurrent_layer = GRU(in_channels, in_channels, 1)
        self.reset_parameters()

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:  # noqa: N803
        """Return features convolved with the weights of the next step.

        Args:
            X: Features, floats `[N, in_channels]`.
            edge_index: Edges, int64 `[2, E]`, sources first, or a transposed `SparseTensor`.
            edge_weight: A weight for each edge, floats `[E]`; None for 1.

        Returns:
            The convolved features, floats `[N, in_channels]`.

        Raises:
            ArgumentError: the edges belong to a snapshot of a stream, and `X` has one dimension.
        """
        check_rows(X, edge_index)
        weight = self.initial_weight if self.weight is None else self.weight
        self.weight = step_gru(self.recurrent_layer, self._pool(X).unsqueeze(0), weight)
        return self._convolve(X, edge_index, edge_weight)

    def _pool(self, x: Tensor) -> Tensor:
        """Compute `pooling_layer` for one graph, without the edges that it also pools."""
        select = self.pooling_layer.select
        score = select.act((x * select.weight).sum(-1) / select.weight.norm(p=2, dim=-1))
        if self.ratio >= 1:
            count = int(self.ratio)
        else:
            # In single precision, as PyG counts.
            count = int((float(self.ratio) * torch.tensor(x.shape[0], device="cpu").to(score.dtype)).ceil())
        chosen = torch.sort(score, descending=True).indices[:count]
        return x[chosen] * score[chosen].unsqueeze(1)
