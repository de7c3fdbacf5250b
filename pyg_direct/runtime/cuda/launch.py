"""Launch of compiled kernels on torch's current stream, straight through the driver.

numba-cuda passes a 1-D array as (meminfo, parent, items, item size, data, shape, stride in bytes). Its successor
numba-cuda-mlir passes it as (allocation, data, offset, shape, stride in items). Both pass a scalar as itself. The
parameter block of a kernel is packed into one buffer, which the driver copies during the call.

`current_stream` and `set_stream` read and set torch's stream without the work of `torch.cuda.stream`. A loader
changes streams several times a batch. At 5 to 10 us each that would be a quarter of its time on the host.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Protocol

import torch

from pyg_direct.errors import CudaError
from pyg_direct.runtime.cuda.device import abilities, bind_thread, call, load_driver

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
        """Report whether it is a 1-D array."""


class Code(Protocol):
    """A compiled kernel."""

    @property
    def entry(self) -> str:
        """Name of the kernel in its PTX."""

    @property
    def ptx(self) -> str:
        """Its PTX."""


# Percent of a multiprocessor's shared memory that kernels without shared memory still leave to others. By default such
# a kernel turns nearly all of it into cache. A read over the link runs for milliseconds, and then no block that needs
# shared memory can start beside it. The matrix products of a model then run in one more wave. On an H200 a training
# step with its loader takes 1.09 instead of 1.13 of its time alone.
_SHARED_LEFT = 65


def load_function(code: Code, index: int, shared_bytes: int = 0) -> Any:
    """Load a function handle for a compiled kernel in torch's context on GPU `index`.

    Args:
        shared_bytes: Memory of a multiprocessor that stays shared while the kernel runs, see `gpu_kernel`. 0 leaves
            this to the driver if the kernel has shared memory, and leaves it to other kernels if it has none.
    """
    attribute = load_driver().CUfunction_attribute
    with torch.cuda.device(index):
        bind_thread(index)
        module = call("cuModuleLoadData", code.ptx.encode() + b"\0")
        function = call("cuModuleGetFunction", module, code.entry.encode())
        percent = None
        if shared_bytes > 0:
            percent = min(100, -(-100 * shared_bytes // abilities(index).shared_bytes))
        elif int(call("cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)) == 0:
            percent = _SHARED_LEFT
        if percent is not None:
            call("cuFuncSetAttribute", function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent)
        return function


# Stands for an argument that each launch gives, while others are settled.
OPEN: Any = object()


def _layout(parameters: Iterable[Parameter]) -> struct.Struct:
    """Return the format: address and length of an array, the value of a scalar."""
    return struct.Struct("<" + "".join("qq" if p.is_array else _PACK[p.code] for p in parameters))


class _ParameterBlock:
    """Parameters of a kernel in memory that the driver reads; each stream of each thread has its own.

    Args:
        is_short: True if an array is passed in 5 values, False for 7.
        args: Arguments that are written once, and `OPEN` for arguments that `write` takes at each launch.
    """

    def __init__(self, parameters: Sequence[Parameter], is_short: bool, args: Sequence[Any]) -> None:
        # Arguments that differ between calls lie together, so that they are written at once.
        order = sorted(range(len(args)), key=lambda i: args[i] is not OPEN)
        changing = _layout(parameters[i] for i in order if args[i] is OPEN)
        settled = [i for i in order if args[i] is not OPEN]
        layout = _layout(parameters[i] for i in settled)
        self._buffer = ctypes.create_string_buffer(max(changing.size + layout.size, 8))
        values = ((args[i].data_ptr(), args[i].numel()) if parameters[i].is_array else (args[i],) for i in settled)
        layout.pack_into(self._buffer, changing.size, *itertools.chain.from_iterable(values))
        self._fixed = (ctypes.c_int64 * (2 + len(parameters)))(0, 1, *(_ITEM_BYTES[p.code] for p in parameters))
        sizes = [16 if parameters[i].is_array else 8 for i in order]
        places = dict(zip(order, itertools.accumulate(sizes, initial=ctypes.addressof(self._buffer)), strict=False))
        null, pointers = ctypes.addressof(self._fixed), []
        for number, parameter in enumerate(parameters):
            at = places[number]
            if parameter.is_array:
                item_bytes = null + 8 * (number + 2)
                pointers += ([at, at, null, at + 8, null + 8] if is_short else
                             [null, null, at + 8, item_bytes, at, at + 8, item_bytes])  # fmt: skip
            else:
                pointers.append(at)
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.address = ctypes.addressof(self._pointers)
        self.write = functools.partial(changing.pack_into, self._buffer, 0)


# Source of a launch, for one kernel. Its names are bound beforehand and its arguments written out. Look-ups in an
# object and a loop would cost as much as all the rest.
_LAUNCH = """
def make(bound, bind):
    def launch(grid, block, args, stream=None):
        if stream is None:
            stream = current_stream(index)
        handle, write, address = bound.get((stream, get_ident())) or bind(stream)
        write({values})
        code = enqueue(function, grid, 1, 1, block, 1, 1, 0, handle, address, 0)[0]
        if code:
            repeat(grid, block, handle, address, code)
    launch.bound = bound
    return launch
