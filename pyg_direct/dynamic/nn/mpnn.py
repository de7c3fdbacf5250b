"""MPNN-LSTM (Panagopoulos et al., 2021): two graph convolutions, then two recurrent layers over a window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from pyg_direct.dynamic.nn.convolve import Located, convolve, locate
from pyg_direct.dynamic.nn.mpnn_frame import Frame, Multiplier, OneSnapshot, RunTogether, suits_alone
from pyg_direct.dynamic.nn.recurrence import get_parameters, is_single, run_lstm
from pyg_direct.dynamic.operator import GCN

# Numbers of a layer in a snapshot, above which a frame's would take much memory while single ones fill any device.
_LARGE = 2**23


def _is_ordinary(norm: nn.BatchNorm1d, x: Tensor) -> bool:
    """Whether a layer is torch's own, in training, with statistics that kernels may write to."""
    running, visited = (norm.running_mean, norm.running_var), norm.num_batches_tracked
    return (
        type(norm) is nn.BatchNorm1d
        and not (norm._forward_hooks or norm._forward_pre_hooks)
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and all(value is not None and value.is_contiguous() for value in running)
        and visited is not None
        and (visited.dtype, visited.device, visited.numel()) == (torch.int64, x.device, 1)
    )


class MPNNLSTM(nn.Module):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    Two graph convolutions, then two recurrent layers over a window (Panagopoulos et al., AAAI 2021). The features of
    the snapshots of `pyg_direct.dynamic.stream` are aggregated once for all epochs; the snapshots of a frame go through
    all layers together.

    Args:
        in_channels, hidden_size: Features of a node, and of its representations.
        num_nodes, window: Nodes of a graph, and graphs that lie one after the other in the rows.
        dropout: Rate.
    """

    def __init__(self, in_channels: int, hidden_size: int, num_nodes: int, window: int, dropout: float) -> None:
        super().__init__()
        self.in_channels, self.hidden_size, self.num_nodes = in_channels, hidden_size, num_nodes
        self.window, self.dropout = window, dropout
        self._convolution_1 = GCNConv(in_channels, hidden_size)
        self._convolution_2 = GCNConv(hidden_size, hidden_size)
        self._batch_norm_1 = nn.BatchNorm1d(hidden_size)
        self._batch_norm_2 = nn.BatchNorm1d(hidden_size)
        self._recurrent_1 = nn.LSTM(2 * hidden_size, hidden_size, 1)
        self._recurrent_2 = nn.LSTM(hidden_size, hidden_size, 1)

    def _convolve(self, conv: Any, norm: nn.BatchNorm1d, x: Tensor, edge_index: Any,
                  edge_weight: Tensor | None) -> Tensor:  # fmt: skip
        rows = F.linear(convolve(x, edge_index, edge_weight, GCN()), conv.lin.weight, conv.bias)
        rows = norm(rows.relu())
        return F.dropout(rows, self.dropout) if self.training and self.dropout else rows

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:  # noqa: N803
        """The states of both recurrent layers after a window, beside features of its graphs.

        Args:
            X: Features of the graphs, one after the other, floats `[window * N, in_channels]`.
            edge_index: Edges, int64 `[2, E]`, sources first, or a transposed `SparseTensor`.
            edge_weight: A weight for each edge, floats `[E]`; None for 1.

        Returns:
            Floats `[N, 2 * hidden_size + in_channels + window - 1]`: both states, all features of the first graph, and
            the last feature of each that follows.

        Raises:
            ArgumentError: the edges are those of a snapshot of a stream, and `X` has one dimension.
        """
        found = locate(X, edge_index, edge_weight)
        if found is not None and found.holds(X) and self._goes_together(X):
            window = found.plan.get_window(GCN(), found.weighted)
            is_large = self.num_nodes * self.hidden_size > _LARGE
            if window is not None and not is_large:
                return self._take(window, found)
            # Draws of dropout are those of single calls.
            if self._rate() == 0 and suits_alone(X, self.hidden_size) and (X.is_cuda or not is_large):
                found.plan.finish(id(self))
                return self._run_alone(found, X)
        if found is not None:
            # What follows may read running statistics, and adds to them: those before come first.
            found.plan.finish(id(self))
        first = self._convolve(self._convolution_1, self._batch_norm_1, X, edge_index, edge_weight)
        second = self._convolve(self._convolution_2, self._batch_norm_2, first, edge_index, edge_weight)
        rows = self._by_graph(torch.cat([first, second], dim=1))
        rows, state_1 = run_lstm(self._recurrent_1, rows)
        _, state_2 = run_lstm(self._recurrent_2, rows)
        # All of the first graph, and the last feature of each that follows.
        given = self._by_graph(X)
        return torch.cat([state_1, state_2, given[0], *given[1:, :, -1:]], dim=1)

    def _by_graph(self, rows: Tensor) -> Tensor:
        """Rows `[B * window * N, C]` of one or more windows as those of each graph, `[window, B * N, C]`."""
        if self.window == 1:
            return rows.unsqueeze(0)
        apart = rows.view(-1, self.window, self.num_nodes, rows.shape[1]).transpose(0, 1)
        return apart.reshape(self.window, -1, rows.shape[1])

    def _norms(self) -> tuple[nn.BatchNorm1d, nn.BatchNorm1d]:
        return self._batch_norm_1, self._batch_norm_2

    def _goes_together(self, x: Tensor) -> bool:
        """Whether snapshots depend on each other through running statistics only, and all is as it was made: what was
        put in its place is for torch to take or refuse.
        """
        return (
            self.window == 1
            and x.numel() // self.in_channels == self.num_nodes > 1
            and self.dropout < 1
            and not torch.is_autocast_enabled(x.device.type)
            and all(_is_ordinary(norm, x) for norm in self._norms())
            and all(is_single(layer) for layer in (self._recurrent_1, self._recurrent_2))
            and all(
                isinstance(value, Tensor) and (value.dtype, value.device, value.shape) == (x.dtype, x.device, shape)
                for value, shape in self._list_shapes()
            )
        )

    def _list_shapes(self) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """Parameters and running statistics, and the shapes that they were made with."""
        size = self.hidden_size
        for conv, norm, width in (
            (self._convolution_1, self._batch_norm_1, self.in_channels),
            (self._convolution_2, self._batch_norm_2, size),
        ):
            yield conv.lin.weight, (size, width)
            for value in (conv.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var):
                yield value, (size,)
        for layer, width in ((self._recurrent_1, 2 * size), (self._recurrent_2, size)):
            shapes = (4 * size, width), (4 * size, size), (4 * size,), (4 * size,)
            yield from zip(get_parameters(layer), shapes, strict=True)

    def _take(self, window: Tensor, found: Located) -> Tensor:
        """What the snapshot gives, of all those of its frame, which are computed with the first that asks."""
        plan = found.plan
        key = id(self), torch.is_grad_enabled(), self.training, found.weighted
        rows, statistics, visited = plan.once(key, lambda: self._run_together(window, found))
        if not visited:
            plan.finish(id(self))
            plan.defer(lambda: self._update_statistics(statistics, visited), id(self))
        visited.append(found.time)
        out: Tensor = rows[found.time]
        return out

    def _run_alone(self, found: Located, x: Tensor) -> Tensor:
        """What a snapshot outside of frames gives: a frame of one, which takes fewer calls than its layers."""
        aggregated = found.plan.aggregate_features(GCN(), found.time, found.weighted)
        x = x.unsqueeze(0)
        return self._run(
            OneSnapshot(*found.plan.at(found.time)), found.weighted, aggregated.view(x.shape), x, self._norms()
        )[0]

    def _run_together(self, window: Tensor, found: Located) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[int]]:
        """Rows of each snapshot of a frame, means and variances of all, and a list for those that were asked for."""
        out = self._run(found.plan, found.weighted, window, found.plan.get_features())
        return out[:-4], out[-4:], []

    def _run(self, multiplier: Multiplier, weighted: bool, window: Tensor, x: Tensor,
             norms: tuple[nn.BatchNorm1d, ...] = ()) -> tuple[Tensor, ...]:  # fmt: skip
        """Rows of each snapshot, then means and variances of both layers unless `norms` are told."""
        first, second = self._norms()
        frame = Frame(multiplier, weighted, window, x, self._rate(), (first.eps, second.eps), norms)
        parameters: list[Tensor] = []
        pairs: Any = ((self._convolution_1, first), (self._convolution_2, second))
        for conv, norm in pairs:
            parameters += [conv.lin.weight, conv.bias, norm.weight, norm.bias]
        for layer in (self._recurrent_1, self._recurrent_2):
            parameters += get_parameters(layer)
        out: tuple[Tensor, ...] = RunTogether.apply(frame, *parameters)
        return out

    def _rate(self) -> float:
        return self.dropout if self.training else 0.0

    def _update_statistics(self, statistics: tuple[Tensor, ...], visited: list[int]) -> None:
        """Let running statistics see the snapshots that were asked for, in order, all in one step."""
        count, together = len(visited), visited == list(range(statistics[0].shape[0]))
        for norm, *seen in zip(self._norms(), statistics[::2], statistics[1::2], strict=True):
            assert norm.momentum is not None, "asked before"
            assert norm.num_batches_tracked is not None, "asked before"
            norm.num_batches_tracked.add_(count)
            ages = torch.arange(count - 1, -1, -1, dtype=seen[0].dtype, device=seen[0].device)
            shares = norm.momentum * (1 - norm.momentum) ** ages
            for running, rows in zip((norm.running_mean, norm.running_var), seen, strict=True):
                assert running is not None, "asked before"
                chosen = rows if together else torch.stack([rows[place] for place in visited])
                running.addmv_(chosen.t(), shares, beta=(1 - norm.momentum) ** count)
        visited.clear()
