"""`Feature`: a table of rows on the host with its hottest rows in GPU memory, read by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.features.filed import FiledRows
from pyg_direct.features.following import FollowingRows
from pyg_direct.features.hot import copy_to_gpu, fit_budget, shrink_budget
from pyg_direct.features.hotness import Listing, check_hotness, choose_hottest, score_rows
from pyg_direct.features.link import blocks_beside_hot, blocks_for_rows, find_link_blocks
from pyg_direct.features.named import NamedRows
from pyg_direct.features.processes import ProcessRows
from pyg_direct.features.report import ReportedRows
from pyg_direct.features.saved import SavedRows
from pyg_direct.features.store import check_store_dtype, narrow_rows
from pyg_direct.features.updated import UpdatedRows
from pyg_direct.kernels.state import NO_POSITION
from pyg_direct.ops.check import as_ids, check_ids
from pyg_direct.ops.gather import Directory, gather_rows
from pyg_direct.ops.keywords import checks_keywords
from pyg_direct.ops.reader import RowReader, select_rows
from pyg_direct.ops.upload import upload
from pyg_direct.runtime.device import resolve_device
from pyg_direct.runtime.memory import Block, move
from pyg_direct.runtime.mode import ordinary_tensors
from pyg_direct.runtime.probe import check_filled
from pyg_direct.runtime.share import forget_reader, note_reader
from pyg_direct.runtime.size import parse_size
from pyg_direct.typing import Device

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
        hotness: What ranks rows: `degree` (by `csr_topo`), or a score for each, integers or floats `[N]`, such as
            counted reads (`count_reads`).
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

    def __del__(self) -> None:
        errors: Tensor | None = getattr(self, "_errors", None)
        if errors is not None:
            _FLAGS.append(errors)

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
