"""MPNN-LSTM (Panagopoulos et al., 2021): two graph convolutions, then two recurrent layers over a window."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from pyg_direct.dynamic.nn.convolve import convolve
from pyg_direct.dynamic.nn.recurrence import run_lstm
from pyg_direct.dynamic.operator import GCN


class MPNNLSTM(nn.Module):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    The features of the snapshots of `pyg_direct.dynamic.stream` are aggregated once for all epochs.

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
