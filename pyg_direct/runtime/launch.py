"""Launch of compiled kernels on torch's current stream, straight through the driver.

numba-cuda passes a 1-D array as (meminfo, parent, items, item size, data, shape, stride in bytes), its successor
numba-cuda-mlir as (allocation, data, offset, shape, stride in items), and both pass a scalar as itself; the parameter
block of a kernel is packed into one buffer that the driver copies during the call.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Protocol

import torch

from pyg_direct.errors import CudaError
from pyg_direct.runtime.device import bind_thread
from pyg_direct.runtime.driver import call, load_driver

_ITEM_BYTES = {"i1": 1, "u1": 1, "i2": 2, "u2": 2, "i4": 4, "u4": 4, "f4": 4, "i8": 8, "u8": 8, "f8": 8}
_PACK = {"i1": "b7x", "u1": "B7x", "i2": "h6x", "u2": "H6x", "i4": "i4x", "u4": "I4x", "f4": "f4x",
         "i8": "q", "u8": "Q", "f8": "d"}  # fmt: skip


class Parameter(Protocol):
    """One parameter of a kernel, by dtype code."""

    @property
    def code(self) -> str:
        """Dtype code, such as `i8`."""

    @property
    def is_array(self) -> bool:
        """Whether it is a 1-D array."""


class Code(Protocol):
    """A compiled kernel."""

    @property
    def entry(self) -> str:
        """Name of the kernel in its PTX."""

    @property
    def ptx(self) -> str:
        """Its PTX."""


# Percent of a multiprocessor's shared memory that kernels without any of their own still leave to others. By default
# such a kernel turns nearly all of it into cache; where one runs for milliseconds, as reads over the link do, no block
# that needs shared memory can then start beside it, and the matrix products of a model run in one more wave (on an
# H200 a training step with its loader takes 1.09 instead of 1.13 of its time alone).
_SHARED_LEFT = 65


def load_function(code: Code, index: int) -> Any:
    """A function handle for a compiled kernel in torch's context on GPU `index`."""
    attribute = load_driver().CUfunction_attribute
    with torch.cuda.device(index):
        bind_thread(index)
        module = call("cuModuleLoadData", code.ptx.encode() + b"\0")
        function = call("cuModuleGetFunction", module, code.entry.encode())
        if int(call("cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)) == 0:
            call("cuFuncSetAttribute", function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                 _SHARED_LEFT)  # fmt: skip
        return function


class _ParameterBlock:
    """The parameters of a kernel where the driver reads them; each stream of each thread has its own."""

    def __init__(self, parameters: Sequence[Parameter], is_short: bool) -> None:
        # What differs between calls lies in one buffer: address and length of an array, the value of a scalar.
        layout = struct.Struct("<" + "".join("qq" if p.is_array else _PACK[p.code] for p in parameters))
        self._buffer = ctypes.create_string_buffer(max(layout.size, 8))
        self._fixed = (ctypes.c_int64 * (2 + len(parameters)))(0, 1, *(_ITEM_BYTES[p.code] for p in parameters))
        at, null = ctypes.addressof(self._buffer), ctypes.addressof(self._fixed)
        pointers = []
        for number, parameter in enumerate(parameters, 2):
            if parameter.is_array:
                item_bytes = null + 8 * number
                pointers += ([at, at, null, at + 8, null + 8] if is_short else
                             [null, null, at + 8, item_bytes, at, at + 8, item_bytes])  # fmt: skip
            else:
                pointers.append(at)
            at += 16 if parameter.is_array else 8
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.address = ctypes.addressof(self._pointers)
        self.write = functools.partial(layout.pack_into, self._buffer, 0)


# All that a launch does, for one kernel: its names are bound beforehand and its arguments written out, as looking them
# up in an object and in a loop would cost as much as all the rest.
_LAUNCH = """
def launch(grid, block, args, stream=None):
    if stream is None:
        stream = current_stream(index)
    handle, write, address = bound.get((stream, get_ident())) or bind(stream)
    write({values})
    code = enqueue(function, grid, 1, 1, block, 1, 1, 0, handle, address, 0)[0]
    if code:
        repeat(grid, block, handle, address, code)
"""


class Launcher:
    """Launches one specialisation of a kernel on one GPU; less than 5 us a call from Python.

    Attributes:
        launch: (grid, block, arguments, stream) -> None: enqueues on `stream`, or on torch's current stream without it;
            arrays must be contiguous and on this GPU.
    """

    launch: Callable[..., None]

    def __init__(self, code: Code, parameters: Sequence[Parameter], index: int) -> None:
        self.index = index
        self._parameters = tuple(parameters)
        self._function = load_function(code, index)
        num_passed = code.ptx.split(".entry", 1)[1].split(")", 1)[0].count(".param")
        # The compiler of the code shows in the number of values it takes.
        self._is_short = num_passed == sum(5 if p.is_array else 1 for p in parameters)
        self._kept: list[_ParameterBlock] = []
        # (stream, thread) -> the stream's handle, how to write parameters, and where the driver reads them.
        self._bound: dict[tuple[int, int], tuple[Any, Callable[..., None], int]] = {}
        values = (f"args[{i}].data_ptr(), args[{i}].numel()" if p.is_array else f"args[{i}]"
                  for i, p in enumerate(parameters))  # fmt: skip
        names: dict[str, Any] = {"bind": self._bind, "bound": self._bound, "enqueue": load_driver().cuLaunchKernel,
                                 "current_stream": torch._C._cuda_getCurrentRawStream, "function": self._function,
                                 "get_ident": get_ident, "index": index, "repeat": self._repeat}  # fmt: skip
        exec(_LAUNCH.format(values=", ".join(values)), names)
        self.launch = names["launch"]

    def _repeat(self, grid: int, block: int, handle: Any, address: int, code: Any) -> None:
        """What to do about an error: numbers of threads are given again, and a new one has no context."""
        if bind_thread(self.index):
            code = load_driver().cuLaunchKernel(self._function, grid, 1, 1, block, 1, 1, 0, handle, address, 0)[0]
        if code:
            raise CudaError("cuLaunchKernel", int(code), code.name, f"grid {grid}, block {block}")

    def _bind(self, stream: int) -> tuple[Any, Callable[..., None], int]:
        bind_thread(self.index)
        block = _ParameterBlock(self._parameters, self._is_short)
        handle = load_driver().CUstream(stream)
        self._bound[stream, get_ident()] = bound = handle, block.write, block.address
        self._kept.append(block)
        return bound
