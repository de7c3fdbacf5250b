"""What a `Feature` does with other GPUs and other processes of its host."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, PlacementWarning, warn
from pyg_direct.features.cold import ask_rooms, check_cold, find_too_small
from pyg_direct.features.handle import Handle, make_handle, open_handle
from pyg_direct.features.hotness import choose_hottest, score_rows
from pyg_direct.features.sharded import ShardedRows, open_exchange, range_of
from pyg_direct.ops.gather import Directory
from pyg_direct.ops.locate import locate_ids
from pyg_direct.progress import show_wait
from pyg_direct.runtime.device import resolve_device
from pyg_direct.runtime.group import count_processes, give_to_host, has_group
from pyg_direct.runtime.peer import DeviceGroup, check_devices, p2pCliqueTopo
from pyg_direct.runtime.shared import find_shared
from pyg_direct.runtime.size import parse_size

if TYPE_CHECKING:
    from pyg_direct.features.feature import Feature

_LOGGER = logging.getLogger(__name__)
POLICIES = ("device_replicate", "p2p_clique_replicate")
# Places of a list of ids that are read from at once where rows lie on several GPUs: ascending ids meet one GPU after
# the other, and those of all GPUs the same one. On four H200s 1,024 read at 0.74 of what copies can, 64 at 0.80.
STRANDS = 64
_OPTIONS = ("device_cache_size", "cache_policy", "cold_policy", "link_blocks")


class ProcessRows:
    """Rows that several processes of a host read, and GPUs of a clique out of each other's memory."""

    device: torch.device
    device_list: Any
    device_group_list: list[list[int]] | None
    cache_policy: str
    cold_policy: str
    device_cache_size: int | str
    _handle: Handle | None
    _is_lazy: bool

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # What is no process, such as a file, gets the rows: `SavedRows`.
        ForkingPickler.register(cls, _send)

    def _settle_processes(self, device_list: Sequence[int] | str, cache_policy: str, cold_policy: str,
                          device_group_list: Sequence[Any] | None) -> None:  # fmt: skip
        """Check and keep the arguments about GPUs."""
        if cache_policy not in POLICIES:
            raise ArgumentError(f"cache_policy must be one of {', '.join(POLICIES)}, got {cache_policy!r}")
        check_cold(cold_policy, cache_policy)
        if isinstance(device_list, str) and device_list != "group":
            raise ArgumentError(f"device_list must hold GPU indices or be 'group', got {device_list!r}")
        if cold_policy == "shard" and device_list != "group":
            raise ArgumentError(f"cold_policy='shard' needs device_list='group', got {device_list!r}")
        self.device_list = device_list if isinstance(device_list, str) else check_devices(device_list)
        self.device_group_list = None
        if device_group_list is not None:
            name = "device_group_list"
            if isinstance(device_group_list, (str, bytes)) or not isinstance(device_group_list, Sequence):
                raise ArgumentTypeError(f"{name} must be a list of groups of GPUs, got {device_group_list!r}")
            groups = [g.device_list if isinstance(g, DeviceGroup) else check_devices(g, name)
                      for g in device_group_list]  # fmt: skip
            check_devices([device for group in groups for device in group], name)
            self.device_group_list = groups
        self.cache_policy, self.cold_policy = cache_policy, cold_policy
        self._handle, self._is_lazy = None, False

    def _is_for_many(self) -> bool:
        """Whether rows go where several processes or GPUs find them."""
        return self.device_list == "group" or (self.device.type == "cuda" and len(self.device_list) > 1)

    def _find_cliques(self, devices: list[int]) -> list[list[int]]:
        for device in devices:
            resolve_device(device)
        if self.device_group_list is not None:
            named = {device for group in self.device_group_list for device in group}
            if not named.issuperset(devices):
                raise ArgumentError(f"device_group_list must name every GPU of {devices}, got {self.device_group_list}")
            groups = [[device for device in group if device in devices] for group in self.device_group_list]
            return [group for group in groups if group]
        if self.cache_policy == "device_replicate" or len(devices) < 2:
            return [[device] for device in devices]
        return list(p2pCliqueTopo(devices).p2p_clique.values())

    def _shard_rows(self, rows: Tensor) -> bool:
        """Put rows on all processes of the group, each a part, where that is asked for or nothing else fits."""
        if self.device_list != "group" or self.cold_policy not in ("auto", "shard") or count_processes() < 2:
            return False
        num_bytes = rows.numel() * rows.element_size()
        if self.cold_policy == "auto":
            lacking = find_too_small(ask_rooms(find_shared(rows) is not None), num_bytes)
            if lacking is None:
                return False
            warn(f"cold_policy='auto' shares the rows out over {count_processes()} processes, which all take part in "
                 f"each read: they have {num_bytes} bytes, of which a host ({lacking.host}) has "
                 f"{lacking.num_bytes} to give", PlacementWarning)  # fmt: skip
        begin = time.perf_counter()
        feature, kind = cast("Feature", self), cast("type[Feature]", type(self))
        exchange = open_exchange(self.device)
        first, end = range_of(exchange.rank, exchange.size, len(rows))
        options: Any = {"store_dtype": feature.store_dtype, "link_blocks": feature.link_blocks}
        own = kind(device=self.device, placement=feature._placement, **options)
        with show_wait("reading the rows of this process", items=rows[first:end].numel()):
            own.from_cpu_tensor(rows[first:end].clone())
        locate: Any = None
        count = len(rows) * min(num_bytes, parse_size(self.device_cache_size, num_bytes)) // max(1, num_bytes)
        if count > 0:
            scores = score_rows(feature.hotness, feature.csr_topo, len(rows))
            ids = choose_hottest(scores, len(rows), count).ids
            hot = kind(device=self.device, device_cache_size="100%", **options)
            feature._resident = hot.from_cpu_tensor(rows[ids])
            directory = Directory.of(ids.to(self.device), len(rows)).wait()
            locate = partial(locate_ids, directory=directory, num_ids=len(rows))
        feature._spilled = ShardedRows(len(rows), own, exchange, locate, feature._resident)
        _LOGGER.info("%d rows shared out over %d processes: %d of them here, %.3f GB of host memory, and copies of %d "
                     "hot rows; in %.1f s", len(rows), exchange.size, end - first, num_bytes / exchange.size / 1e9,
                     count, time.perf_counter() - begin)  # fmt: skip
        return True

    def _share_rows(self, cpu_tensor: Tensor, rows: Tensor) -> None:
        """Put rows where all processes and GPUs find them; with `device_list="group"` called by all of them.

        Args:
            cpu_tensor: The user's, which becomes a view of shared memory where it can.
            rows: The same as they are stored.
        """
        feature = cast("Feature", self)
        is_plain = not (cpu_tensor.requires_grad or cpu_tensor.is_conj() or cpu_tensor.is_neg() or cpu_tensor.is_cuda)
        source = cpu_tensor if is_plain and cpu_tensor.is_contiguous() else rows.cpu().contiguous()

        def make(devices: list[int | None]) -> Handle:
            on_gpus = [device for device in devices if device is not None]
            if len(set(on_gpus)) < len(on_gpus):
                raise ArgumentError(f"device must be another GPU in every process of a host, got {on_gpus}: call "
                                    "torch.cuda.set_device(local_rank) first")  # fmt: skip
            return self._make_handle(source, self._find_cliques(on_gpus))

        if self.device_list == "group":
            self._handle = give_to_host(make, self.device.index) if has_group() else make([self.device.index])
        else:
            assert not isinstance(self.device_list, str)
            self._handle = make([*self.device_list])
        shared = self._handle.rows
        if source.data_ptr() != shared.data_ptr() and (source.shape, source.dtype) == (shared.shape, shared.dtype):
            source.data = shared
        feature._exponents = None
        if self.device_list == "group":
            self._open_handle()

    def _make_handle(self, source: Tensor, cliques: Sequence[Sequence[int]]) -> Handle:
        feature = cast("Feature", self)
        num_bytes = source.numel() * source.element_size()
        budget = min(num_bytes, parse_size(self.device_cache_size, num_bytes))
        scores = score_rows(feature.hotness, feature.csr_topo, len(source)) if cliques and budget > 0 else None
        exponents = None if feature._exponents is None else feature._exponents.cpu()
        handle = make_handle(source, feature._dtype, exponents, scores, budget, cliques, policy=self.cache_policy,
                             cold_policy=self.cold_policy)  # fmt: skip
        handle.options = {name: getattr(self, name) for name in _OPTIONS}
        return handle

    def _open_handle(self) -> None:
        """Make the tables for this process; a feature that came from another one gets its device here."""
        feature = cast("Feature", self)
        assert self._handle is not None
        if self._is_lazy:
            self.device, self._is_lazy = resolve_device(None), False
            feature.rank = self.device.index or 0
        if self.device.type == "cuda":
            feature._watch()
        opened = open_handle(self._handle, self.device)
        feature._cold, feature._directory, feature._block = opened.cold, opened.directory, opened.block
        feature._exponents, feature._hot = opened.exponents, opened.hot
        order = self._handle.order
        feature._order = None if order is None else order.to(self.device)
        if opened.cold is not None:
            feature._limit_blocks(opened.misses, self._count_strands() > 1)

    def _count_strands(self) -> int:
        """Places of a list of ids that are read from at once."""
        if self._handle is None or (number := self._handle.find_hot(self.device)) is None:
            return 1
        return 1 if self._handle.hot[number].spread is None else STRANDS

    def _find_stored(self) -> Tensor:
        """All rows as they are stored, `[N, ...]`, on the host unless all are in GPU memory.

        Raises:
            ArgumentError: there are none yet, or they are in a file or shared out over processes.
        """
        feature = cast("Feature", self)
        feature._filled()
        if feature._file is not None:
            raise ArgumentError(f"a Feature over {feature._file.path} cannot be sent: call from_file in each process")
        if feature.placement == "sharded":
            raise ArgumentError("a Feature whose rows are shared out over processes cannot be sent to others")
        if self._handle is not None:
            return self._handle.rows
        assert feature._hot is not None
        if feature._cold is None or feature._block is None:
            return feature._hot
        return feature._block.view_on_cpu(feature._cold.dtype, feature._cold.shape)

    def share_ipc(self) -> Handle:
        """A handle for other processes of this host, to be pickled for them; rows are not copied for each.

        A feature of one GPU, or of none, is moved to shared memory by the first call.

        Raises:
            ArgumentError: there are no rows yet, or they are in a file, which each process can open itself, or shared
                out over processes.
        """
        feature = cast("Feature", self)
        stored = self._find_stored()
        if self._handle is None:
            devices = [[index] for index in range(torch.cuda.device_count())]
            self._handle = self._make_handle(stored.cpu().contiguous(), devices)
            if not stored.is_cuda and feature._cold is None:
                feature._hot = self._handle.rows
        self._handle.order = None if feature._order is None else feature._order.cpu()
        return self._handle

    @classmethod
    def new_from_ipc_handle(cls, rank: int, ipc_handle: Handle) -> Feature:
        """The feature of a handle in this process, with results on GPU `rank`, or on the CPU where there is none.

        Args:
            rank: Index of the GPU; without effect on a machine without one.
            ipc_handle: What `share_ipc` returned.

        Raises:
            ArgumentError, ArgumentTypeError: named argument, rule and value.
            DeviceError: there are GPUs, but none of this index.
        """
        feature = cls.lazy_from_ipc_handle(ipc_handle)
        if torch.cuda.is_available():
            feature.device, feature._is_lazy = resolve_device(rank), False
        feature.rank = rank
        return feature

    @classmethod
    def lazy_from_ipc_handle(cls, ipc_handle: Handle) -> Feature:
        """The feature of a handle, opened on the current GPU of this process when it is first read.

        Args:
            ipc_handle: What `share_ipc` returned.

        Raises:
            ArgumentTypeError: `ipc_handle` is none.
        """
        if not isinstance(ipc_handle, Handle):
            raise ArgumentTypeError(f"ipc_handle must be what share_ipc returned, got {type(ipc_handle).__name__}")
        feature = cast("Feature", cls(device="cpu", **ipc_handle.options))  # type: ignore[call-arg]
        feature._handle, feature._is_lazy = ipc_handle, True
        feature._shape, feature._dtype = ipc_handle.shape, ipc_handle.dtype
        return feature

    def __copy__(self) -> Feature:
        """Another feature over the same rows."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.update(_reader=None, _following=None, _flag=None, _errors=None)
        copied = cast("Feature", made)
        if cast("Feature", self)._errors is not None:
            # Errors of one are not told by the other, and each gives its word back.
            copied._watch()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Feature:
        """A feature with rows of its own; rows of a file, of several processes or on the host of a GPU are shared, and
        cannot be updated then."""
        feature = cast("Feature", self)
        if feature._file is not None:
            return self.__copy__()
        is_alone = feature._hot is not None and feature._spilled is None and feature._block is None
        if feature._shape is not None and (self._handle is not None or not is_alone):
            make, arguments = _send(feature)
            return make(*arguments)  # type: ignore[no-any-return]
        made = self.__copy__()
        for name in ("_hot", "_exponents", "_order"):
            rows = getattr(feature, name)
            setattr(made, name, None if rows is None else rows.clone())
        return made


def _send(feature: Feature) -> Any:
    """How `multiprocessing` sends a feature: by a handle."""
    return type(feature).lazy_from_ipc_handle, (feature.share_ipc(),)
