"""Tables that come in parts, as Quiver's `DeviceConfig` lists them, and arrays that may be maps of files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.rowfile import RowFile, as_tensor
from pyg_direct.ops.check import INDEX_DTYPES, check_ids

Part = Tensor | str | os.PathLike[str]


@dataclass
class DeviceConfig:
    """Which rows go to which GPU and which to host memory, after Quiver's class of that name.

    Attributes:
        gpu_parts: By GPU, in a dict or a list: rows, or their ids where they come from an array, or the name of a file
            of rows (`.npy`, `.safetensors`; never a pickle).
        cpu_part: The same for host memory.
    """

    gpu_parts: Mapping[int, Part] | Sequence[Part]
    cpu_part: Part


def join_parts(array: np.ndarray | None, config: DeviceConfig, rank: int) -> tuple[Tensor, int]:
    """(rows of this GPU's part and of the host's, how many are the GPU's)."""
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
        return RowFile(part).rows
    if not isinstance(part, Tensor):
        raise ArgumentTypeError(f"device_config.{name} must be a tensor or the name of a file, got "
                                f"{type(part).__name__}")  # fmt: skip
    if array is None:
        return part.detach().cpu()
    if part.dtype not in INDEX_DTYPES and part.numel() > 0:
        raise ArgumentTypeError(f"device_config.{name} must hold ids where np_array is given, got {part.dtype}")
    return as_tensor(array)[check_ids(f"device_config.{name}", part.cpu().long(), len(array))]


def open_array(array: np.ndarray | None) -> RowFile | Tensor:
    """The file that a memory map shows, or the array as a tensor where it shows none as it lies."""
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
