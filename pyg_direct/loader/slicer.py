"""How batches take the attributes of a graph that are not rows in memory, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor, TensorFrame

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.features.rowfile import as_tensor
from pyg_direct.graph.pyg import as_rows
from pyg_direct.loader.pipeline import parts_of_frame

# Takes the part of an attribute that belongs to nodes or edges of these ids.
Slicer = Callable[[Any, Tensor], Any]


def find_learned(data: Any) -> str | None:
    """An attribute of nodes or edges that requires a gradient, as messages name it; None where there is none.

    Its rows carry the gradient to the graph, as in PyG, and are those after the optimizer's last step: so they are read
    when their batch is asked for.
    """
    for store in data.stores if isinstance(data, (Data, HeteroData)) else ():
        for key, value in store.items():
            if _is_learned(value) and (key == "adj_t" or store.is_node_attr(key) or store.is_edge_attr(key)):
                return f"data.{key}" if store._key is None else f"data[{store._key!r}].{key}"
    return None


def has_learned(batch: Any) -> bool:
    """Whether anything in a batch, or in a tuple of what a program made of it, carries a gradient."""
    if isinstance(batch, (Data, HeteroData)):
        batch = batch.stores
    elif isinstance(batch, Mapping):
        batch = [*batch.values()]
    return any(map(has_learned, batch)) if isinstance(batch, (tuple, list)) else _is_learned(batch)


def _is_learned(value: Any) -> bool:
    if isinstance(value, TensorFrame):
        return any(isinstance(part, Tensor) and part.requires_grad for part in parts_of_frame(value))
    # A method of sparse tensors that are not torch's.
    return bool(value.requires_grad() if isinstance(value, SparseTensor) else getattr(value, "requires_grad", False))


def choose_slicer(name: str, value: Any, dim: int, device: torch.device) -> Slicer | None:
    """How batches take an attribute of nodes or edges; None where its rows lie one after another, are not learned, and
    are placed.

    Args:
        name: For messages.
        value: The attribute.
        dim: Along which nodes or edges lie.
        device: The device of batches.

    Raises:
        ArgumentTypeError: an array that torch does not know, or a sparse layout other than of coordinates.
    """
    if isinstance(value, TensorFrame):
        # No matter of a kernel.
        return lambda value, ids: value[ids.to(value.device)].to(device)
    if not isinstance(value, (Tensor, np.ndarray)):
        return lambda value, ids: [value[i] for i in ids.tolist()]
    if has_rows(name, value) and dim in (0, -value.ndim):
        return None
    return partial(slice_along, dim, device)


def has_rows(name: str, value: Tensor | np.ndarray) -> bool:
    """Whether rows lie in memory one after another; a sparse tensor of coordinates is left to torch, and so are one
    that requires a gradient and PyG's `Index`, which stays one.

    Raises:
        ArgumentTypeError: an array that torch does not know, or another sparse layout.
    """
    if isinstance(value, Tensor):
        if value.layout not in (torch.strided, torch.sparse_coo):
            raise ArgumentTypeError(f"{name} must be dense or of layout torch.sparse_coo, got {value.layout}")
        return value.layout == torch.strided and not value.requires_grad and not hasattr(value, "as_tensor")
    try:
        as_tensor(value[:0])
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name} must have a dtype that torch knows, got {value.dtype}") from error
    return True


def slice_along(dim: int, device: torch.device, value: Any, ids: Tensor) -> Tensor:
    """Rows of a tensor or an array, with their gradient where they have one, on the device of batches."""
    tensor = as_tensor(value)
    if dim == 0 and getattr(tensor, "is_unified", False):
        # The GPU reads its rows, with or without a gradient.
        return tensor[ids].to(device)
    return tensor.index_select(dim, ids.to(tensor.device)).to(device)


def slice_adjacency(adj_t: Any, source: Tensor, target: Tensor, ids: Tensor | None, sizes: tuple[int, int]) -> Any:
    """The adjacency of the edges of a batch, of the kind that the graph has, compressed by row.

    Args:
        adj_t: That of the graph.
        source, target: Ends, int64 `[E']`, on the device of batches.
        ids: Which edges of the graph they are, whose values they have; None for none.
        sizes: (number of targets, number of sources).
    """
    device = source.device
    if isinstance(adj_t, Tensor):
        values = torch.ones(source.numel(), device=device) if ids is None else as_rows(adj_t).values().to(device)[ids]
        # Not by way of coordinates, which would add up the values of edges that were drawn twice.
        order = (target * sizes[1] + source).sort(stable=True).indices
        begins = torch.searchsorted(target[order], torch.arange(sizes[0] + 1, device=device))
        return torch.sparse_csr_tensor(begins, source[order], values[order], sizes, check_invariants=False)
    value = adj_t.storage.value()
    value = None if value is None or ids is None else value.to(device)[ids]
    return type(adj_t)(row=target, col=source, value=value, sparse_sizes=sizes, is_sorted=False, trust_data=True)
