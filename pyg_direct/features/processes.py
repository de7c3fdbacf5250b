"""What a `Feature` does with other GPUs and other processes of its host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.parts import COLD_POLICIES, Opened, Parts, make_parts, open_parts
from pyg_direct.runtime.device import resolve_device
from pyg_direct.runtime.group import give_to_host, has_group
from pyg_direct.runtime.peer import DeviceGroup, check_devices, p2pCliqueTopo
from pyg_direct.runtime.size import parse_size

if TYPE_CHECKING:
    from pyg_direct.features.feature import Feature

POLICIES = ("device_replicate", "p2p_clique_replicate")
_OPTIONS = ("device_cache_size", "cache_policy", "cold_policy", "link_blocks")


class ProcessRows:
    """Rows that several processes of a host read, and GPUs of a clique out of each other's memory."""

    device: torch.device
    device_list: list[int] | str
    device_group_list: list[list[int]] | None
    cache_policy: str
    cold_policy: str
    device_cache_size: int | str
    _parts: Parts | None
    _is_lazy: bool

    def _settle_processes(self, device_list: Sequence[int] | str, cache_policy: str, cold_policy: str,
                          device_group_list: Sequence[Any] | None) -> None:  # fmt: skip
        """Check and keep the arguments about GPUs."""
        for name, value, known in (
            ("cache_policy", cache_policy, POLICIES),
            ("cold_policy", cold_policy, COLD_POLICIES),
        ):
            if value not in known:
                raise ArgumentError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if isinstance(device_list, str) and device_list != "group":
            raise ArgumentError(f"device_list must hold GPU indices or be 'group', got {device_list!r}")
        self.device_list = device_list if isinstance(device_list, str) else check_devices(device_list)
        self.device_group_list = None
        if device_group_list is not None:
            groups = [g.device_list if isinstance(g, DeviceGroup) else check_devices(g) for g in device_group_list]
            check_devices([device for group in groups for device in group])
            self.device_group_list = groups
        self.cache_policy, self.cold_policy = cache_policy, cold_policy
        self._parts, self._is_lazy = None, False

    def _is_for_many(self) -> bool:
        """Whether rows go where several processes or GPUs find them."""
        return self.device_list == "group" or (self.device.type == "cuda" and len(self.device_list) > 1)

    def _find_cliques(self, devices: list[int]) -> list[list[int]]:
        if self.device_group_list is not None:
            named = {device for group in self.device_group_list for device in group}
            if not named.issuperset(devices):
                raise ArgumentError(f"device_group_list must name every GPU of {devices}, got {self.device_group_list}")
            groups = [[device for device in group if device in devices] for group in self.device_group_list]
            return [group for group in groups if group]
        if self.cache_policy == "device_replicate" or len(devices) < 2:
            return [[device] for device in devices]
        return list(p2pCliqueTopo(devices).p2p_clique.values())

    def _share_rows(self, rows: Tensor, dtype: torch.dtype, exponents: Tensor | None, heat: Tensor | None) -> Parts:
        """Put rows where all processes and GPUs find them; with `device_list="group"` called by all of them.

        Args:
            rows: As they are stored, on the CPU; becomes a view of shared memory.
            dtype: Dtype they are read as.
            exponents: Of float8 rows.
            heat: How often each row is read; None if not known.
        """
        rows = rows.contiguous()
        num_bytes = rows.numel() * rows.element_size()
        budget = min(num_bytes, parse_size(self.device_cache_size, num_bytes))

        def make(devices: list[int | None]) -> Parts:
            on_gpus = [device for device in devices if device is not None]
            if len(set(on_gpus)) < len(on_gpus):
                raise ArgumentError(f"device must be another GPU in every process of a host, got {on_gpus}: call "
                                    "torch.cuda.set_device(local_rank) first")  # fmt: skip
            parts = make_parts(rows, dtype, None if exponents is None else exponents.cpu(), heat, budget,
                               self._find_cliques(on_gpus), policy=self.cache_policy,
                               cold_policy=self.cold_policy)  # fmt: skip
            parts.options = {name: getattr(self, name) for name in _OPTIONS}
            return parts

        if self.device_list == "group" and has_group():
            return give_to_host(make, self.device.index)
        if self.device_list == "group":
            return make([self.device.index])
        assert not isinstance(self.device_list, str)
        return make([*self.device_list] if self.device.type == "cuda" else [])

    def _open_parts(self) -> Opened:
        """The tables for this process; a feature that came from another one is first told its device here."""
        assert self._parts is not None
        if self._is_lazy:
            self.device, self._is_lazy = resolve_device(None), False
        return open_parts(self._parts, self.device)

    def share_ipc(self) -> Parts:
        """A handle for other processes of this host, to be pickled for them; rows are not copied.

        Raises:
            ArgumentError: there are no rows yet.
        """
        feature = cast("Feature", self)
        if self._parts is None:
            self._parts = feature._make_shareable()
        return self._parts

    @classmethod
    def new_from_ipc_handle(cls, rank: int, ipc_handle: Parts) -> Feature:
        """The feature of a handle in this process, with results on GPU `rank`, or on the CPU where there is none."""
        feature = cls.lazy_from_ipc_handle(ipc_handle)
        if torch.cuda.is_available():
            feature.device, feature._is_lazy = resolve_device(rank), False
        feature.rank = rank
        return feature

    @classmethod
    def lazy_from_ipc_handle(cls, ipc_handle: Parts) -> Feature:
        """The feature of a handle, opened on the current GPU of this process when it is first read."""
        if not isinstance(ipc_handle, Parts):
            raise ArgumentTypeError(f"ipc_handle must be what share_ipc returned, got {type(ipc_handle).__name__}")
        feature = cast("Feature", cls(device="cpu", **ipc_handle.options))  # type: ignore[call-arg]
        feature._parts, feature._is_lazy = ipc_handle, True
        feature._shape, feature._dtype = ipc_handle.shape, ipc_handle.dtype
        return feature

    def __reduce__(self) -> Any:
        feature = cast("Feature", self)
        if feature._shape is None:
            raise ArgumentError("a Feature without rows cannot be sent: call from_cpu_tensor first")
        return type(self).lazy_from_ipc_handle, (self.share_ipc(),)
