"""Launch of compiled kernels on torch's current stream, straight through the driver.

Numba passes a 1-D array as (meminfo, parent, items, item size, data, shape, stride) and a scalar as itself; the
parameter block of a kernel is packed into one buffer that the driver copies during the call.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pyg_direct.errors import CudaError
from pyg_direct.runtime.device import abilities
from pyg_direct.runtime.driver import call, load_driver

_ITEM_BYTES = {"i1": 1, "u1": 1, "i2": 2, "u2": 2, "i4": 4, "u4": 4, "f4": 4, "i8": 8, "u8": 8, "f8": 8}
_PACK = {"i1": "b7x", "u1": "B7x", "i2": "h6x", "u2": "H6x", "i4": "i4x", "u4": "I4x", "f4": "f4x",
         "i8": "q", "u8": "Q", "f8": "d"}  # fmt: skip


class Parameter(Protocol):
    """One parameter of a kernel, by dtype code."""

    code: str
    is_array: bool


class Code(Protocol):
    """A compiled kernel: the entry's name, its PTX, and the PTX it is linked with."""

    entry: str
    ptx: str
    linked: tuple[str, ...]


def current_stream(index: int) -> int:
    """Raw handle of torch's current stream on GPU `index`."""
    return torch._C._cuda_getCurrentRawStream(index)


def fit_ptx_version(ptx: str, driver_version: int) -> str:
    """The PTX with a version its driver accepts.

    The compiler stamps the newest version it knows, whatever the code uses; ours uses nothing newer than 8.0 on
    these architectures.
    """
    major, minor = driver_version // 1000, driver_version % 1000 // 10
    newest = (major - 4, minor) if major >= 13 else (8, minor if major == 12 else 0)
    found = re.search(r"^\.version (\d+)\.(\d+)", ptx, re.MULTILINE)
    assert found is not None, "PTX without a version"
    if (int(found[1]), int(found[2])) <= newest:
        return ptx
    return ptx.replace(found[0], ".version {}.{}".format(*newest), 1)


def load_function(code: Code, index: int) -> Any:
    """A function handle for a compiled kernel in torch's context on GPU `index`."""
    driver = load_driver()
    version = abilities(index).driver_version
    with torch.cuda.device(index):
        torch.cuda.current_stream(index)
        images = [fit_ptx_version(text, version).encode() + b"\0" for text in (code.ptx, *code.linked)]
        if len(images) == 1:
            module = call("cuModuleLoadData", images[0])
        else:
            state = call("cuLinkCreate", 0, [], [])
            for number, image in enumerate(images):
                call("cuLinkAddData", state, driver.CUjitInputType.CU_JIT_INPUT_PTX, image, len(image),
                     f"{number}.ptx".encode(), 0, [], [])  # fmt: skip
            cubin, size = call("cuLinkComplete", state)
            module = call("cuModuleLoadData", ctypes.string_at(int(cubin), size))
            call("cuLinkDestroy", state)
        return call("cuModuleGetFunction", module, code.entry.encode())


@functools.cache
def _launch_entry() -> Any:
    """`cuLaunchKernel` through ctypes, which spends about half as long on its arguments as the bindings do."""
    name, version, flags = b"cuLaunchKernel", 12000, 0
    address = call("cuGetProcAddress", name, version, flags)[0]
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    # A call that keeps the interpreter's lock, so that no other thread can refill the parameter buffer meanwhile.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, pointer, *[unsigned] * 7, pointer, pointer, pointer)
    return prototype(int(address))


class Launcher:
    """Launches one specialisation of a kernel on one GPU."""

    def __init__(self, code: Code, parameters: Sequence[Parameter], index: int) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        self._function = int(load_function(code, index))
        self._launch = _launch_entry()
        layout = struct.Struct("<" + "".join("16xqqqqq" if p.is_array else _PACK[p.code] for p in self.parameters))
        slots = layout.size // 8
        self._buffer = ctypes.create_string_buffer(8 * slots)
        self._pack_into = layout.pack_into
        self._sizes = [_ITEM_BYTES[p.code] if p.is_array else 0 for p in self.parameters]
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * slots)(*(base + 8 * s for s in range(slots)))
        self._kernel_params = ctypes.addressof(self._pointers)

    def __call__(self, grid: int, block: int, args: Sequence[Any], stream: int | None = None) -> None:
        """Enqueue on `stream`, or on torch's current stream; arrays must be contiguous and on this GPU."""
        values: list[Any] = []
        for size, arg in zip(self._sizes, args):
            if size:
                items = arg.numel()
                values += (items, size, arg.data_ptr(), items, size)
            else:
                values.append(arg)
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(self.index)
        self._pack_into(self._buffer, 0, *values)
        code = self._launch(self._function, grid, 1, 1, block, 1, 1, 0, stream, self._kernel_params, None)
        if code:
            error = load_driver().CUresult(code)
            raise CudaError("cuLaunchKernel", code, error.name, f"grid {grid}, block {block}")
