"""Copies of features, and features in pickles: sent to a process by a handle, or saved with their rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.features.hot_rows import score_rows
from pyg_direct.features.memory_rows import MemoryRows
from pyg_direct.features.process_sharing import Handle, handle_of
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.tensor_views import ordinary_tensors

# Arguments that a saved feature is made with again.
_SAVED_OPTIONS = ("device_cache_size", "cache_policy", "link_blocks", "store_dtype")


def copy_feature(feature: Any) -> Any:
    """Return another feature over the same rows."""
    made = object.__new__(type(feature))
    made.__dict__.update(feature.__dict__)
    made._served = copy.deepcopy(feature._served)
    if isinstance(feature.stored, MemoryRows):
        made.stored = feature.stored.copy()
        made.stored.served = made._served
    return made


def deepcopy_feature(feature: Any) -> Any:
    """Return a feature with a copy of the rows; see `Feature.__deepcopy__`."""
    if isinstance(feature.stored, SpilledRows) and not feature.stored.tier.is_collective:
        return copy_feature(feature)
    stored = feature.stored if isinstance(feature.stored, MemoryRows) and feature._handle is None else None
    if feature._shape is not None and (stored is None or stored.tier.block is not None):
        make, arguments = send_feature(feature)
        return make(*arguments)
    made = copy_feature(feature)
    made._order = None if feature._order is None else feature._order.clone()
    if isinstance(made.stored, MemoryRows):
        made.stored.own_rows()
    return made


def find_stored(feature: Any) -> Tensor:
    """Return all rows as they are stored, `[N, ...]`, on the host unless all are in GPU memory; refused if they cannot
    be sent.
    """
    feature._filled()
    if isinstance(feature.stored, SpilledRows):
        feature.stored.tier.check_sending()
    if feature._handle is not None:
        rows: Tensor = feature._handle.rows
        return rows
    assert isinstance(feature.stored, MemoryRows)
    return feature.stored.list_stored()


def share_feature(feature: Any) -> Handle:
    """Return a handle for other processes of this host; see `Feature.share_ipc`."""
    rows = find_stored(feature)
    if feature._handle is None:
        assert isinstance(feature.stored, MemoryRows)
        devices = [[index] for index in range(torch.cuda.device_count())]
        feature._handle = handle_of(feature, rows.cpu().contiguous(), feature.stored.exponents, devices)
        if not feature.stored.is_on_gpu:
            feature.stored.use_table(feature._handle.rows)
    handle: Handle = feature._handle
    handle.order = None if feature._order is None else feature._order.cpu()
    return handle


def send_feature(feature: Any) -> Any:
    """Let `multiprocessing` send a feature by a handle. A receiver that is no process, such as a file, gets the
    rows.
    """
    return type(feature).lazy_from_ipc_handle, (feature.share_ipc(),)


def reduce_feature(feature: Any) -> Any:
    """Return the call that opens a saved feature, for pickles."""
    if feature._shape is None:
        raise ArgumentError("a Feature without rows cannot be sent: call from_cpu_tensor or from_file first")
    rows = find_stored(feature)
    # Rows that were written on a GPU are there.
    feature.synchronize()
    options: dict[str, Any] = {name: getattr(feature, name) for name in _SAVED_OPTIONS}
    scores = score_rows(feature.hotness, feature.csr_topo, len(rows))
    options.update(placement=feature._placement, hotness="degree" if scores is None else scores.cpu())
    exponents, order = None, feature._order
    if feature._handle is not None:
        # A handle that is not opened yet has them too.
        exponents, order = feature._handle.exponents, feature._handle.order
    elif isinstance(feature.stored, MemoryRows):
        exponents = feature.stored.exponents
    # Bytes, as torch's tensors of float8 do not come out of a pickle.
    parts = [_detach(rows).view(-1).view(torch.uint8), None if exponents is None else _detach(exponents),
             None if order is None else _detach(order)]  # fmt: skip
    return open_saved, (type(feature), options, feature.dtype, rows.dtype, rows.shape, *parts)


def _detach(part: Tensor) -> Tensor:
    """Return a tensor on the CPU that owns all of its memory, because all of that memory is written."""
    part = part.cpu().contiguous()
    is_whole = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part if is_whole else part.clone()


@ordinary_tensors()
def open_saved(kind: type[Any], options: dict[str, Any], dtype: torch.dtype, stored: torch.dtype, shape: torch.Size,
               content: Tensor, exponents: Tensor | None, order: Tensor | None) -> Any:  # fmt: skip
    """Return the feature of a file, on the current GPU, or on the CPU if there is no GPU."""
    feature = kind(device=resolve_device(None), **options)
    with feature._replacing():
        feature._take(content.view(stored).view(shape), dtype, exponents)
        feature._order = None if order is None else order.to(feature.device)
    return feature
