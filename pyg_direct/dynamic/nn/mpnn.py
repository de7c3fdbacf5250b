"""MPNN-LSTM (Panagopoulos et al., 2021): two graph convolutions, then two recurrent layers over a window."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from pyg_direct.dynamic.nn.convolve import Located, convolve, locate
from pyg_direct.dynamic.nn.recurrence import run_lstm
from pyg_direct.dynamic.operator import GCN

# Numbers of a layer in a snapshot, below which calls take longer than what they compute: then the snapshots of a frame
# share them, although gradients of snapshots that no loss sees are computed too.
_SMALL = 2**14


class MPNNLSTM(nn.Module):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    The features of the snapshots of `pyg_direct.dynamic.stream` are aggregated once for all epochs; small snapshots
    of a frame go through all layers together.

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
        """`[N, 2 * hidden_size + in_channels + window - 1]` of features `[window * N, in_channels]`."""
        found = locate(X, edge_index, edge_weight)
        if found is not None and found.holds(X) and self._goes_together(X):
            window = found.plan.get_window(GCN(), found.weighted)
            if window is not None:
                return self._take(window, found, X)
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

    def _goes_together(self, x: Tensor) -> bool:
        """Whether snapshots depend on each other through running statistics only, and are small."""
        norms = self._batch_norm_1, self._batch_norm_2
        return (
            self.window == 1
            and x.numel() // self.in_channels == self.num_nodes
            and self.num_nodes * self.hidden_size <= _SMALL
            and all(norm.training and norm.track_running_stats and norm.momentum is not None for norm in norms)
        )

    def _take(self, window: Tensor, found: Located, x: Tensor) -> Tensor:
        """What the snapshot gives, of all those of its frame, which are computed with the first that asks."""
        key = id(self), torch.is_grad_enabled(), self.training
        states, statistics = found.plan.once(key, lambda: self._run_together(window, found))
        norms: list[Any] = [self._batch_norm_1, self._batch_norm_2]
        for norm, (mean, variance) in zip(norms, statistics, strict=True):
            norm.num_batches_tracked.add_(1)
            norm.running_mean.lerp_(mean[found.time], norm.momentum)
            norm.running_var.lerp_(variance[found.time], norm.momentum)
        return torch.cat([states[found.time], x], 1)

    def _run_together(self, window: Tensor, found: Located) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor]]]:
        """States `[N, 2 * hidden_size]` of each snapshot of a frame, and what its rows are normalised by."""
        # The snapshots of a node side by side.
        rows = window.transpose(0, 1)
        layers: list[Tensor] = []
        statistics: list[tuple[Tensor, Tensor]] = []
        for conv, norm in ((self._convolution_1, self._batch_norm_1), (self._convolution_2, self._batch_norm_2)):
            if layers:
                rows = found.plan.aggregate_window(GCN(), rows, found.weighted)
            rows = F.linear(rows, conv.lin.weight, conv.bias).relu()
            rows, mean, variance = _normalise(norm, rows)
            statistics.append((mean, variance))
            rows = F.dropout(rows, self.dropout) if self.training and self.dropout else rows
            layers.append(rows)
        given = torch.cat(layers, 2).transpose(0, 1)
        rows, state_1 = run_lstm(self._recurrent_1, given.flatten(0, 1).unsqueeze(0))
        _, state_2 = run_lstm(self._recurrent_2, rows)
        return torch.cat([state_1, state_2], 1).view(*given.shape[:2], -1).unbind(0), statistics


def _normalise(norm: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[N, W, C]` normalised over the nodes of each snapshot, and means and unbiased variances `[W, C]`."""
    count, window, _ = rows.shape
    weight, bias = (None if p is None else p.repeat(window) for p in (norm.weight, norm.bias))
    out, mean, inverse = torch.native_batch_norm(rows.flatten(1), weight, bias, None, None, True, 0.0, norm.eps)
    variance = (inverse.detach() ** -2 - norm.eps) * (count / max(1, count - 1))
    return out.view(rows.shape), mean.detach().view(window, -1), variance.view(window, -1)
