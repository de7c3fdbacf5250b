"""The part of `Feature` that leaves rows in a file: where they come from, and which of them are copied to memory."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.features.disk import DiskTier, StagedTier
from pyg_direct.features.hotness import Listing, choose_hottest, score_rows
from pyg_direct.features.parts import DeviceConfig, join_parts, open_array
from pyg_direct.features.replaced import ReplacedRows
from pyg_direct.features.rowfile import RowFile
from pyg_direct.features.sharded import ShardedRows
from pyg_direct.features.spilled import SpilledRows
from pyg_direct.features.tier import Tier
from pyg_direct.ops.check import check_ids
from pyg_direct.ops.gather import Directory, gather_rows
from pyg_direct.ops.locate import locate_ids
from pyg_direct.progress import show_wait
from pyg_direct.runtime.size import parse_size

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
