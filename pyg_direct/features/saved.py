"""The part of `Feature` that is pickled for files: its rows, where processes of a host are sent a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.features.hotness import score_rows
from pyg_direct.runtime.device import resolve_device
from pyg_direct.runtime.mode import ordinary_tensors

if TYPE_CHECKING:
    from pyg_direct.features.feature import Feature

_OPTIONS = ("device_cache_size", "cache_policy", "link_blocks", "store_dtype")


class SavedRows:
    """What a `Feature` does to be written by `pickle` and `torch.save`."""

    def __reduce__(self) -> Any:
        feature = cast("Feature", self)
        if feature._shape is None:
            raise ArgumentError("a Feature without rows cannot be sent: call from_cpu_tensor first")
        stored = feature._find_stored()
        # Rows that were written on a GPU are there.
        feature.synchronize()
        options: dict[str, Any] = {name: getattr(feature, name) for name in _OPTIONS}
        scores = score_rows(feature.hotness, feature.csr_topo, len(stored))
        options.update(placement=feature._placement, hotness="degree" if scores is None else scores.cpu())
        # A handle that was not opened yet has them.
        exponents = feature._exponents if feature._handle is None else feature._handle.exponents
        order = feature._order if feature._handle is None else feature._handle.order
        # Bytes, as torch's tensors of float8 do not come out of a pickle.
        parts = [_detach(stored).view(-1).view(torch.uint8), None if exponents is None else _detach(exponents),
                 None if order is None else _detach(order)]  # fmt: skip
        return _open_saved, (type(feature), options, feature.dtype, stored.dtype, stored.shape, *parts)


def _detach(part: Tensor) -> Tensor:
    """A tensor on the CPU whose memory holds nothing else, as all of it is written."""
    part = part.cpu().contiguous()
    is_whole = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part if is_whole else part.clone()


@ordinary_tensors()
def _open_saved(kind: type[Feature], options: dict[str, Any], dtype: torch.dtype, stored: torch.dtype,
                shape: torch.Size, content: Tensor, exponents: Tensor | None, order: Tensor | None
                ) -> Feature:  # fmt: skip
    """The feature of a file, on the current GPU, or on the CPU where there is none."""
    feature = kind(device=resolve_device(None), **options)
    with feature._replacing():
        feature._take(content.view(stored).view(shape), dtype, exponents)
        feature._order = None if order is None else order.to(feature.device)
    return feature
