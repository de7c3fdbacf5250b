"""GCLSTM (Chen et al., 2018) and GConvGRU (Seo et al., 2016): recurrent units of Chebyshev convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn import ChebConv
from torch_geometric.nn.inits import glorot, zeros

from pyg_direct.dynamic.conv_operators import Chebyshev
from pyg_direct.dynamic.nn.sparse_conv import check_rows, expand_chebyshev
from pyg_direct.ops.snapshots.run_recurrent_cells import mix


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
