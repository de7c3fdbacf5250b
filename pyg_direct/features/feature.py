"""`Feature`: a table of rows, with the hottest of them in GPU memory.

To find a row, `set_local_order` may first map an id to the position of its row. A tier (`tiers/`) holds the rows, and
hot rows lie over it in one of two ways. Kernels read the tiers of `MemoryRows` (`memory_rows.py`) in place: one kernel
reads hot rows in GPU memory and the others on the host. The tier of `SpilledRows` (`spilled_rows.py`), a file or the
parts of several processes, is asked for the rows that are not in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.feature_arguments import (
    check_dense,
    check_following,
    check_num_rows,
    check_options,
    check_update,
    find_places,
    read_disk_map,
)
from pyg_direct.features.hot_rows import Listing, score_rows
from pyg_direct.features.memory_rows import MemoryRows, Served, check_placing, place_rows
from pyg_direct.features.process_sharing import (
    Handle,
    copy_feature,
    deepcopy_feature,
    is_shared_out,
    open_handle,
    read_gpus,
    reduce_feature,
    send_feature,
    share_feature,
    share_rows,
)
from pyg_direct.features.row_dtypes import check_narrow, narrow_rows
from pyg_direct.features.row_files import DeviceConfig, RowFile, join_parts, open_array
from pyg_direct.features.spilled_rows import SpilledRows, shard_rows, spill_file
from pyg_direct.features.tier_report import Report, list_parts, report_tiers
from pyg_direct.features.tiers.choice import open_file
from pyg_direct.object_text import describe, show_parts
from pyg_direct.ops.argument_checks import as_ids, check_ids, checks_keywords
from pyg_direct.ops.rows.gather_rows import gather_rows
from pyg_direct.ops.rows.upload import upload
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.graph_capture import forget_reader
from pyg_direct.runtime.host.host_memory import check_size, parse_size
from pyg_direct.runtime.host.tensor_views import ordinary_tensors
from pyg_direct.typing import Device


class Feature:
    """Rows by node id, after Quiver's class of that name.

    The rows that fit `device_cache_size` and are listed by most other rows of `csr_topo` are copied to GPU memory. All
    rows stay in unified host memory, which the same kernel reads in place for the others. Without `csr_topo` the first
    rows are the hot ones. On a machine without a GPU every row stays in place.

    Args:
        rank: Index of the GPU that results are on.
        device_list: GPUs of this host that share the feature. Either each belongs to a process of its own, to which the
            feature is sent (`torch.multiprocessing.spawn`), or all belong to this process. `"group"` takes the GPUs of
            the processes of the `torch.distributed` group, all of which call `from_cpu_tensor`. Rows on the host then
            exist once, in shared memory, and the tensor of every process becomes a view of them.
        device_cache_size: GPU memory for hot rows: bytes, `"200M"`, `"0.9G"`, or a share of the rows such as `"20%"`.
        cache_policy: `device_replicate`: every GPU of `device_list` has the hottest rows in its memory.
            `p2p_clique_replicate`: GPUs that NVLink joins each hold a part of them, and all read every part. A clique
            of n GPUs then caches n times more rows; a GPU without NVLink is a clique of its own.
        csr_topo: The graph, to rank rows by.
        device: Instead of `rank`: the device that results are on, e.g. `"cpu"`.
        placement: Host memory for the rows: `unified` (default) or `pinned`.
        hotness: Ranking of rows: `degree` (by `csr_topo`), or one score for each row, integers or floats `[N]`. A score
            may be the chance that a batch reads the row (`expected_reads`), by which loaders rank theirs, or counted
            reads (`count_reads`).
        host_cache_size: Of a table in a file: host memory for hot rows; as `device_cache_size`.
        store_dtype: Keep float32 rows as `torch.float16`, `torch.bfloat16` or `torch.float8_e4m3fn` and read them as
            float32. This takes less memory and fewer bytes over the link, for the precision of that dtype. float8 adds
            a scale for each row, one byte of GPU memory. The table that rows are taken from stays unchanged.
        link_blocks: Thread blocks that read host memory at once, of 1,024 threads, so that each takes a whole
            multiprocessor; None takes 4, and more beside hot rows.
        device_group_list: The cliques by hand: lists of GPUs, or `DeviceGroup`. None asks the driver.
        cold_policy: With several GPUs, the memory from which each reads the other rows. `unified`: a copy of its own,
            which the link serves at full rate at any size. `pinned`: one shared, page-locked copy. `shard`, with
            `device_list="group"`: each process holds an equal part and they exchange rows. Every read is then a call of
            all processes, if only with no ids; pass a memory map, so that no process holds all rows. `auto`: the first
            for which the hosts have memory; it warns if that is `shard`.

    Attributes:
        stored: Holder of the rows; None while there are none, or before a handle is opened.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.

    Example:
        >>> feature = Feature(device_cache_size="20%", device="cpu").from_cpu_tensor(torch.arange(8.0).view(4, 2))
        >>> feature[torch.tensor([3, 0])]
        tensor([[6., 7.],
                [0., 1.]])
    """

    # Calls that have changed rows.
    _num_updates = 0

    @checks_keywords
    def __init__(self, rank: int = 0, device_list: Sequence[int] | str = (0,), device_cache_size: int | str = 0,
                 cache_policy: str = "device_replicate", csr_topo: Listing | None = None, *, device: Device = None,
                 placement: str = "unified", store_dtype: torch.dtype | None = None, link_blocks: int | None = None,
                 hotness: str | Tensor = "degree", host_cache_size: int | str = 0,
                 device_group_list: Sequence[Any] | None = None, cold_policy: str = "auto") -> None:  # fmt: skip
        self.device_list, self.device_group_list = read_gpus(device_list, cache_policy, cold_policy, device_group_list)
        self.cache_policy, self.cold_policy = cache_policy, cold_policy
        check_options(rank, csr_topo, placement, store_dtype, hotness, link_blocks)
        if device is None and torch.cuda.is_available():
            device = rank
        self.rank = rank
        self.device = resolve_device(device)
        self.device_cache_size = device_cache_size
        self.csr_topo = csr_topo
        self.store_dtype, self.link_blocks = store_dtype, link_blocks
        self.hotness, self.host_cache_size = hotness, host_cache_size
        self._placement = placement
        check_size(device_cache_size)
        check_size(host_cache_size, "host_cache_size")
        self.stored: MemoryRows | SpilledRows | None = None
        self._shape: torch.Size | None = None
        self._dtype = torch.float32
        # Row of each id, counted from 1, so that an invalid id, for which a gather gives 0, finds no row.
        self._order: Tensor | None = None
        # The same of a file whose rows lie in another order, before `set_local_order`.
        self._places: Tensor | None = None
        # True if these are all rows of a file, read into memory; if the rows of its file lie in another order than ids.
        self.holds_file = self.is_reordered = False
        # State for other processes; a lazy handle is opened on the current GPU.
        self._handle: Handle | None = None
        self._is_lazy = False
        self._served: Served | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ForkingPickler.register(cls, send_feature)

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
        return 0 if self.stored is None else self.stored.num_hot_rows

    @property
    def placement(self) -> str:
        """Place of the rows that are not in GPU memory; `cuda` when all are there."""
        return self.device.type if self.stored is None else self.stored.placement

    @property
    def whole(self) -> Tensor | None:
        """Return the table, `[N, ...]` of `dtype`, if memory of the device holds it whole in it; otherwise None."""
        return None if self.stored is None or self._order is not None else self.stored.whole

    @property
    def num_writes(self) -> int:
        """Number of writes to the rows: calls of `update_`, and on a CPU writes to the tensor that they are of."""
        return self._num_updates + (0 if self.stored is None else self.stored.num_writes)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the table, or its length along `dim`.

        Args:
            dim: Number of a dimension; None for all.

        Raises:
            ArgumentError: the feature holds no rows yet.
        """
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions of the table."""
        return len(self.shape)

    # Reading.

    def __getitem__(self, node_idx: Tensor | Sequence[int]) -> Tensor:
        """Return rows of the ids, `[n, ...]` on `device`.

        Ids on the CPU are checked at once. An id on the GPU that is out of range gives a row of zeros, because a check
        at once would cost a wait. Its `IdError` is raised at the next use of this feature or at `synchronize()`.
        """
        stored = self._open()
        stored.check()
        ids = upload(check_ids("node_idx", as_ids("node_idx", node_idx), self._filled()[0]), self.device)
        return stored.take(self._find_rows(ids, stored))

    def gather(self, ids: Tensor, errors: Tensor | None) -> Tensor:
        """Return rows of ids from memory, `[n, ...]` of `dtype` on `device`, in the order in which the table lies.

        Args:
            ids: int32 or int64 `[n]`, on `device`.
            errors: int64 `[1]` that receives the lowest position of an id out of range, whose row is zero, if ids are
                on a GPU; None reports no error.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: ids of another dtype or shape, or on the CPU and out of range.
        """
        return self._open_memory().gather(ids, errors)

    def read(self, ids: Tensor) -> Tensor:
        """Return rows of ids that a sampler made, `[n, ...]` of `dtype`: as `feature[ids]`, with fewer steps on the
        host.

        Args:
            ids: int64 `[n]`, contiguous and on `device`; it is still checked that they lie in the table.

        Raises:
            ArgumentError: the feature holds no rows yet.
            IdError: an id on the CPU is out of range; or, on a GPU, one of an earlier read was.
        """
        stored, rows = self.stored, None
        if self._order is None and isinstance(stored, MemoryRows):
            rows = stored.read_sampled(ids)
        return self[ids] if rows is None else rows

    def read_mmap(self, ids: Tensor) -> Tensor:
        """Return rows of ids from the file, also of those that are in memory, `[n, ...]` of `dtype` on `device`.

        Args:
            ids: int32 or int64 `[n]`, on any device.

        Raises:
            ArgumentError: the feature has no file, or `ids` have more than one dimension.
            ArgumentTypeError: `ids` have another dtype.
            IdError: an id is out of range.
        """
        if not isinstance(self.stored, SpilledRows) or self.stored.tier.is_collective:
            raise ArgumentError("this Feature has no file: call from_file, from_mmap or set_mmap_file first")
        ids = check_ids("ids", ids, self._filled()[0]).to(self.device)
        return self.stored.tier.take(ids if self._places is None else self._find_rows(ids, self.stored))

    def find_missing(self, ids: Tensor) -> Tensor:
        """Return positions of the rows of ids that are in no memory, int64 `[m]` on the CPU; -1 for an invalid id.

        Args:
            ids: int32 or int64 `[n]`, on any device.

        Raises:
            ArgumentError, ArgumentTypeError: no rows yet, or ids of another dtype or shape.
        """
        stored = self._open()
        ids = upload(check_ids("ids", ids), self.device)
        if not isinstance(stored, SpilledRows):
            return ids.new_empty(0, dtype=torch.int64, device="cpu")
        return stored.find_missing(self._find_rows(ids, stored))

    def reads_in_place(self, table: Tensor) -> bool:
        """Report whether all rows are read from the memory of `table`, so that every write to it is read.

        Args:
            table: The table that the feature was made of, `[N, ...]` of any dtype.
        """
        return isinstance(self.stored, MemoryRows) and self._handle is None and self.stored.lie_in(table)

    def synchronize(self) -> None:
        """Wait for all reads so far.

        Raises:
            IdError: one of them had an id out of range.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.stored is not None:
            self.stored.check()

    def _filled(self) -> torch.Size:
        if self._shape is None:
            raise ArgumentError("this Feature holds no rows yet: call from_cpu_tensor or from_file first")
        return self._shape

    def _open(self) -> MemoryRows | SpilledRows:
        """Return the holder of rows; a feature of another process gets its device and its tables here."""
        self._filled()
        if self.stored is None:
            assert self._handle is not None
            if self._is_lazy:
                self.device, self._is_lazy = resolve_device(None), False
                self.rank = self.device.index or 0
                self._served = None if self._served is None else Served(self.device)
            self._hold(open_handle(self._handle, self.device, self.link_blocks))
            order = self._handle.order
            self._order = None if order is None else order.to(self.device)
        assert self.stored is not None
        return self.stored

    def _open_memory(self) -> MemoryRows:
        stored = self._open()
        if not isinstance(stored, MemoryRows):
            raise ArgumentError(f"rows must be in memory to be read from there, got rows of {self.placement!r}")
        return stored

    def _find_rows(self, ids: Tensor, stored: MemoryRows | SpilledRows) -> Tensor:
        """Return positions of the rows of ids; -1 for an invalid id, if `set_local_order` named the rows."""
        if self._order is None:
            return ids
        errors = None if stored.errors is None else stored.errors.word
        return gather_rows(self._order.to(ids.device), ids, errors=errors) - 1

    # Taking rows.

    @ordinary_tensors()
    def from_cpu_tensor(self, cpu_tensor: Tensor) -> Feature:
        """Take the rows of a tensor, in place of the present rows; returns self.

        If the rows go to host memory that a GPU reads, the tensor's memory is moved, not copied. `cpu_tensor` then
        becomes a view of it, with the same contents. With `store_dtype` it is copied instead.

        Args:
            cpu_tensor: `[N, ...]` of any dtype, on the CPU (or on the GPU of this feature).

        Raises:
            ArgumentError: a scalar, rows that `csr_topo` or `hotness` do not fit, or a number that `store_dtype` cannot
                hold; the present rows then stay. If memory runs out they do not stay, and the feature is empty.
            ArgumentTypeError: no tensor, or one that is not dense.
        """
        self._check_rows(cpu_tensor)
        self._num_updates += 1
        with self._replacing():
            self._take(cpu_tensor)
        return self

    def _take(self, cpu_tensor: Tensor, dtype: torch.dtype | None = None, exponents: Tensor | None = None) -> None:
        """Put the rows of a tensor into their tiers; if this fails, the caller leaves the feature empty.

        Args:
            dtype, exponents: Dtype that stored rows are read as, and exponents of float8 rows.
        """
        rows = cpu_tensor.detach().resolve_conj().resolve_neg()
        self._shape, self._dtype = rows.shape, rows.dtype if dtype is None else dtype
        if self.device_list == "group" and is_shared_out(self.cold_policy, rows):
            rank = partial(score_rows, self.hotness, self.csr_topo, len(rows))
            self._hold(shard_rows(rows, self.device, self.device_cache_size, rank,
                                  partial(self._keep, store_dtype=self.store_dtype)))  # fmt: skip
            return
        if self.store_dtype is not None and self.store_dtype != rows.dtype:
            rows, exponents = narrow_rows(rows, self.store_dtype)
            cpu_tensor = rows
        if self._is_for_many():
            self._handle = share_rows(self, cpu_tensor, rows, exponents)
            if self.device_list == "group":
                self._open()
            return
        exponents = None if exponents is None else exponents.to(self.device)
        rank = partial(score_rows, self.hotness, self.csr_topo, len(rows))
        # Memory that a second tensor views is not freed while it is moved.
        del rows
        self._hold(place_rows(cpu_tensor, self.device, self._dtype, self.device_cache_size, self._placement, rank,
                              exponents=exponents, link_blocks=self.link_blocks))  # fmt: skip

    def _keep(self, rows: Tensor, **options: Any) -> MemoryRows:
        """Put rows into memory, by a feature with the place of this one."""
        made = type(self)(device=self.device, placement=self._placement, link_blocks=self.link_blocks, **options)
        return made.from_cpu_tensor(rows)._open_memory()

    def _is_for_many(self) -> bool:
        """Report whether several processes or GPUs read the rows."""
        return self.device_list == "group" or (self.device.type == "cuda" and len(self.device_list) > 1)

    def from_file(self, path: str | PathLike[str], *, name: str | None = None, dtype: torch.dtype | None = None,
                  shape: Sequence[int] | None = None, offset: int = 0, order: Tensor | None = None
                  ) -> Feature:  # fmt: skip
        """Take the rows of a file and leave them there; returns self.

        The hottest rows that fit `device_cache_size` are copied to GPU memory, those that fit `host_cache_size` to
        host memory; the others are read from the file by threads whenever they are asked for. A table that fits one
        of these whole is read into it. Pickles are refused.

        Args:
            path: `.npy`, `.safetensors`, or bare bytes. The file must stay as it is: it is checked before each read.
            name, dtype, shape, offset: See `RowFile`: the tensor of a `.safetensors`; the layout of bare bytes.
            order: The id of each row of the file, int32 or int64 `[N]`, if they do not lie in the order of ids. A file
                of `pack_rows` has it. Rows are read by their ids.

        Raises:
            FileError: the file is missing, damaged, cut short, or a pickle.
            ArgumentError, ArgumentTypeError: named argument, rule and value.
        """
        return self._from_disk(RowFile(path, name=name, dtype=dtype, shape=shape, offset=offset), order)

    def from_mmap(self, np_array: np.ndarray | None, device_config: DeviceConfig | None = None) -> Feature:
        """Take the rows of a memory map; returns self.

        Args:
            np_array: `[N, ...]` of any dtype, a map made by `np.load(mmap_mode=)` or `np.memmap`, or another array.
                None if the parts of `device_config` are rows themselves.
            device_config: Without it, rows stay in the file, as by `from_file`. With it, as in Quiver, the feature
                holds only the rows of its parts, one after the other, and first the rows of this GPU.

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

    def _from_disk(self, file: RowFile, order: Tensor | None = None) -> Feature:
        from pyg_direct.features.packed_rows import check_order, invert

        shape, dtype = file.rows.shape, file.rows.dtype
        check_num_rows(self.csr_topo, shape[0])
        if self.store_dtype not in (None, dtype):
            raise ArgumentError(f"store_dtype must be None or {dtype}, as {file.path} has it, got {self.store_dtype}")
        if order is not None and file.order is not None:
            raise ArgumentError(f"order must be None for {file.path}, which has an order of its own: it was packed")
        order = file.order if order is None else order
        order = None if order is None else check_order(order, shape[0])
        num_bytes, on_gpu = file.layout.num_bytes, self.device.type == "cuda"
        hot_bytes = min(parse_size(self.device_cache_size, num_bytes) if on_gpu else 0, num_bytes)
        host_bytes = min(parse_size(self.host_cache_size, num_bytes, "host_cache_size"), num_bytes)
        if num_bytes == max(hot_bytes, host_bytes):
            rows = file.stream() if num_bytes > 0 else file.rows.clone()
            self.from_cpu_tensor(rows if order is None else rows[invert(order)])
            self.holds_file = True
            return self
        count = shape[0] * max(hot_bytes, host_bytes) // num_bytes
        scores = score_rows(self.hotness, self.csr_topo, shape[0]) if count > 0 else None
        if scores is not None and order is not None:
            scores = scores[order.to(scores.device)]
        with self._replacing():
            self._shape, self._dtype = shape, dtype
            keep = partial(self._keep, rank=self.rank, device_list=self.device_list)
            self._hold(spill_file(file, self.device, scores, count, hot_bytes, keep))
        self.is_reordered = order is not None
        if order is not None:
            self._places = invert(order) + 1
            self._order = self._places.to(self.device)
        return self

    def set_mmap_file(self, path: str | PathLike[str], disk_map: Tensor) -> None:
        """Read rows that are not in memory from a file, as Quiver does.

        Args:
            path: A table with a row for each id; see `from_file`.
            disk_map: int32 or int64 `[N]`: the position of each id among the rows that this feature holds so far. A
                negative number marks a row that only the file has.

        Raises:
            FileError, ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        file, places = read_disk_map(path, disk_map, self._filled(), self._dtype)
        memory = self._open_memory()
        self._clear()
        self._shape = file.rows.shape
        # 0 also stands for invalid ids, which the file then refuses.
        shifted = places.clamp_(min=-1).add_(1).to(self.device)
        self._hold(SpilledRows(open_file(file, self.device), lambda ids: gather_rows(shifted, ids) - 1, memory))

    def _check_rows(self, cpu_tensor: Any) -> None:
        """Refuse the arguments that `from_cpu_tensor` refuses, before any row is freed."""
        check_dense(cpu_tensor)
        check_num_rows(self.csr_topo, len(cpu_tensor))
        if self._shape is None:
            # No row would be lost here, and other errors are found as the rows are taken.
            return
        dtype = cpu_tensor.dtype if self.store_dtype is None else self.store_dtype
        if dtype != cpu_tensor.dtype:
            check_narrow(cpu_tensor.detach(), dtype)
        check_placing(cpu_tensor, self.device, dtype, self.device_cache_size, hotness=self.hotness,
                      csr_topo=self.csr_topo, is_for_many=self._is_for_many())  # fmt: skip

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """Free the present rows, because memory may not hold two tables; if the block fails, no rows are left."""
        self._clear()
        try:
            yield
        except BaseException:
            self._clear()
            self._shape = None
            raise

    def _clear(self) -> None:
        if self.stored is not None:
            forget_reader(self.stored)
        self.stored = self._order = self._places = self._handle = None
        self.holds_file = False

    def _hold(self, stored: MemoryRows | SpilledRows) -> None:
        self.stored = stored
        if self._served is not None and isinstance(stored, MemoryRows):
            stored.count_served(self._served)

    # Changing rows and their names.

    def update_(self, ids: Tensor | Sequence[int], rows: Tensor) -> Feature:
        """Replace the rows of ids by `rows`, wherever they lie; returns self.

        Both the hot copy in GPU memory and the row on the host are written. So a tensor that the feature was made of
        shows the new rows too; on a GPU once the write has run (see `synchronize`). For node embeddings, read the rows
        of a batch, compute the new ones with any optimizer of sparse rows, and write them back.

        Args:
            ids: int32 or int64 `[n]` on any device, or a list; of one that comes several times, the last row counts.
            rows: `[n, ...]` of the feature's dtype, on any device; rows that are stored in fewer bits are rounded.

        Raises:
            ArgumentError: rows of another shape or dtype, rows in a file, or rows that processes share.
            ArgumentTypeError: `rows` are no tensor, or `ids` no ids.
            IdError: as in `feature[ids]`; ids that are out of range write no rows.
        """
        ids, stored = check_update(self, ids, rows), self.stored
        assert isinstance(stored, MemoryRows)
        stored.check()
        target = self.device if stored.is_on_gpu else torch.device("cpu")
        ids, rows = ids.to(target), rows.detach().to(target)
        ids = self._find_rows(ids, stored)
        if ids.numel() > 0:
            self._num_updates += 1
            stored.write(ids, rows)
        return self

    def follow_reads(self, period: int = 25, fade: float = 0.8) -> None:
        """Choose the hot rows again after every `period` reads from now on, by the recent reads of each row. Use it for
        reads that drift; for other reads, rows ranked once (`expected_reads`) are served as well and cost less.

        Rows that stay hot are copied inside GPU memory, which holds the hot rows twice for that moment; rows that
        become hot are read over the link. If no part of the rows is hot, there is no effect.

        Args:
            period: Reads between two choices; 0 to stop.
            fade: Share of a count that remains after a choice, in [0, 1].

        Raises:
            ArgumentError: named argument, rule and value, or no rows yet.
        """
        self._filled()
        check_following(period, fade)
        if isinstance(self.stored, MemoryRows):
            self.stored.follow(0 if self._handle is not None else period, fade)

    def set_local_order(self, local_order: Tensor) -> None:
        """Name the rows: from now on the id `local_order[i]` means row `i`, as in Quiver.

        Args:
            local_order: int32 or int64 `[N]`, each of 0 to N - 1 once.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value, or there are no rows yet.
        """
        place = find_places(local_order, self._filled()[0], self._places)
        self._order = place.to(self.device)

    # Other processes, copies and files.

    def share_ipc(self) -> Handle:
        """Return a handle for other processes of this host, to be pickled for them; rows are not copied for each.

        A feature of one GPU, or of none, is moved to shared memory by the first call.

        Raises:
            ArgumentError: there are no rows yet, or they are in a file, which each process can open itself, or shared
                out over processes.
        """
        return share_feature(self)

    @classmethod
    def new_from_ipc_handle(cls, rank: int, ipc_handle: Handle) -> Feature:
        """Return the feature of a handle in this process, with results on GPU `rank`, or on the CPU of a machine
        without a GPU.

        Args:
            rank: Index of the GPU; without effect on a machine without one.
            ipc_handle: The handle that `share_ipc` returned.

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
        """Return the feature of a handle, opened on the current GPU of this process when it is first read.

        Args:
            ipc_handle: The handle that `share_ipc` returned.

        Raises:
            ArgumentTypeError: `ipc_handle` is no handle.
        """
        if not isinstance(ipc_handle, Handle):
            raise ArgumentTypeError(f"ipc_handle must be what share_ipc returned, got {type(ipc_handle).__name__}")
        feature = cls(device="cpu", **ipc_handle.options)
        feature._handle, feature._is_lazy = ipc_handle, True
        feature._shape, feature._dtype = ipc_handle.shape, ipc_handle.dtype
        return feature

    def __copy__(self) -> Feature:
        """Return another feature over the same rows."""
        return copy_feature(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Feature:
        """Return a feature with a copy of the rows. Rows of a file, of several processes or on the host of a GPU are
        shared instead, and cannot be updated then.
        """
        return deepcopy_feature(self)

    def __reduce__(self) -> Any:
        return reduce_feature(self)

    # Reports.

    def count_served(self, on: bool = True) -> None:
        """Count from now on the rows that each tier serves, from zero, on the device; or stop. It takes two small
        kernels a read, and no wait.

        Args:
            on: False to stop.
        """
        self._served = Served(self.device) if on else None
        if self.stored is not None:
            self.stored.count_served(self._served)

    def report(self, picture: str | PathLike[str] | None = None) -> Report:
        """Print and return a report of the rows that each tier holds and, after `count_served`, of the rows it has
        served.

        Args:
            picture: File for a picture of it, such as `tiers.png` (needs the extra `bench`).

        Raises:
            ArgumentError: the feature holds no rows yet.
        """
        found = self.tell()
        print(found)
        if picture is not None:
            found.draw(picture)
        return found

    def tell(self) -> Report:
        """Return the report without printing it.

        Raises:
            ArgumentError: the feature holds no rows yet.
        """
        self._filled()
        dtype = self.stored.tier.dtype if isinstance(self.stored, MemoryRows) else self._dtype
        return report_tiers(self, dtype, self._served is not None)

    @property
    def hit_rate(self) -> float:
        """Share of the rows read since `count_served` that were in GPU memory; waits for the GPU.

        Raises:
            ArgumentError: reads are not counted.
        """
        if self._served is None:
            raise ArgumentError("hit_rate needs reads that are counted: call count_served first")
        stored = self.stored
        return 0.0 if stored is None else stored.count_hot(stored.num_read) / max(1, stored.num_read)

    def __repr__(self) -> str:
        return describe(self, list_parts(self))

    def _repr_html_(self) -> str:
        return show_parts(self, list_parts(self))


ForkingPickler.register(Feature, send_feature)
