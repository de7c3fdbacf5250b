"""The sparse half of a convolution: through the plan of the snapshot that the edges belong to, otherwise by PyG's
code.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch_geometric.nn import ChebConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_direct.dynamic.sequence_edges import GCN, Chebyshev, Operator, is_weighted
from pyg_direct.dynamic.snapshot import find_tag
from pyg_direct.dynamic.snapshot_plan import SnapshotPlan
from pyg_direct.errors import ArgumentError, ArgumentTypeError, warn
from pyg_direct.ops.run_kernel import is_transformed

_DTYPES = (torch.float32, torch.float64)


class Located(NamedTuple):
    """The snapshot that edges belong to, and True if its weights were given too."""

    plan: SnapshotPlan
    time: int
    weighted: bool

    def holds(self, x: Tensor) -> bool:
        """Report whether rows are the features of this snapshot, as they were given."""
        found = find_tag(x, "x")
        return found is not None and found.plan is self.plan and found.time == self.time


_told: set[str] = set()


def check_rows(x: Tensor, edge_index: Any) -> None:
    """Raise unless there are features and edges, and features of each node of the snapshot that edges belong to."""
    edges = find_tag(edge_index, "edge_index")
    if x is None or edge_index is None:
        _refuse_missing("x" if x is None else "edge_index", edges if x is None else find_tag(x, "x"))
    if edges is not None and x.dim() < 2:
        time = edges.plan.tell_time(edges.time)
        raise ArgumentError(f"x must have shape [N, F, ...] at snapshot {time}, got {tuple(x.shape)}")


def _refuse_missing(name: str, other: Any) -> NoReturn:
    """Refuse a snapshot that lacks features or edges, with its number if the other of both shows it."""
    where = "" if other is None else f" at snapshot {other.plan.tell_time(other.time)}"
    hint = "" if name == "x" else ", if only torch.empty(2, 0, dtype=torch.int64)"
    raise ArgumentTypeError(f"{name} must be given to the layer{where}, got None: give every snapshot {name}{hint}")


def locate(x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Located | None:
    """Return the snapshot of a stream that these edges and weights belong to; None for any others."""
    check_rows(x, edge_index)
    edges = find_tag(edge_index, "edge_index")
    if edges is None or x.dtype not in _DTYPES or x.device != edges.plan.device:
        return None
    if is_transformed():
        return None
    part = edges.plan.parts[edges.time]
    if edge_weight is None:
        # Edges without weights have weight one either way: treated as the others, so that they share work.
        return Located(edges.plan, edges.time, part.edge_weight is None and edges.plan.has_weights)
    if edge_weight.requires_grad and "weights" not in _told:
        _told.add("weights")
        warn("edge_weight asks for gradients: its snapshots are aggregated as PyG does it, one by one", UserWarning)
    weight = find_tag(edge_weight, "edge_weight")
    if weight is None or weight.plan is not edges.plan or weight.time != edges.time:
        return None
    return Located(edges.plan, edges.time, True) if is_weighted(part) else None


def convolve(x: Tensor, edge_index: Any, edge_weight: Tensor | None, operator: GCN | Chebyshev) -> Tensor:
    """Aggregate rows `[N, ...]` by an operator: kept ones for the features of a snapshot, otherwise computed."""
    found = locate(x, edge_index, edge_weight)
    if found is None:
        return convolve_plain(x, edge_index, edge_weight, operator)
    return convolve_located(found, x, operator)


def convolve_located(found: Located, x: Tensor, operator: Operator) -> Tensor:
    """Aggregate rows for a located snapshot."""
    if found.holds(x):
        kept = found.plan.aggregate_features(operator, found.time, found.weighted)
        return kept.view(x.shape)
    return found.plan.aggregate(operator, found.time, x, found.weighted)


def convolve_plain(x: Tensor, edge_index: Any, edge_weight: Tensor | None, operator: GCN | Chebyshev,
                   dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """Aggregate rows for edges of no plan by PyG's normalization and a sum; missing weights are ones of `dtype`."""
    if not isinstance(edge_index, Tensor):
        target, source, edge_weight = edge_index.coo()
        edge_index = torch.stack([source, target])
    num_nodes = x.shape[0]
    if isinstance(operator, Chebyshev):
        conv = ChebConv.__new__(ChebConv)
        lambda_max = operator.lambda_max
        edge_index, weight = ChebConv.__norm__(conv, edge_index, num_nodes, edge_weight, operator.normalization,
                                               lambda_max, dtype or x.dtype)  # fmt: skip
    elif operator.normalize:
        edge_index, weight = gcn_norm(edge_index, edge_weight, num_nodes, operator.improved, operator.add_self_loops,
                                      dtype=dtype or x.dtype)  # fmt: skip
    else:
        weight = edge_weight
    return add_messages(x, edge_index, weight)


def add_messages(x: Tensor, edge_index: Tensor, weight: Tensor | None) -> Tensor:
    """Add up rows of sources, weighted, by target."""
    messages = x.index_select(0, edge_index[0])
    if weight is not None:
        messages = messages * weight.view(-1, *[1] * (x.dim() - 1))
    # Under autocast they may be of another dtype than the rows.
    return messages.new_zeros(x.shape).index_add(0, edge_index[1], messages)


def expand_chebyshev(x: Tensor, edge_index: Any, edge_weight: Tensor | None, operator: Chebyshev,
                     order: int) -> list[Tensor]:  # fmt: skip
    """Return terms T_0 to T_{order - 1} of ChebConv; terms of a snapshot's features are kept."""
    found = locate(x, edge_index, edge_weight)
    if found is None or not found.holds(x):
        return _recur(x, order, lambda rows: convolve(rows, edge_index, edge_weight, operator))
    # The plan keeps the first; and not the features, which a program may write to after the layer.
    terms = _recur(x, min(order, 2), lambda rows: convolve_located(found, rows, operator))
    if order <= 2:
        return terms

    def make() -> list[Tensor]:
        return _go_on(terms, order, lambda rows: convolve_located(found, rows, operator))[2:]

    return [*terms, *found.plan.keep((operator, found.weighted, order), found.time, make)]


def _recur(x: Tensor, order: int, step: Any) -> list[Tensor]:
    return _go_on([x, step(x)] if order > 1 else [x], order, step)


def _go_on(terms: list[Tensor], order: int, step: Any) -> list[Tensor]:
    terms = list(terms)
    for _ in range(2, order):
        terms.append(2 * step(terms[-1]) - terms[-2])
    return terms
