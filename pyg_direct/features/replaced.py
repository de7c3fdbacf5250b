"""The part of `Feature` that looks at rows before they take the place of others, which a refusal leaves there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.hotness import Listing, check_scores
from pyg_direct.features.store import check_narrow
from pyg_direct.runtime.size import parse_size


class ReplacedRows:
    """What a `Feature` does before and while it takes rows; its constructor sets the attributes."""

    device: torch.device
    device_cache_size: int | str
    hotness: str | Tensor
    csr_topo: Listing | None
    store_dtype: torch.dtype | None
    _shape: torch.Size | None

    def _check_rows(self, cpu_tensor: Any) -> None:
        """Refuse what `from_cpu_tensor` does, before anything is let go of.

        Raises:
            ArgumentError, ArgumentTypeError: named argument, rule and value.
        """
        if not isinstance(cpu_tensor, Tensor) or cpu_tensor.layout != torch.strided or cpu_tensor.is_meta:
            kind = getattr(cpu_tensor, "layout", type(cpu_tensor).__name__)
            raise ArgumentTypeError(
                f"cpu_tensor must be a dense tensor, got {'one on device meta' if kind is torch.strided else kind}"
            )
        if cpu_tensor.dim() == 0:
            raise ArgumentError("cpu_tensor must have at least one dimension, got a scalar")
        self._check_count(len(cpu_tensor))
        if self._shape is None:
            # Nothing would be lost, and what follows is found as the rows are taken.
            return
        dtype = cpu_tensor.dtype if self.store_dtype is None else self.store_dtype
        if dtype != cpu_tensor.dtype:
            check_narrow(cpu_tensor.detach(), dtype)
        num_bytes, me = cpu_tensor.numel() * dtype.itemsize, cast("Any", self)
        if cpu_tensor.device == self.device and not me._is_for_many():
            # Rows of this GPU all stay there, whatever ranks them.
            return
        if self.device.type == "cuda" and 0 < parse_size(self.device_cache_size, num_bytes) < num_bytes:
            check_scores(self.hotness, self.csr_topo, len(cpu_tensor))

    def _check_count(self, num_rows: int) -> None:
        if self.csr_topo is not None and num_rows < self.csr_topo.node_count:
            raise ArgumentError(f"cpu_tensor must have a row for each of the {self.csr_topo.node_count} nodes of "
                                f"csr_topo, got {num_rows}")  # fmt: skip

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """Let go of the rows so far, as memory may not hold others beside them; what then fails leaves none."""
        self._clear()
        try:
            yield
        except BaseException:
            self._clear()
            self._shape = None
            raise

    def _clear(self) -> None:
        raise NotImplementedError