"""

# (stream, thread) -> the stream's handle, the writer of parameters, and the address that the driver reads.
_Bound = dict[tuple[int, int], tuple[Any, Callable[..., None], int]]


class Launcher:
    """Launches one specialisation of a kernel on one GPU; a call takes about 1 us more than the driver's own.

    Attributes:
        launch: (grid, block, arguments, stream) -> None: enqueues on `stream`, or on torch's current stream without it.
            Arrays must be contiguous and on this GPU. Its `bound` holds the parameter blocks by stream and thread.
    """

    launch: Callable[..., None]

    def __init__(self, code: Code, parameters: Sequence[Parameter], index: int, shared_bytes: int = 0) -> None:
        self.index = index
        self._parameters = tuple(parameters)
        self.function = load_function(code, index, shared_bytes)
        num_passed = code.ptx.split(".entry", 1)[1].split(")", 1)[0].count(".param")
        # The number of values shows which compiler made the code.
        self._is_short = num_passed == sum(5 if p.is_array else 1 for p in parameters)
        self._makers: dict[tuple[int, ...], Callable[..., Callable[..., None]]] = {}
        self.launch = self.settle([OPEN] * len(parameters))

    def settle(self, args: Sequence[Any]) -> Callable[..., None]:
        """Return `launch` with some arguments written once, as long as they stay the same; it takes the others.

        Args:
            args: All arguments of the kernel, with `OPEN` for those that each launch gives. Arrays are kept alive.
        """
        changing = tuple(i for i, arg in enumerate(args) if arg is OPEN)
        make = self._makers.get(changing)
        if make is None:
            make = self._makers[changing] = self._write_out(changing)
        bound: _Bound = {}
        kept: list[_ParameterBlock] = []

        def bind(stream: int) -> tuple[Any, Callable[..., None], int]:
            bind_thread(self.index)
            block = _ParameterBlock(self._parameters, self._is_short, args)
            handle = load_driver().CUstream(stream)
            bound[stream, get_ident()] = found = handle, block.write, block.address
            kept.append(block)
            return found

        return make(bound, bind)

    def _write_out(self, changing: Sequence[int]) -> Callable[..., Callable[..., None]]:
        """Return a maker of launches that take these arguments."""
        values = (f"args[{n}].data_ptr(), args[{n}].numel()" if self._parameters[i].is_array else f"args[{n}]"
                  for n, i in enumerate(changing))  # fmt: skip
        names: dict[str, Any] = {"enqueue": load_driver().cuLaunchKernel, "get_ident": get_ident, "index": self.index,
                                 "current_stream": torch._C._cuda_getCurrentRawStream, "function": self.function,
                                 "repeat": self._repeat}  # fmt: skip
        exec(_LAUNCH.format(values=", ".join(values)), names)
        make: Callable[..., Callable[..., None]] = names["make"]
        return make

    def _repeat(self, grid: int, block: int, handle: Any, address: int, code: Any) -> None:
        """Handle an error of a launch: thread ids are reused, and a new thread has no context."""
        if bind_thread(self.index):
            code = load_driver().cuLaunchKernel(self.function, grid, 1, 1, block, 1, 1, 0, handle, address, 0)[0]
        if code:
            raise CudaError("cuLaunchKernel", int(code), code.name, f"grid {grid}, block {block}")


def current_stream(index: int) -> torch.cuda.Stream:
    """Return the current stream of GPU `index`."""
    return _stream_of(*torch._C._cuda_getCurrentStream(index))


@functools.cache
def _stream_of(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def set_stream(stream: torch.cuda.Stream) -> None:
    """Make a stream the current one of its GPU, and its GPU the current one."""
    torch._C._cuda_setStream(stream_id=stream.stream_id, device_index=stream.device_index,
                             device_type=stream.device_type)  # fmt: skip


def on_raw_stream(stream: int, device: torch.device) -> AbstractContextManager[Any]:
    """Make a raw stream of a GPU torch's current one in a block; 0 stays the default stream."""
    if stream == 0:
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))


def is_current(stream: torch.cuda.Stream) -> bool:
    """Report whether a stream is the current one of its GPU, and its GPU the current one."""
    index = stream.device_index
    return bool(torch._C._cuda_getCurrentRawStream(index) == stream.cuda_stream and torch._C._cuda_getDevice() == index)


@functools.cache
def side_streams(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return two streams of GPU `index` for work ahead of the program, the same two in the whole process.

    Torch's allocator keeps the memory of each stream apart: new streams would request every block from the driver
    again. Their thread blocks are scheduled first.
    """
    return torch.cuda.Stream(index, priority=-1), torch.cuda.Stream(index, priority=-1)


class kept_stream:  # noqa: N801
    """`with kept_stream(index):` restores the current stream and GPU after the block, whatever it sets."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._device = torch._C._cuda_getDevice()
        self._stream = current_stream(self._index)

    def __exit__(self, *error: object) -> None:
        set_stream(self._stream)
        if self._device != self._index:
            torch.cuda.set_device(self._device)
