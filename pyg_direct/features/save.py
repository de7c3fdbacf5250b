"""Tables written to files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from pyg_direct.disk import open_beside, sync_folder
from pyg_direct.errors import ArgumentError, ArgumentTypeError, FileError
from pyg_direct.features.rowfile import SAFETENSORS, as_tensor
from pyg_direct.progress import Bar
from pyg_direct.runtime.raw import as_bytes

_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
# Written at a time.
_PIECE_BYTES = 64 << 20
# Rows of the table begin at a page.
_ALIGNMENT = 4096


def save_rows(path: str | os.PathLike[str], rows: Tensor | np.ndarray) -> Path:
    """Write a table to a file that `Feature.from_file` reads; returns its path.

    The file appears whole or not at all: an interrupted call leaves what was there before.

    Args:
        path: `.safetensors`, for any dtype, or `.npy`, for those that NumPy has.
        rows: `[N, ...]` of any dtype that the file can have, on any device, also over a memory map; it is written piece
            by piece.

    Raises:
        FileError: there is no room on the disk, or no right to write there.
        ArgumentError, ArgumentTypeError: named argument, rule and value.
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
    header = _make_header(target, rows)
    num_bytes = len(header) + rows.numel() * rows.element_size()
    try:
        free = shutil.disk_usage(target.parent).free
        if num_bytes > free:
            raise FileError(f"path must lie where {num_bytes} bytes are free, {target.parent} has {free}")
        _write(target, header, rows, num_bytes)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise FileError(f"path={str(target)!r} could not be written, and what was there before is kept: {why} "
                        f"({num_bytes} bytes needed)") from error  # fmt: skip
    return target


def _make_header(path: Path, rows: Tensor) -> bytes:
    if path.suffix.lower() == ".safetensors":
        if rows.dtype not in _NAMES:
            raise ArgumentError(f"rows must have a dtype of safetensors, got {rows.dtype}")
        entry = {"dtype": _NAMES[rows.dtype], "shape": list(rows.shape),
                 "data_offsets": [0, rows.numel() * rows.element_size()]}  # fmt: skip
        text = json.dumps({"rows": entry}).encode()
        text = text.ljust(-(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8)
        return struct.pack("<Q", len(text)) + text
    if path.suffix.lower() != ".npy":
        raise ArgumentError(f"path must end in .safetensors or .npy, got {str(path)!r}")
    try:
        dtype = torch.empty(0, dtype=rows.dtype, device="cpu").numpy().dtype
    except TypeError as error:
        raise ArgumentError(f"rows must have a dtype of NumPy for .npy, got {rows.dtype}: take .safetensors") from error
    facts = repr({"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(rows.shape)})
    facts = facts.ljust(-(-(11 + len(facts)) // _ALIGNMENT) * _ALIGNMENT - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(facts)) + facts.encode()


def _write(path: Path, header: bytes, rows: Tensor, num_bytes: int) -> None:
    handle, name = open_beside(path)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            # Room for all of it is taken before anything is written, where the file system can.
            with contextlib.suppress(AttributeError):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            _write_all(file, memoryview(header))
            step = max(1, _PIECE_BYTES * len(rows) // max(1, rows.numel() * rows.element_size()))
            with Bar(num_bytes - len(header), f"writing {path.name}", "B") as bar:
                for piece in rows.detach().split(step) if rows.numel() else ():
                    flat = as_bytes(piece.resolve_conj().resolve_neg().cpu().contiguous())
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
