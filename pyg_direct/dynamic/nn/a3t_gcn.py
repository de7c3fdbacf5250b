"""A3T-GCN (Bai et al., 2021): attention over the states that a T-GCN gives for several periods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_direct.dynamic.nn.sparse_conv import convolve
from pyg_direct.dynamic.nn.t_gcn import TGCN


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
