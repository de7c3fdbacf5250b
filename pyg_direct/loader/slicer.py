"""How batches take the attributes of a graph that are not rows in memory, one after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import TensorFrame

from pyg_direct.errors import ArgumentTypeError, LoaderWarning, warn
from pyg_direct.features.rowfile import as_tensor

# Takes the part of an attribute that belongs to nodes or edges of these ids.
Slicer = Callable[[Any, Tensor], Any]


def choose_slicer(name: str, value: Any, dim: int, device: torch.device) -> Slicer | None:
    """How batches take an attribute of nodes or edges; None where its rows lie one after another, and are placed.

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
    return partial(_slice_along, dim, device)


def has_rows(name: str, value: Tensor | np.ndarray) -> bool:
    """Whether rows lie in memory one after another; a sparse tensor of coordinates is left to torch.

    Raises:
        ArgumentTypeError: an array that torch does not know, or another sparse layout.
    """
    if isinstance(value, Tensor):
        if value.layout not in (torch.strided, torch.sparse_coo):
            raise ArgumentTypeError(f"{name} must be dense or of layout torch.sparse_coo, got {value.layout}")
        if value.requires_grad:
            # Rows are read ahead, before the optimizer's last step.
            warn(
                f"{name} requires a gradient, which rows of batches do not carry: to learn it, index it in "
                "the model by batch.n_id",
                LoaderWarning,
            )
        return value.layout == torch.strided
    try:
        as_tensor(value[:0])
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name} must have a dtype that torch knows, got {value.dtype}") from error
    return True


def _slice_along(dim: int, device: torch.device, value: Any, ids: Tensor) -> Tensor:
    tensor = as_tensor(value)
    return tensor.index_select(dim, ids.to(tensor.device)).to(device)
