"""Common parts of convolutions that sum messages without a row for each: known edges, and checks of what they hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr
from torch_geometric.nn.dense.linear import Linear

from pyg_direct.nn import any_convolution
from pyg_direct.nn.any_convolution import KnownTargets
from pyg_direct.nn.dispatch import has_plain_messages
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.nn.trimming import has_hooks
from pyg_direct.ops.aggregate.sum_pairs import Pairs
from pyg_direct.ops.aggregate.sum_rows import DTYPES
from pyg_direct.ops.run_kernel import is_ordinary, runs_on_gpu

# Aggregations that are sums, up to a factor.
SUMS = (aggr.SumAggregation, aggr.MeanAggregation)


def find_changed(module: Any, kinds: tuple[type, ...]) -> str | None:
    """Return why the messages of a layer must be made; None if its state is PyG's, and its aggregation is of a kind."""
    if type(module.aggr_module) not in kinds:
        return f"{type(module.aggr_module).__name__} of its messages has no operator of its own"
    if not (has_plain_messages(module) and is_own(module.aggr_module)):
        return "hooks or a program's own steps look at its messages"
    return None


def find_slow(module: Any) -> str | None:
    """Return why functions of both ends' rows are left to torch on a CPU.

    On a core, PyG's code takes 0.8 to 1.3 times as long, because torch computes exponentials by vector instructions.
    """
    tensor = next(module.parameters(), None)
    return None if tensor is None or runs_on_gpu(tensor) else "a CPU gains nothing"


def is_own(part: Any) -> bool:
    """Report whether an aggregation has the methods of its class, and no hooks."""
    own = part.__dict__
    is_plain = "forward" not in own or any_convolution.is_routed(own["forward"])
    return is_plain and ("reduce" not in own or any_convolution.is_reduced(part)) and not has_hooks(part)


def is_matrix(module: Any) -> bool:
    """Report whether a module is exactly a matrix of torch or PyG, whose sizes are known."""
    return (
        type(module) in (torch.nn.Linear, Linear)
        and "forward" not in module.__dict__
        and not has_hooks(module)
        and not isinstance(module.weight, torch.nn.parameter.UninitializedParameter)
    )


def list_parts(network: Any) -> list[Any]:
    """Return the modules that a network calls one after the other; the network alone if this is not known."""
    is_plain = type(network) is torch.nn.Sequential and "forward" not in network.__dict__ and not has_hooks(network)
    return list(network) or [network] if is_plain else [network]


def count_first(module: Any, edge_index: Any, rows: Any, targets: Any) -> int | None:
    """Return to how many rows of targets the edges of a batch lead, the first ones; None if it is not known.

    Products with matrices that only messages read are needed for these alone, about a third of a batch.
    """
    if (
        not is_ordinary()
        or not all(isinstance(part, Tensor) and part.dim() == 2 for part in (rows, targets))
        # Sums with a bias then have another dtype than products with one.
        or torch.is_autocast_enabled(rows.device.type)
        or not has_plain_messages(module)
    ):
        return None
    batch = find_batch(edge_index)
    fits = batch is not None and batch.fits(edge_index, len(rows), len(targets))
    return batch.count_targets(edge_index) if batch is not None and fits else None


def find_slope(act: Any) -> float | None:
    """Return the factor of an activation for numbers below zero, 1 for none; None for any other activation."""
    if act is None or type(act) is torch.nn.Identity:
        return 1.0
    if type(act) not in (torch.nn.ReLU, torch.nn.LeakyReLU) or "forward" in act.__dict__ or has_hooks(act):
        return None
    return float(getattr(act, "negative_slope", 0.0))


def read_ends(given: Any) -> tuple[Any, Any]:
    """Return the rows of sources and of targets that `propagate` takes: a tensor is both; None for unknown ones."""
    if isinstance(given, Tensor):
        return given, given
    return tuple(given) if isinstance(given, (tuple, list)) and len(given) == 2 else (None, None)


def finish_sum(module: Any, known: KnownTargets, out: Tensor) -> Tensor:
    """Divide sums by the numbers of edges of each target if the layer takes means."""
    return (out * known.scale(len(out), out)).to(out.dtype) if type(module.aggr_module) is aggr.MeanAggregation else out


def is_given(known: KnownTargets, *given: Any) -> bool:
    """Report whether all of these are rows of one dtype that has operators, on the device of the edges."""
    return all(isinstance(rows, Tensor) and rows.dim() == 2 and rows.dtype == given[0].dtype and rows.dtype in DTYPES
               and rows.device == known.index.device for rows in given)  # fmt: skip


def pair_nodes(known: KnownTargets, num_sources: int, num_targets: int) -> Pairs:
    """Return the edges between rows of sources and of targets."""
    edges, by_source = known.edges, known.batch.transpose(known.edges, num_sources)
    return Pairs(known.indptr, edges.row, edges.target, num_targets, known.max_degree, by_source.indptr,
                 by_source.target)  # fmt: skip


def pair_edges(known: KnownTargets, num_targets: int) -> Pairs:
    """Return the edges between rows of edges, in the given order, and rows of targets."""
    place = known.count_edges()
    starts = known.batch.remember(
        ("starts", place.numel()), lambda: torch.arange(place.numel() + 1, dtype=place.dtype, device=place.device)
    )
    order = place if known.order is None else known.order
    return Pairs(known.indptr, order, known.edges.target, num_targets, known.max_degree, starts, known.index)
