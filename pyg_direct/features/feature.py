"""`Feature`: a table of rows on the host with its hottest rows in GPU memory, read by one kernel.

`Feature` inherits these parts, among others:

- `ProcessRows`: other GPUs and other processes of the host.
- `UpdatedRows`: rows that are changed in place, such as node embeddings that are trained.
- `ReplacedRows`: rows that are checked before they replace others; if they are refused, the others stay.
- `FiledRows`: rows that stay in a file, and which of them are copied to memory.
- `SavedRows`: a `Feature` pickled to a file with its rows; processes of a host are sent a handle instead.
- `NamedRows`: rows with ids that differ from their positions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from os import PathLike
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, PlacementWarning, warn
from pyg_direct.features.adaptive_cache import FollowingRows
from pyg_direct.features.host_link_blocks import blocks_beside_hot, blocks_for_rows, find_link_blocks
from pyg_direct.features.hot_rows import (
    Listing,
    check_hotness,
    check_scores,
    choose_hottest,
    copy_to_gpu,
    fit_budget,
    score_rows,
    shrink_budget,
)
from pyg_direct.features.process_sharing import Handle, ask_rooms, check_cold, find_too_small, make_handle, open_handle
from pyg_direct.features.row_dtypes import check_narrow, check_store_dtype, narrow_rows
from pyg_direct.features.row_files import DeviceConfig, RowFile, join_parts, open_array
from pyg_direct.features.tier_report import ReportedRows
from pyg_direct.features.tiers.base import Tier
from pyg_direct.features.tiers.disk import DiskTier, SpilledRows, StagedTier
from pyg_direct.features.tiers.sharded import ShardedRows, open_exchange, range_of
from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.ops.argument_checks import as_ids, check_ids, checks_keywords
from pyg_direct.ops.local_ids.bitmap import locate_ids
from pyg_direct.ops.rows.gather import Directory, RowReader, gather_rows, select_rows, unread_errors
from pyg_direct.ops.rows.scatter import keep_last, scatter_rows
from pyg_direct.ops.rows.upload import upload
from pyg_direct.progress import show_wait
from pyg_direct.runtime.comm.host_group import count_processes, give_to_host, has_group
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.host_memory_probe import check_filled
from pyg_direct.runtime.cuda.memory import Block, move
from pyg_direct.runtime.cuda.peer_memory import DeviceGroup, check_devices, p2pCliqueTopo
from pyg_direct.runtime.cuda.sm_budget import forget_reader, note_reader
from pyg_direct.runtime.host.memory import parse_size
from pyg_direct.runtime.host.shared_memory import find_shared
from pyg_direct.runtime.host.tensor_views import ordinary_tensors
from pyg_direct.typing import Device

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


class UpdatedRows:
    """What a `Feature` does to write rows; its constructor sets the attributes."""

    device: torch.device
    store_dtype: torch.dtype | None
    _dtype: torch.dtype
    _hot: Tensor | None
    _cold: Tensor | None
    _directory: Directory | None
    _exponents: Tensor | None
    _errors: Tensor | None
    _order: Tensor | None
    _handle: Any
    _spilled: Any
    _block: Any
    # Calls that have changed rows.
    _num_updates = 0

    @property
    def num_writes(self) -> int:
        """Number of writes to the rows: calls of `update_`, and on a CPU writes to the tensor that they are of."""
        hot = self._hot
        return self._num_updates + (0 if hot is None or hot.is_cuda or hot.is_inference() else hot._version)

    def update_(self, ids: Tensor | Sequence[int], rows: Tensor) -> Any:
        """Replace the rows of ids by `rows`, wherever they lie; returns self.

        The hot copy in GPU memory and the row on the host are both written, so that a tensor that the feature was made
        of shows the new rows too (on a GPU, once it has run: see `synchronize`). For node embeddings: read the rows of
        a batch, compute the new ones from the gradient with any optimizer of sparse rows, and write them back.

        Args:
            ids: int32 or int64 `[n]` on any device, or a list; of one that comes several times, the last row counts.
            rows: `[n, ...]` of the feature's dtype, on any device; rows that are stored in fewer bits are rounded.

        Raises:
            ArgumentError: rows of another shape or dtype, rows in a file, or rows that processes share.
            ArgumentTypeError: `rows` are no tensor, or `ids` no ids.
            IdError: as in `feature[ids]`; nothing is written for ids that are out of range.
        """
        shape = self._filled()
        if self._spilled is not None:
            raise ArgumentError(f"rows of {self._spilled.placement!r} cannot be updated: {self._spilled.refusal}")
        if self._handle is not None:
            raise ArgumentError("rows that several processes share cannot be updated: they are read-only")
        if not isinstance(rows, Tensor):
            raise ArgumentTypeError(f"rows must be a tensor, got {type(rows).__name__}")
        ids = check_ids("ids", as_ids("ids", ids), shape[0])
        if rows.shape != (ids.numel(), *shape[1:]) or rows.dtype != self._dtype:
            raise ArgumentError(f"rows must be {(ids.numel(), *shape[1:])} of {self._dtype}, got {tuple(rows.shape)} "
                                f"of {rows.dtype}")  # fmt: skip
        self._raise_earlier_error()
        hot = self._hot
        assert hot is not None
        target = self.device if hot.is_cuda else torch.device("cpu")
        if self._block is not None:
            self._block.check_process()
        ids, rows = ids.to(target), rows.detach().to(target)
        if self._order is not None:
            ids = gather_rows(self._order.to(target), ids, errors=self._errors) - 1
        if ids.numel() == 0:
            return self
        self._num_updates += 1
        ids, rows = keep_last(ids.contiguous(), rows.contiguous())
        if hot.dtype != self._dtype:
            rows, exponents = narrow_rows(rows, hot.dtype)
            if exponents is not None:
                assert self._exponents is not None
                scatter_rows(self._exponents, ids, exponents, errors=self._errors, is_unique=True)
        if self._cold is None:
            scatter_rows(hot, ids, rows, errors=self._errors, is_unique=True)
            return self
        scatter_rows(self._cold, ids, rows, errors=self._errors, is_unique=True)
        if self._directory is not None:
            places = locate_ids(ids, self._directory, shape[0])
            # Rows that are not hot have no place, which is no error.
            scatter_rows(hot, places, rows, errors=unread_errors(target), is_unique=True)
        return self

    # What the rest of a `Feature` does.

    def _filled(self) -> torch.Size:
        raise NotImplementedError

    def _raise_earlier_error(self) -> None:
        raise NotImplementedError


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


F = TypeVar("F", bound="FiledRows")


class FiledRows(ReplacedRows):
    """What a `Feature` does with rows in files; its constructor sets the attributes."""

    rank: int
    device_list: Any
    device: torch.device
    device_cache_size: int | str
    host_cache_size: int | str
    hotness: str | Tensor
    csr_topo: Listing | None
    store_dtype: torch.dtype | None
    link_blocks: int | None
    _placement: str
    _shape: torch.Size | None
    _dtype: torch.dtype
    _errors: Tensor | None
    _file: RowFile | None
    _resident: Any
    _spilled: SpilledRows | ShardedRows | None

    def from_file(self: F, path: str | PathLike[str], *, name: str | None = None, dtype: torch.dtype | None = None,
                  shape: Sequence[int] | None = None, offset: int = 0) -> F:  # fmt: skip
        """Take the rows of a file and leave them there; returns self.

        The hottest rows that fit `device_cache_size` are copied to GPU memory, those that fit `host_cache_size` to
        host memory; the others are read from the file by threads whenever they are asked for. A table that fits one
        of these whole is read into it. Pickles are refused.

        Args:
            path: `.npy`, `.safetensors`, or bare bytes. The file must stay as it is: it is checked before each read.
            name, dtype, shape, offset: See `RowFile`: the tensor of a `.safetensors`; what bare bytes mean.

        Raises:
            FileError: no such file, or it is damaged, cut short, or a pickle.
            ArgumentError, ArgumentTypeError: named argument, rule and value.
        """
        return self._from_disk(RowFile(path, name=name, dtype=dtype, shape=shape, offset=offset))

    def from_mmap(self: F, np_array: np.ndarray | None, device_config: DeviceConfig | None = None) -> F:
        """Take the rows of a memory map; returns self.

        Args:
            np_array: `[N, ...]` of any dtype, a map made by `np.load(mmap_mode=)` or `np.memmap`, or another array.
                None where the parts of `device_config` are rows themselves.
            device_config: Without it, rows stay in the file, as by `from_file`. With it, as in Quiver, the feature
                holds the rows of its parts one behind the other, those of this GPU first, and no others.

        Raises:
            FileError: as of `from_file`.
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        if device_config is None:
            source = open_array(np_array)
            return self._from_disk(source) if isinstance(source, RowFile) else self.from_cpu_tensor(source)
        rows, num_hot = join_parts(np_array, device_config, self.rank)
        kept = self.device_cache_size, self.hotness
        self.device_cache_size = num_hot * (rows[0].numel() * rows.element_size() if len(rows) else 0)
        self.hotness = torch.arange(len(rows), 0, -1, device="cpu")
        try:
            return self.from_cpu_tensor(rows)
        finally:
            self.device_cache_size, self.hotness = kept

    def _from_disk(self: F, file: RowFile) -> F:
        shape, dtype = file.rows.shape, file.rows.dtype
        self._check_count(shape[0])
        if self.store_dtype not in (None, dtype):
            raise ArgumentError(f"store_dtype must be None or {dtype}, as {file.path} has it, got {self.store_dtype}")
        num_bytes, on_gpu = file.layout.num_bytes, self.device.type == "cuda"
        hot_bytes = min(parse_size(self.device_cache_size, num_bytes) if on_gpu else 0, num_bytes)
        host_bytes = min(parse_size(self.host_cache_size, num_bytes, "host_cache_size"), num_bytes)
        if num_bytes == max(hot_bytes, host_bytes):
            return self.from_cpu_tensor(file.stream() if num_bytes > 0 else file.rows.clone())
        count = shape[0] * max(hot_bytes, host_bytes) // num_bytes
        scores = score_rows(self.hotness, self.csr_topo, shape[0]) if count > 0 else None
        with self._replacing():
            self._shape, self._dtype, self._file = shape, dtype, file
            self._fill(file, scores, count, hot_bytes)
        return self

    def _fill(self, file: RowFile, scores: Tensor | None, count: int, hot_bytes: int) -> None:
        """Read the `count` rows of a file with the highest scores into memory, and say where the others are."""
        shape, disk = file.rows.shape, self._open(file)
        if count == 0:
            self._spilled = SpilledRows(disk)
            return
        ids = choose_hottest(scores, shape[0], count).ids
        rows = torch.empty((count, *shape[1:]), dtype=file.rows.dtype, device="cpu")
        with show_wait("reading hot rows of a file"):
            DiskTier(file).read(ids, rows)
        hotness: Any = "degree" if scores is None else scores[ids.to(scores.device)]
        make: Any = type(self)
        self._resident = make(self.rank, self.device_list, hot_bytes, device=self.device, hotness=hotness,
                                 placement=self._placement, link_blocks=self.link_blocks)  # fmt: skip
        self._resident.from_cpu_tensor(rows)
        directory = Directory.of(ids.to(self.device), shape[0]).wait()
        self._spilled = SpilledRows(disk, lambda found: locate_ids(found, directory, shape[0]), self._resident)

    def set_mmap_file(self, path: str | PathLike[str], disk_map: Tensor) -> None:
        """Read rows that are not in memory from a file, as Quiver does.

        Args:
            path: A table with a row for each id; see `from_file`.
            disk_map: int32 or int64 `[N]`: the place of each id among the rows that this feature holds so far, or a
                negative number for one that is in the file alone.

        Raises:
            FileError, ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        held = self._filled()
        file = RowFile(path)
        places = check_ids("disk_map", disk_map).cpu().long()
        if len(places) != len(file.rows):
            raise ArgumentError(f"disk_map must have a place for each of the {len(file.rows)} rows of {path}, got "
                                f"{len(places)}")  # fmt: skip
        if len(places) and int(places.max()) >= held[0]:
            raise IdError(f"disk_map must hold places below {held[0]}, got {int(places.max())}")
        if file.rows.shape[1:] != held[1:] or file.rows.dtype != self._dtype:
            raise ArgumentError(f"path must hold rows {tuple(held[1:])} of {self._dtype}, {path} holds "
                                f"{tuple(file.rows.shape[1:])} of {file.rows.dtype}")  # fmt: skip
        # Not by `copy`, which goes the way to other processes.
        resident: Any = object.__new__(type(self))
        resident.__dict__.update(self.__dict__)
        self._clear()
        self._errors = None
        self._resident, self._file, self._shape, self._dtype = resident, file, file.rows.shape, file.rows.dtype
        # 0 stands for ids that are none, too, which the file then refuses.
        shifted = places.clamp_(min=-1).add_(1).to(self.device)
        self._spilled = SpilledRows(self._open(file), lambda ids: gather_rows(shifted, ids) - 1, resident)

    def read_mmap(self, ids: Tensor) -> Tensor:
        """Rows of ids from the file, also of those that are in memory, `[n, ...]` of `dtype` on `device`.

        Args:
            ids: int32 or int64 `[n]`, on any device.

        Raises:
            ArgumentError: the feature has no file, or `ids` have more than one dimension.
            ArgumentTypeError: `ids` have another dtype.
            IdError: an id is out of range.
        """
        if not isinstance(self._spilled, SpilledRows):
            raise ArgumentError("this Feature has no file: call from_file, from_mmap or set_mmap_file first")
        return self._spilled.read_disk(check_ids("ids", ids, self._filled()[0]).to(self.device))

    def _open(self, file: RowFile) -> Tier:
        tier = DiskTier(file)
        return StagedTier(tier, self.device) if self.device.type == "cuda" else tier

    # What the rest of a `Feature` does.

    def from_cpu_tensor(self: F, cpu_tensor: Tensor) -> F:
        """Take the rows of a tensor; returns self."""
        raise NotImplementedError

    def _filled(self) -> torch.Size:
        raise NotImplementedError


_SAVED_OPTIONS = ("device_cache_size", "cache_policy", "link_blocks", "store_dtype")


class SavedRows:
    """What a `Feature` does to be written by `pickle` and `torch.save`."""

    def __reduce__(self) -> Any:
        feature = cast("Feature", self)
        if feature._shape is None:
            raise ArgumentError("a Feature without rows cannot be sent: call from_cpu_tensor first")
        stored = feature._find_stored()
        # Rows that were written on a GPU are there.
        feature.synchronize()
        options: dict[str, Any] = {name: getattr(feature, name) for name in _SAVED_OPTIONS}
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


class NamedRows:
    """What a `Feature` does to name rows; its constructor sets the attributes."""

    device: torch.device
    _order: Tensor | None
    _errors: Tensor | None

    def _filled(self) -> torch.Size:
        raise NotImplementedError

    def set_local_order(self, local_order: Tensor) -> None:
        """Name the rows: from now on the id `local_order[i]` is that of row `i`, as in Quiver.

        Args:
            local_order: int32 or int64 `[N]`, each of 0 to N - 1 once.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value; also where there are no rows yet.
        """
        order, num_rows = check_ids("local_order", local_order, self._filled()[0]).cpu().long(), self._filled()[0]
        seen = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
        seen[order] = True
        if len(order) != num_rows or not bool(seen.all()):
            raise ArgumentError(f"local_order must hold each of 0 to {num_rows - 1} once, got {len(order)} ids, "
                                f"{int(seen.sum())} of them different")  # fmt: skip
        # Rows count from 1, so that what is no id, for which a gather gives 0, is none afterwards either.
        place = torch.empty(num_rows, dtype=torch.int64, device="cpu")
        place[order] = torch.arange(1, num_rows + 1, device="cpu")
        self._order = place.to(self.device)

    def _find_rows(self, ids: Tensor) -> Tensor:
        """Places of the rows of ids on `device`; -1 for what is no id, where `set_local_order` named the rows."""
        return ids if self._order is None else gather_rows(self._order, ids, errors=self._errors) - 1


# Page-locked words that kernels report bad ids in. They are kept for the next feature: a kernel of the last one may
# still run, and must not write into memory that has become something else.
_FLAGS: list[Tensor] = []


class Feature(NamedRows, FiledRows, ProcessRows, SavedRows, UpdatedRows, ReportedRows, FollowingRows):
    """Rows by node id, after Quiver's class of that name.

    The rows that fit `device_cache_size` and are listed by most other rows of `csr_topo` are copied to GPU memory;
    all rows stay in unified host memory, which the same kernel reads in place for the others. Without `csr_topo`
    the first rows are the hot ones. On a machine without a GPU everything stays where it is.

    Args:
        rank: Index of the GPU that results are on.
        device_list: GPUs of this host that share the feature, each from a process of its own to which the feature is
            sent (`torch.multiprocessing.spawn`), or all from this one; or `"group"`: the GPUs of the processes of the
            `torch.distributed` group, all of which call `from_cpu_tensor`. Rows on the host are then there once, in
            memory that all see, and the tensor of every process becomes a view of them.
        device_cache_size: GPU memory for hot rows: bytes, `"200M"`, `"0.9G"`, or a share of the rows such as `"20%"`.
        cache_policy: `device_replicate`: every GPU of `device_list` has the hottest rows in its memory; or
            `p2p_clique_replicate`: GPUs that NVLink joins each have a part of them, read by all at once, so that each
            clique caches as many times more as it has GPUs. GPUs that nothing joins are cliques of one.
        csr_topo: The graph, to rank rows by.
        device: Instead of `rank`: the device that results are on, e.g. `"cpu"`.
        placement: Host memory for the rows: `unified` (default) or `pinned`.
        hotness: What ranks rows: `degree` (by `csr_topo`), or a score for each, integers or floats `[N]`, such as the
            chance that a batch reads it (`expected_reads`), by which loaders rank theirs, or counted reads
            (`count_reads`).
        host_cache_size: Of a table in a file: host memory for hot rows; as `device_cache_size`.
        store_dtype: Keep float32 rows as `torch.float16`, `torch.bfloat16` or `torch.float8_e4m3fn` (which comes
            with a scale for each row, one byte of GPU memory) and read them as float32: less memory and fewer bytes
            over the link, for the precision of that dtype. The table that rows are taken from stays as it is.
        link_blocks: Thread blocks that read host memory at once, of 1,024 threads, so that each takes a whole
            multiprocessor; None measures how many it takes, once for a GPU model and driver.
        device_group_list: The cliques by hand: lists of GPUs, or `DeviceGroup`. None asks the driver.
        cold_policy: With several GPUs, where each reads the other rows: `unified`: from a copy of its own, which the
            link serves at full rate at any size; `pinned`: from the one that all see, page-locked; `shard`, with
            `device_list="group"`: each process holds an equal part and they exchange what they read, so that every
            read is a call of all processes, if only with no ids; give the rows as a memory map, so that none holds
            all. `auto`: the first for which the hosts have memory; it warns when that is `shard`.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.

    Example:
        >>> feature = Feature(device_cache_size="20%", device="cpu").from_cpu_tensor(torch.arange(8.0).view(4, 2))
        >>> feature[torch.tensor([3, 0])]
        tensor([[6., 7.],
                [0., 1.]])
    """

    @checks_keywords
    def __init__(self, rank: int = 0, device_list: Sequence[int] | str = (0,), device_cache_size: int | str = 0,
                 cache_policy: str = "device_replicate", csr_topo: Listing | None = None, *, device: Device = None,
                 placement: str = "unified", store_dtype: torch.dtype | None = None, link_blocks: int | None = None,
                 hotness: str | Tensor = "degree", host_cache_size: int | str = 0,
                 device_group_list: Sequence[Any] | None = None, cold_policy: str = "auto") -> None:  # fmt: skip
        self._settle_processes(device_list, cache_policy, cold_policy, device_group_list)
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ArgumentTypeError(f"rank must be the index of a GPU, got {rank!r}")
        if csr_topo is not None and not hasattr(csr_topo, "node_count"):
            raise ArgumentTypeError(f"csr_topo must be a CSRTopo, got {type(csr_topo).__name__}")
        if placement not in ("unified", "pinned"):
            raise ArgumentError(f"placement must be 'unified' or 'pinned', got {placement!r}")
        check_store_dtype(store_dtype)
        check_hotness(hotness)
        if link_blocks is not None and (isinstance(link_blocks, bool) or not isinstance(link_blocks, int)):
            raise ArgumentTypeError(f"link_blocks must be an int or None, got {link_blocks!r}")
        if link_blocks is not None and link_blocks < 1:
            raise ArgumentError(f"link_blocks must be at least 1, got {link_blocks}")
        if device is None and torch.cuda.is_available():
            device = rank
        self.rank = rank
        self.device = resolve_device(device)
        self.device_cache_size = device_cache_size
        self.csr_topo = csr_topo
        self.store_dtype, self.link_blocks = store_dtype, link_blocks
        self._file = self._resident = self._spilled = self._errors = None
        self.hotness, self.host_cache_size = hotness, host_cache_size
        self._placement = placement
        parse_size(device_cache_size, 0)
        parse_size(host_cache_size, 0, "host_cache_size")
        self._hot: Tensor | None = None
        self._cold: Tensor | None = None
        self._directory: Directory | None = None
        self._block: Block | None = None
        self._shape, self._dtype = None, torch.float32
        self._exponents: Tensor | None = None
        self._max_blocks: int | None = None
        self._reader: RowReader | None = None
        self._flag: Any = None
        self._order: Tensor | None = None
        self._served, self._num_served, self._following = None, 0, None

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole table, `[N, ...]`.

        Raises:
            ArgumentError: the feature holds no rows yet.
        """
        return self._filled()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows as they are read."""
        return self._dtype

    @property
    def num_hot_rows(self) -> int:
        """Rows in GPU memory."""
        if self._resident is not None:
            return self._resident.num_hot_rows
        return 0 if self._hot is None or not self._hot.is_cuda else self._hot.shape[0]

    @property
    def placement(self) -> str:
        """Where the rows live that are not in GPU memory; `cuda` when all are."""
        if self._spilled is not None:
            return self._spilled.placement
        if self._block is not None:
            return self._block.placement
        return self.device.type

    def size(self, dim: int | None = None) -> Any:
        """Shape of the table, or its length along `dim`.

        Args:
            dim: Number of a dimension; None for all.

        Raises:
            ArgumentError: the feature holds no rows yet.
        """
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions of the table."""
        return len(self.shape)

    @ordinary_tensors()
    def from_cpu_tensor(self, cpu_tensor: Tensor) -> Feature:
        """Take the rows of a tensor, in the place of those so far; returns self.

        The tensor's memory is moved, not copied, where it goes to host memory that a GPU reads: `cpu_tensor` becomes
        a view of it, with the same contents. With `store_dtype` it is copied instead.

        Args:
            cpu_tensor: `[N, ...]` of any dtype, on the CPU (or on the GPU of this feature).

        Raises:
            ArgumentError: a scalar, rows that `csr_topo` or `hotness` do not fit, or `store_dtype` cannot hold a number
                of the table. The rows so far stay then; where memory runs out they do not, and the feature is empty.
            ArgumentTypeError: no tensor, or one that is not dense.
        """
        self._check_rows(cpu_tensor)
        self._num_updates += 1
        with self._replacing():
            self._take(cpu_tensor)
        return self

    def _take(self, cpu_tensor: Tensor, dtype: torch.dtype | None = None, exponents: Tensor | None = None) -> None:
        """Put the rows of a tensor where they belong; a feature that fails to is left empty by its caller.

        Args:
            cpu_tensor: The rows.
            dtype, exponents: Of rows as they are stored, what they are read as, and exponents of float8 ones.
        """
        rows = cpu_tensor.detach().resolve_conj().resolve_neg()
        self._shape, self._dtype = rows.shape, rows.dtype if dtype is None else dtype
        self._exponents = None if exponents is None else exponents.to(self.device)
        if self._shard_rows(rows):
            return
        if self.store_dtype is not None and self.store_dtype != rows.dtype:
            rows, self._exponents = narrow_rows(rows, self.store_dtype)
            self._exponents = None if self._exponents is None else self._exponents.to(self.device)
            cpu_tensor = rows
        num_bytes = rows.numel() * rows.element_size()
        if self._is_for_many():
            self._share_rows(cpu_tensor, rows)
            return
        if self.device.type == "cpu":
            self._hot = rows.cpu().contiguous()
            return
        self._watch()
        if rows.is_cuda and rows.device == self.device:
            self._hot = rows.contiguous()
            return
        asked = self.device_cache_size
        budget = fit_budget(min(num_bytes, parse_size(asked, num_bytes)), asked, self.device)
        if budget >= num_bytes:
            hot = copy_to_gpu(rows, None, self.device)
            if hot is not None:
                self._hot = hot
                return
            budget = shrink_budget(num_bytes, asked)
        scores = score_rows(self.hotness, self.csr_topo, len(rows)) if budget > 0 else None
        while True:
            hot_ids, misses = choose_hottest(scores, len(rows), budget * len(rows) // num_bytes)
            hot = copy_to_gpu(rows, hot_ids, self.device)
            if hot is not None:
                break
            budget = shrink_budget(budget, asked)
        # Memory that a second tensor sees is not given back while it is moved.
        del rows
        self._place_on_host(cpu_tensor, hot, hot_ids, misses)

    def _watch(self) -> None:
        """Have a word that kernels report bad ids in."""
        if self._errors is None:
            self._errors = _FLAGS.pop() if _FLAGS else torch.empty(1, dtype=torch.int64, pin_memory=True, device="cpu")
        self._errors.fill_(NO_POSITION)

    def _place_on_host(self, cpu_tensor: Tensor, hot: Tensor, hot_ids: Tensor, misses: float) -> None:
        plain = not (cpu_tensor.requires_grad or cpu_tensor.is_conj() or cpu_tensor.is_neg())
        source = cpu_tensor if plain and cpu_tensor.is_contiguous() else (
            cpu_tensor.detach().resolve_conj().resolve_neg().contiguous())  # fmt: skip
        self._block = move(source, self._placement, self.device, what="features")
        if self._block.placement == "cpu":
            self._hot = source.detach()
            self._exponents = None if self._exponents is None else self._exponents.cpu()
            return
        check_filled(self._block, "features")
        self._cold = self._block.view_on_gpu(source.dtype, source.shape, self.device)
        self._hot = hot
        if hot_ids.numel() > 0:
            self._directory = Directory.of(hot_ids.to(self.device), source.shape[0]).wait()
        self._limit_blocks(misses)

    def _limit_blocks(self, misses: float, has_peers: bool = False) -> None:
        """Say how many blocks read rows, `misses` of which are on the host, with `has_peers` others on other GPUs."""
        assert self._cold is not None
        assert self._block is not None
        blocks = self.link_blocks or find_link_blocks(self._cold, self._block.placement)
        if self._cold.numel() > 0:
            width = self._cold[0].numel()
            blocks = blocks_for_rows(blocks, width * self._cold.element_size(), width * self._dtype.itemsize)
        self._max_blocks = blocks_beside_hot(blocks, misses, has_peers)
        note_reader(self, self._cold.get_device(), self._max_blocks)

    def _clear(self) -> None:
        forget_reader(self)
        self._hot = self._cold = self._directory = self._block = None
        self._exponents = self._max_blocks = self._reader = None
        self._file = self._resident = self._spilled = self._order = self._handle = self._following = None

    def _filled(self) -> torch.Size:
        if self._shape is None:
            raise ArgumentError("this Feature holds no rows yet: call from_cpu_tensor first")
        return self._shape

    def __getitem__(self, node_idx: Tensor | Sequence[int]) -> Tensor:
        """Rows of the ids, `[n, ...]` on `device`.

        Ids on the CPU are checked at once. An id on the GPU that is out of range gives a row of zeros, and an
        `IdError` at the next use of this feature or at `synchronize()`, as reading it would cost a wait.
        """
        shape = self._filled()
        if self._hot is None and self._handle is not None:
            self._open_handle()
        self._raise_earlier_error()
        if self._block is not None:
            self._block.check_process()
        ids = upload(check_ids("node_idx", as_ids("node_idx", node_idx), shape[0]), self.device)
        ids = self._find_rows(ids)
        return self._spilled.read(ids) if self._spilled is not None else self.gather(ids, self._errors)

    def gather(self, ids: Tensor, errors: Tensor | None) -> Tensor:
        """Rows of ids from memory, `[n, ...]` of `dtype` on `device`, in the order in which the table lies.

        Args:
            ids: int32 or int64 `[n]`, on `device`.
            errors: int64 `[1]` that gets the lowest position of an id out of range, whose row is zero, where ids are on
                a GPU; None tells nobody.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: ids of another dtype or shape, or on the CPU and out of range.
        """
        if self._served is not None:
            self._count(ids)
        hot = self._hot
        stored: Any = {"dtype": self._dtype, "exponents": self._exponents}
        assert hot is not None
        if not hot.is_cuda:
            return gather_rows(hot, ids.cpu(), **stored).to(self.device)
        if self._cold is None:
            return gather_rows(hot, ids, errors=errors, **stored)
        if self._following is not None:
            self._order_reads()
        table, cold = (self._cold, None) if self._directory is None else (hot, self._cold)
        rows = gather_rows(table, ids, cold=cold, directory=self._directory, errors=errors,
                           max_blocks=self._max_blocks, **stored)  # fmt: skip
        self._follow(ids)
        return rows

    def read(self, ids: Tensor) -> Tensor:
        """Rows of ids that a sampler made, `[n, ...]` of `dtype`: as `feature[ids]`, with fewer steps on the host.

        Args:
            ids: int64 `[n]`, contiguous and on `device`; it is still checked that they lie in the table.

        Raises:
            ArgumentError: the feature holds no rows yet.
            IdError: an id on the CPU is out of range; or, on a GPU, one of an earlier read was.
        """
        if self._reader is None:
            self._filled()
            hot = self._hot
            if hot is None or self._order is not None or self._following is not None:
                return self[ids]
            if not hot.is_cuda or not ids.is_cuda:
                is_bare = self.device.type == "cpu" and self._spilled is None and self._block is None
                is_bare = is_bare and self._served is None
                rows = select_rows(hot, ids) if is_bare and hot.dtype == self._dtype else None
                return self[ids] if rows is None else rows
            assert self._errors is not None
            # Without a directory all rows are in one of the two tables.
            table, cold = (hot, self._cold) if self._cold is None or self._directory is not None else (self._cold, None)
            self._reader = RowReader(table, cold, self._directory, self._errors, self._max_blocks, dtype=self._dtype,
                                     exponents=self._exponents, strands=self._count_strands())  # fmt: skip
            # Through NumPy, as looking at an item of a tensor costs more than the launch of a kernel.
            self._flag = self._errors.numpy()
        if self._served is not None:
            self._count(ids)
        if self._flag[0] != NO_POSITION:
            self._raise_earlier_error()
        if self._block is not None:
            self._block.check_process()
        return self._reader.read(ids)

    def reads_in_place(self, table: Tensor) -> bool:
        """Report whether all rows are read from the memory of `table`, so that whatever is written there is read.

        Args:
            table: What the feature was made of, `[N, ...]` of any dtype.
        """
        hot, place = self._hot, table.data_ptr()
        if hot is None or self._spilled is not None or self._handle is not None or hot.dtype != table.dtype:
            return False
        if self._cold is not None:
            return self.num_hot_rows == 0 and self._block is not None and self._block.address == place
        return hot.data_ptr() == place and hot.stride() == table.stride()

    @property
    def whole(self) -> Tensor | None:
        """The table, `[N, ...]` of `dtype`, where all of it lies in GPU memory as it is read; None elsewhere."""
        hot = self._hot
        is_whole = hot is not None and hot.is_cuda and self._cold is None and self._order is None
        return hot if is_whole and self._spilled is None and hot is not None and hot.dtype == self._dtype else None

    def __del__(self, flags: list[Tensor] = _FLAGS) -> None:
        # Names are given: as the interpreter ends, those of modules are gone before objects are.
        errors: Tensor | None = getattr(self, "_errors", None)
        if errors is not None:
            flags.append(errors)

    def synchronize(self) -> None:
        """Wait for all reads so far.

        Raises:
            IdError: one of them had an id out of range.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._raise_earlier_error()

    def _raise_earlier_error(self) -> None:
        if self._errors is not None and int(self._errors[0]) != NO_POSITION:
            position = int(self._errors[0])
            self._errors[0] = NO_POSITION
            raise IdError(f"node_idx must lie in [0, {self.shape[0]}); an earlier read had an id outside at position "
                          f"{position}")  # fmt: skip

    def __repr__(self) -> str:
        if self._shape is None:
            return f"Feature(empty, device={self.device})"
        return (f"Feature({list(self._shape)} of {self._dtype}, {self.num_hot_rows} rows in GPU memory, "
                f"the others {self.placement}, device={self.device})")  # fmt: skip
