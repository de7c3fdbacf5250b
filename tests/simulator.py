"""Changes of Numba's simulator for tests: the threads of a block take turns, arrays are read without wrappers.

Numba's own block starts a thread of the system for each of its threads, and polls whether all have come to a barrier. A
launch with six barriers then takes 30 times the processor time. Here a thread of a block is a coroutine: it runs until
it ends or comes to a barrier, then the next one runs. Threads see the same behavior: a barrier opens when every living
thread of the block is at it, and an exception of one ends all.

Numba wraps arrays twice, for fields of structures, which no kernel here has: half of the time of a kernel that reads
element by element.
"""

import functools
import sys
import threading
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet
from numba.cuda.simulator import kernel, kernelapi

from pyg_direct.compiler import jit


class Shared:
    """Arrays that the threads of a block share."""

    def __init__(self) -> None:
        self._allocations: dict[Any, np.ndarray] = {}

    def array(self, shape: Any, dtype: Any) -> np.ndarray:
        """Return the array of a line of a kernel, one for all threads of the block."""
        frame = sys._getframe(1)
        place = frame.f_code, frame.f_lineno
        if place not in self._allocations:
            self._allocations[place] = np.empty(shape, dtype)
        return self._allocations[place]


class Module(kernelapi.FakeCUDAModule):
    """`cuda` as all kernels see it; `Block` sets its indices before each turn of a thread."""

    # Properties there, which ask the running thread.
    threadIdx: Any = None  # noqa: N815
    blockIdx: Any = None  # noqa: N815
    shared: Any = None
    _atomic = kernelapi.FakeCUDAAtomic()

    def __init__(self) -> None:
        # Without the types of vectors, hundreds of them, which no kernel here has.
        pass

    def begin(self, grid_dim: tuple[int, ...], block_dim: tuple[int, ...], dynshared_size: int) -> Any:
        """Return this, as the module of a launch."""
        self.gridDim, self.blockDim = kernelapi.Dim3(*grid_dim), kernelapi.Dim3(*block_dim)
        return self

    def syncthreads(self) -> None:
        """Wait for the other threads of the block."""
        getcurrent().parent.switch()


MODULE = Module()


class Block:
    """The threads of a block, of which one runs at a time."""

    def __init__(self, fn: Any, grid_dim: tuple[int, ...], block_dim: tuple[int, ...], debug: bool) -> None:
        self._fn, self._indices = fn, [kernelapi.Dim3(*point) for point in np.ndindex(*block_dim)]

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        """Run all threads from barrier to barrier, until they have ended."""
        MODULE.blockIdx, MODULE.shared = kernelapi.Dim3(*grid_point), Shared()
        living = [(index, greenlet(self._fn)) for index in self._indices]
        given = args
        while living:
            for MODULE.threadIdx, thread in living:
                try:
                    thread.switch(*given)
                except Exception as error:
                    for _, other in living:
                        if not other.dead:
                            other.throw()
                    place = f"tid={[*MODULE.threadIdx]} ctaid={[*grid_point]}"
                    raise type(error)(f"{place}: {error}").with_traceback(error.__traceback__) from error
            living, given = [(index, thread) for index, thread in living if not thread.dead], ()


def install() -> None:
    """Run simulated kernels in such blocks, on plain arrays."""
    kernel.BlockManager = Block
    kernel.FakeCUDAModule = MODULE.begin
    kernel.FakeWithinKernelCUDAArray = lambda array: array._ary
    # Kernels of several threads of a test follow each other, as they share the module above.
    lock, simulate = threading.RLock(), jit.GpuKernel.simulate

    def simulate_alone(self: jit.GpuKernel, *args: Any) -> None:
        with lock:
            simulate(self, *args)

    jit.GpuKernel.simulate = simulate_alone
    # What kernels name is looked up once, not at each launch and each use.
    jit._SimulatedCuda = lambda: MODULE
    bind = functools.cache(lambda on_gpu, num_functions, bind=jit._bind: bind(on_gpu))
    jit._bind = lambda on_gpu: bind(on_gpu, len(jit._FUNCTIONS))
