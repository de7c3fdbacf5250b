"""Feature tables in files: `.npy`, `.safetensors` or bare bytes, mapped in place; none can hold code.

`save_rows` writes a file that is there whole or not at all. `DeviceConfig` lists the parts of a table as Quiver's
class does. `open_array` opens arrays that may be maps of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import math
import mmap
import os
import shutil
import struct
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.cache_folder import open_beside, sync_folder
from pyg_direct.errors import ArgumentError, ArgumentTypeError, FileError
from pyg_direct.kernels.rows.gather import read_file_rows_cpu
from pyg_direct.ops.argument_checks import INDEX_DTYPES, check_ids
from pyg_direct.ops.run_kernel import threads_for
from pyg_direct.progress import Bar
from pyg_direct.runtime.host.tensor_views import as_bytes

SAFETENSORS = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
               "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
               "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
               "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # fmt: skip
# Mark of a `.safetensors` whose tensor `rows` lies in the order of its tensor `order`.
PACKED = "pyg_direct.packed"
_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npz")
_MOST_HEADER = 100 << 20
_LENGTH = struct.Struct("<Q")


class Layout(NamedTuple):
    """Position of rows in a file."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that all rows take."""
        return math.prod(self.shape) * self.dtype.itemsize


class RowFile:
    """A table in a file that is read in place and never written.

    Args:
        path: `.npy`, `.safetensors`, or bytes of rows one behind the other.
        name: Tensor of a `.safetensors`; None if the file holds only one.
        dtype, shape: Dtype and shape of bare bytes; the first number of `shape` may be -1. For other files: the
            expected ones.
        offset: First byte of the rows in bare bytes.
        is_bare: Take the file for bare bytes whatever its name.

    Attributes:
        rows: `[N, ...]`, a tensor over the mapped file; only to be read.
        order: Of a packed file (`pack_rows`): the id of each row, int64 `[N]`; otherwise None.
    """

    def __init__(self, path: str | os.PathLike[str], *, name: str | None = None, dtype: torch.dtype | None = None,
                 shape: Sequence[int] | None = None, offset: int = 0, is_bare: bool = False) -> None:  # fmt: skip
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentTypeError(f"path must be the name of a file, got {path!r}")
        self.path, self._is_bare = Path(path), is_bare
        self._order_layout: Layout | None = None
        try:
            with self.path.open("rb") as file:
                self._stamp = _stamp(os.fstat(file.fileno()))
                self.layout = self._read_layout(file, name, dtype, shape, offset)
                self._check_length(self._stamp[0])
                self.rows = self._map(file)
                self._handle = os.dup(file.fileno())
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise FileError(f"path must name a file that can be read, got {str(path)!r}: {error.strerror}") from error
        # Every reader holds this object, so that the number of the file cannot name another file.
        weakref.finalize(self, os.close, self._handle).atexit = False
        self.order: Tensor | None = None
        if self._order_layout is not None:
            numbers = np.empty(self._order_layout.shape, np.int64)
            self.read_bytes(self._order_layout.offset, numbers.data.cast("B"))
            self.order = torch.from_numpy(numbers)

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Size, time of change in ns, and number of the file when it was opened."""
        return self._stamp

    @property
    def handle(self) -> int:
        """Open handle of the file, which stays the file's whatever its path names later."""
        return self._handle

    def _read_layout(self, file: BinaryIO, name: str | None, dtype: torch.dtype | None, shape: Sequence[int] | None,
                     offset: int) -> Layout:  # fmt: skip
        kind = "" if self._is_bare else self.path.suffix.lower()
        if kind in _PICKLES:
            raise FileError(f"path must name a file that holds rows alone, got {self.path}, a pickle or an archive: "
                            "loading one could run code; save its rows with pyg_direct.save_rows")  # fmt: skip
        if kind == ".parquet":
            raise FileError(f"path must name a file whose rows can be read in place, got {self.path}, which has "
                            "columns: write its rows to a .safetensors by pyg_direct.pack_rows")  # fmt: skip
        if name is not None and kind != ".safetensors":
            raise ArgumentError(f"name must be None unless the file is a .safetensors, got {name!r} for {self.path}")
        if offset != 0 and kind in (".npy", ".safetensors"):
            raise ArgumentError(f"offset must be 0 for {self.path}, whose head says where its rows begin, got {offset}")
        if kind == ".npy":
            layout = _read_npy(file, self.path)
        elif kind == ".safetensors":
            layout, self._order_layout = _read_safetensors(file, self.path, name, self._stamp[0])
        else:
            if dtype is None or shape is None:
                raise ArgumentError(f"dtype and shape must be given for bare bytes such as {self.path}, got {dtype} "
                                    f"and {shape}")  # fmt: skip
            return self._bare_layout(dtype, tuple(shape), offset)
        if dtype is not None and layout.dtype != dtype:
            raise ArgumentError(f"dtype must be that of {self.path}, {layout.dtype}, got {dtype}")
        if shape is not None and layout.shape != tuple(shape):
            raise ArgumentError(f"shape must be that of {self.path}, {layout.shape}, got {tuple(shape)}")
        if not layout.shape:
            raise FileError(f"{self.path} must hold a table of at least one dimension, it holds a scalar")
        return layout

    def _bare_layout(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Layout:
        if not shape or min(shape[1:], default=0) < 0 or shape[0] < -1 or offset < 0:
            raise ArgumentError(f"shape and offset must not be negative, got {shape} and {offset}")
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if shape[0] == -1:
            if row_bytes == 0 or (self._stamp[0] - offset) % row_bytes:
                raise FileError(f"{self.path} must hold whole rows of {row_bytes} bytes from byte {offset} on, it has "
                                f"{self._stamp[0]} bytes")  # fmt: skip
            shape = ((self._stamp[0] - offset) // row_bytes, *shape[1:])
        return Layout(offset, dtype, shape)

    def _check_length(self, size: int) -> None:
        needed = self.layout.offset + self.layout.num_bytes
        if size < needed:
            raise FileError(f"{self.path} must have {needed} bytes for {list(self.layout.shape)} of "
                            f"{self.layout.dtype}, it has {size}: it was cut short")  # fmt: skip

    def _map(self, file: BinaryIO) -> Tensor:
        offset, dtype, shape = self.layout
        if self.layout.num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # From the page that holds the first row.
        ahead = offset % mmap.ALLOCATIONGRANULARITY
        mapped = _map_privately(file, ahead + self.layout.num_bytes, offset - ahead)
        # Rows lie all over the file: read-ahead of the system would be wasted.
        _advise(mapped, "MADV_RANDOM")
        self._mapped = mapped
        # Writes to such rows stay in this process.
        flat = torch.frombuffer(mapped, dtype=torch.uint8)[ahead:]
        return _as_dtype(flat, dtype).view(shape)

    def stream(self) -> Tensor:
        """Return the rows for one read from the first to the last."""
        self.check()
        _advise(self._mapped, "MADV_SEQUENTIAL")
        return self.rows

    def read_rows(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        """Read row `ids[i]` into `out[positions[i]]` with file reads instead of the map; ids are not checked.

        In ascending order, neighboring rows are read in one call. Any number of threads may call it at a time.

        Args:
            ids, positions: int64 `[n]`.
            out: Bytes, uint8 `[m, row_bytes]`, contiguous.
        """
        done, count = 0, len(ids)
        while True:
            # The loop runs on one thread, whoever calls.
            with threads_for(0):
                done += read_file_rows_cpu(self._handle, self.layout.offset, ids[done:], positions[done:], out)
            if done == count:
                return
            self._read_row(int(ids[done]), memoryview(out[positions[done]]))
            done += 1

    def _read_row(self, row: int, target: memoryview) -> None:
        """Read a row that did not come in one piece."""
        self.read_bytes(self.layout.offset + row * len(target), target)

    def read_bytes(self, begin: int, target: memoryview) -> int:
        """Fill `target` with the bytes from `begin` on; returns their number."""
        count = len(target)
        while target:
            try:
                got = os.preadv(self._handle, [target], begin)
            except OSError as error:
                raise FileError(f"{self.path} could not be read at byte {begin}: {error.strerror}") from error
            if got == 0:
                raise FileError(f"{self.path} was cut short while it was read: it ends before byte {begin}")
            target, begin = target[got:], begin + got
        return count

    def open_handle(self, *, is_direct: bool) -> int:
        """Open another handle of the file, which the caller closes; past the page cache if the system can.

        It reads the pages that it is asked for, without the read-ahead of the system.
        """
        if is_direct and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                # Not by its path, which may name another file by now.
                return os.open(f"/proc/self/fd/{self._handle}", os.O_RDONLY | os.O_DIRECT)
        try:
            handle = os.open(f"/proc/self/fd/{self._handle}", os.O_RDONLY)
        except OSError:
            return os.dup(self._handle)
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        return handle

    def is_cached(self, rows: Sequence[int]) -> bool:
        """Report whether the system says that its page cache holds the first bytes of these rows."""
        if not hasattr(self, "_mapped") or sys.platform != "linux":
            return False
        row_bytes = self.layout.num_bytes // len(self.rows)
        # Linux reports residency to users who may write the file or own it; for others it reports every page as
        # present.
        is_cached = self._is_mapped_page_cached if self._is_told else self._is_byte_cached
        return all(is_cached(row * row_bytes) for row in rows)

    def _is_mapped_page_cached(self, place: int) -> bool:
        found = ctypes.c_ubyte()
        page = (self.rows.data_ptr() + place) // mmap.PAGESIZE * mmap.PAGESIZE
        return _libc().mincore(page, 1, ctypes.byref(found)) == 0 and bool(found.value & 1)

    def _is_byte_cached(self, place: int) -> bool:
        try:
            return os.preadv(self._handle, [bytearray(1)], self.layout.offset + place, os.RWF_NOWAIT) == 1
        except OSError:
            # The read would block, or the file system does not report it.
            return False

    @functools.cached_property
    def _is_told(self) -> bool:
        return os.geteuid() in (0, self.path.stat().st_uid) or os.access(self.path, os.W_OK)

    def forget(self) -> None:
        """Give up the pages that this process holds of the file; they are read again when needed."""
        _advise(self._mapped, "MADV_DONTNEED")

    def check(self) -> None:
        """Refuse to read on in a file that has changed: size, time of change and identity.

        If a file is cut short while mapped pages of it are being read, the process ends, as with any mapped file.
        """
        try:
            stamp = _stamp(os.stat(self.path))
        except OSError as error:
            raise FileError(f"{self.path} was taken away while it was read: {error.strerror}") from error
        if stamp != self._stamp:
            before, now = self._stamp, stamp
            raise FileError(f"{self.path} changed while it was read: {before[0]} bytes of time {before[1]} became "
                            f"{now[0]} bytes of time {now[1]}; open it again")  # fmt: skip


def _map_privately(file: BinaryIO, num_bytes: int, offset: int) -> mmap.mmap:
    """Return bytes of a file, of which writes reach this process alone."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY, offset=offset)
    # The file may be larger than memory, and Linux would otherwise reserve as much for possible writes.
    flags = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0)
    return mmap.mmap(file.fileno(), num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return libc


def _advise(mapped: mmap.mmap, advice: str, *where: int) -> None:
    """Advise the system how a mapping is read, if the system supports advice."""
    if hasattr(mapped, "madvise") and hasattr(mmap, advice):
        mapped.madvise(getattr(mmap, advice), *where)


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ino


def _as_dtype(flat: Tensor, dtype: torch.dtype) -> Tensor:
    # A row that begins off its alignment cannot be viewed as numbers.
    return flat.view(dtype) if flat.data_ptr() % dtype.itemsize == 0 else flat.clone().view(dtype)


def _read_npy(file: BinaryIO, path: Path) -> Layout:
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        shape, is_fortran, dtype = read_header[np.lib.format.read_magic(file)](file)
    except (ValueError, KeyError, EOFError) as error:
        raise FileError(f"{path} must be a .npy file of version 1 or 2: {error}") from error
    if dtype.hasobject:
        raise FileError(f"{path} must hold numbers, it holds Python objects, which are pickles")
    if is_fortran and len(shape) > 1:
        raise FileError(f"{path} must hold its rows one behind the other, it is in Fortran order")
    try:
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError) as error:
        raise FileError(f"{path} must hold a dtype of torch in this machine's byte order, it holds {dtype}") from error
    return Layout(file.tell(), torch_dtype, tuple(shape))


def _read_safetensors(file: BinaryIO, path: Path, name: str | None, size: int) -> tuple[Layout, Layout | None]:
    """Read the layouts of a tensor, and of the order of its rows if the file is packed."""
    head = file.read(_LENGTH.size)
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
    if not 0 <= length <= min(_MOST_HEADER, size - _LENGTH.size):
        raise FileError(f"{path} must begin with the length of its header, got {head!r} in {size} bytes")
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        tensors = {key: value for key, value in header.items() if key != "__metadata__"}
        is_packed = PACKED in header.get("__metadata__", {}) and name is None
        name = "rows" if is_packed else name
        chosen = [value for key, value in tensors.items() if name is None or key == name]
        chosen += [tensors["order"]] if is_packed else []
        facts = [(SAFETENSORS[value["dtype"]], tuple(map(int, value["shape"])), list(map(int, value["data_offsets"])))
                 for value in chosen]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} must have a header of safetensors: {error!r}") from error
    if len(facts) != 1 + is_packed:
        raise ArgumentError(f"name must be one of {', '.join(sorted(tensors)) or 'no tensors'} in {path}, got {name!r}")
    layouts = [_read_entry(fact, _LENGTH.size + length, path) for fact in facts]
    if is_packed and (layouts[1].shape != layouts[0].shape[:1] or layouts[1].dtype != torch.int64
                      or layouts[1].offset + layouts[1].num_bytes > size):  # fmt: skip
        raise FileError(f"{path} must hold the id of each of its {layouts[0].shape[0]} packed rows, it holds "
                        f"{list(layouts[1].shape)} of {layouts[1].dtype} in {size} bytes")  # fmt: skip
    return layouts[0], layouts[1] if is_packed else None


def _read_entry(fact: tuple[torch.dtype, tuple[int, ...], list[int]], offset: int, path: Path) -> Layout:
    """Read the layout of a tensor: its dtype, its shape, and the begin and end of its bytes after `offset`."""
    dtype, shape, (begin, end, *_) = fact if len(fact[2]) > 1 else (*fact[:2], (-1, -1))
    layout = Layout(offset + begin, dtype, shape)
    if begin < 0 or min(shape, default=0) < 0 or end - begin != layout.num_bytes:
        raise FileError(f"{path} must give {layout.num_bytes} bytes to {list(shape)} of {dtype}, it gives bytes "
                        f"{begin} to {end}")  # fmt: skip
    return layout


def as_tensor(value: Any) -> Tensor:
    """Return a tensor or an array, which may be a memory map, as a tensor over the same bytes.

    Arrays with negative strides are copied, because torch has no such strides.
    """
    if isinstance(value, Tensor):
        return value
    if min(value.strides, default=0) < 0:
        value = value.copy()
    with warnings.catch_warnings():
        # A read-only memory map is only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(value)


_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
# Written at a time.
_PIECE_BYTES = 64 << 20
# Rows of the table begin at a page.
_ALIGNMENT = 4096


def save_rows(path: str | os.PathLike[str], rows: Tensor | np.ndarray) -> Path:
    """Write a table to a file that `Feature.from_file` reads; returns its path.

    The file appears whole or not at all: an interrupted call leaves the old file unchanged.

    Args:
        path: `.safetensors`, for any dtype, or `.npy`, for NumPy's dtypes.
        rows: `[N, ...]` of any dtype that the file can have, on any device, also over a memory map; it is written piece
            by piece.

    Raises:
        FileError: there is no room on the disk, or no right to write there.
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> path = save_rows("rows.npy", torch.arange(8.0).view(4, 2))
        >>> Feature(device="cpu").from_file(path)[torch.tensor([3, 0])].tolist()
        [[6.0, 7.0], [0.0, 1.0]]
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path must be the name of a file, got {path!r}")
    target = Path(path)
    if isinstance(rows, np.ndarray):
        rows = as_tensor(rows)
    if not isinstance(rows, Tensor):
        raise ArgumentTypeError(f"rows must be a tensor or an array, got {type(rows).__name__}")
    if rows.layout != torch.strided or rows.is_meta:
        kind = "a tensor without memory" if rows.is_meta else f"a tensor of layout {rows.layout}"
        raise ArgumentTypeError(f"rows must be a dense tensor with values, got {kind}")
    if rows.dim() == 0:
        raise ArgumentError("rows must have at least one dimension, got a scalar")
    step = max(1, _PIECE_BYTES * len(rows) // max(1, rows.numel() * rows.element_size()))
    pieces = rows.detach().split(step) if rows.numel() else ()
    save_pieces(target, rows, (piece.resolve_conj().resolve_neg().cpu().contiguous() for piece in pieces))
    return target


def save_pieces(target: Path, rows: Tensor, pieces: Iterable[Tensor], name: str = "path", *, is_shown: bool = True
                ) -> None:  # fmt: skip
    """Write a table that comes in pieces, whole or not at all; raises as `save_rows`.

    Args:
        rows: Shape and dtype of the table; its memory is not read.
        pieces: Contiguous rows of it on the CPU, in order.
    """
    header = _make_header(target, rows, name)
    num_bytes = len(header) + rows.numel() * rows.element_size()
    try:
        free = shutil.disk_usage(target.parent).free
        if num_bytes > free:
            raise FileError(f"{name} must lie where {num_bytes} bytes are free, {target.parent} has {free}")
        _write(target, header, pieces, num_bytes, is_shown)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise FileError(f"{name}={str(target)!r} could not be written, and what was there before is kept: {why} "
                        f"({num_bytes} bytes needed)") from error  # fmt: skip


def check_format(path: Path, dtype: torch.dtype, name: str) -> None:
    """Check that a file of this name can hold rows of a dtype; `name` is the argument that names the file."""
    _make_header(path, torch.empty(0, dtype=dtype, device="meta"), name)


def _make_header(path: Path, rows: Tensor, name: str) -> bytes:
    if path.suffix.lower() == ".safetensors":
        if rows.dtype not in _NAMES:
            raise ArgumentError(f"rows must have a dtype of safetensors, got {rows.dtype}")
        entry = {"dtype": _NAMES[rows.dtype], "shape": list(rows.shape),
                 "data_offsets": [0, rows.numel() * rows.element_size()]}  # fmt: skip
        text = json.dumps({"rows": entry}).encode()
        text = text.ljust(-(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8)
        return struct.pack("<Q", len(text)) + text
    if path.suffix.lower() != ".npy":
        raise ArgumentError(f"{name} must end in .safetensors or .npy, got {str(path)!r}")
    try:
        dtype = torch.empty(0, dtype=rows.dtype, device="cpu").numpy().dtype
    except TypeError as error:
        raise ArgumentError(f"rows must have a dtype of NumPy for .npy, got {rows.dtype}: take .safetensors") from error
    facts = repr({"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(rows.shape)})
    facts = facts.ljust(-(-(11 + len(facts)) // _ALIGNMENT) * _ALIGNMENT - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(facts)) + facts.encode()


def _write(path: Path, header: bytes, pieces: Iterable[Tensor], num_bytes: int, is_shown: bool) -> None:
    handle, name = open_beside(path)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            # Space for the whole file is allocated before the first write, if the file system supports that.
            with contextlib.suppress(AttributeError):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            _write_all(file, memoryview(header))
            with Bar(num_bytes - len(header), f"writing {path.name}", "B", is_shown=is_shown) as bar:
                for piece in pieces:
                    flat = as_bytes(piece)
                    _write_all(file, flat.numpy().data)
                    bar.update(flat.numel())
            os.fsync(file.fileno())
        os.replace(name, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while len(data) > 0:
        data = data[file.write(data) :]


Part = Tensor | str | os.PathLike[str]


@dataclass
class DeviceConfig:
    """Parts of rows for GPUs and for host memory, after Quiver's class of that name.

    Attributes:
        gpu_parts: By GPU, in a dict or a list: rows, or their ids if they come from an array. A part may also be the
            name of a file of rows (`.npy`, `.safetensors`; never a pickle).
        cpu_part: The same for host memory.

    Example:
        >>> config = DeviceConfig(gpu_parts=[torch.zeros(1, 2)], cpu_part=torch.ones(2, 2))
        >>> Feature(device="cpu").from_mmap(None, config)[torch.tensor([0, 2])].tolist()
        [[0.0, 0.0], [1.0, 1.0]]
    """

    gpu_parts: Mapping[int, Part] | Sequence[Part]
    cpu_part: Part


def join_parts(array: np.ndarray | None, config: DeviceConfig, rank: int) -> tuple[Tensor, int]:
    """Return (rows of this GPU's part and of the host's, how many are the GPU's)."""
    if not isinstance(config, DeviceConfig):
        raise ArgumentTypeError(f"device_config must be a DeviceConfig, got {type(config).__name__}")
    if not isinstance(config.gpu_parts, (Mapping, Sequence)):
        raise ArgumentTypeError(f"device_config.gpu_parts must be a dict or a list, got {config.gpu_parts!r}")
    known = config.gpu_parts if isinstance(config.gpu_parts, Mapping) else dict(enumerate(config.gpu_parts))
    if rank not in known:
        raise ArgumentError(f"device_config.gpu_parts must have a part for GPU {rank}, got {sorted(known)}")
    hot, cold = _read_part(array, known[rank], f"gpu_parts[{rank}]"), _read_part(array, config.cpu_part, "cpu_part")
    parts = [part for part in (hot, cold) if part.numel() > 0] or [hot]
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        raise ArgumentError(f"device_config must have parts with rows of one shape and dtype, got "
                            f"{[(tuple(part.shape), part.dtype) for part in parts]}")  # fmt: skip
    return torch.cat(parts), len(hot)


def _read_part(array: np.ndarray | None, part: Part, name: str) -> Tensor:
    if isinstance(part, (str, os.PathLike)):
        file = RowFile(part)
        return file.rows if file.order is None else file.rows[file.order.argsort()]
    if not isinstance(part, Tensor):
        raise ArgumentTypeError(f"device_config.{name} must be a tensor or the name of a file, got "
                                f"{type(part).__name__}")  # fmt: skip
    if array is None:
        return part.detach().cpu()
    if part.dtype not in INDEX_DTYPES and part.numel() > 0:
        raise ArgumentTypeError(f"device_config.{name} must hold ids where np_array is given, got {part.dtype}")
    return as_tensor(array)[check_ids(f"device_config.{name}", part.cpu().long(), len(array))]


def open_array(array: np.ndarray | None) -> RowFile | Tensor:
    """Return the file behind a memory map, or the array as a tensor if it shows no file in place."""
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(f"np_array must be an array where device_config is None, got {type(array).__name__}")
    if isinstance(array, np.memmap) and array.filename is not None and array.flags.c_contiguous and array.ndim > 0:
        base = array
        # A slice of a map keeps the offset of the whole.
        while isinstance(base.base, np.memmap):
            base = base.base
        offset = base.offset + array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        return RowFile(str(array.filename), dtype=as_tensor(array[:0]).dtype, shape=array.shape, offset=offset,
                       is_bare=True)  # fmt: skip
    return as_tensor(array)


def slice_along(dim: int, device: torch.device, value: Any, ids: Tensor) -> Tensor:
    """Return rows of a tensor or an array, with their gradient if they have one, on the device of batches."""
    tensor = as_tensor(value)
    if dim == 0 and getattr(tensor, "is_unified", False):
        # The GPU reads its rows, with or without a gradient.
        return tensor[ids].to(device)
    return tensor.index_select(dim, ids.to(tensor.device)).to(device)
