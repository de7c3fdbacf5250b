"""Changes of Numba's simulator for tests: threads of a block wait asleep, and arrays are read without wrappers.

Numba's own block polls whether all its threads have come to a barrier, and takes the interpreter from them meanwhile. A
launch with six barriers then takes 30 times the processor time. Threads see the same behavior: a barrier opens when
every living thread of the block is at it, and an exception of one ends all.

Numba wraps arrays twice, for fields of structures, which no kernel here has: half of the time of a kernel that reads
element by element.

Two threads of Numba's block that ask for a shared array at the same moment are given an array each.
"""

import sys
import threading
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel, kernelapi


class Thread(kernel.BlockThread):
    """A thread of a block."""

    def run(self) -> None:
        super().run()
        self._manager.leave(self)

    def syncthreads(self) -> None:
        self._manager.wait()


class Block(kernel.BlockManager):
    """The threads of a block, and the barrier that they meet at."""

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        self.condition = threading.Condition()
        self.barriers = self.waiting = 0
        self.failure: Any = None
        points = list(np.ndindex(*self._block_dim))
        self.alive = len(points)
        threads = [Thread(lambda: self._f(*args), self, grid_point, point, self._debug) for point in points]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure[0].with_traceback(self.failure[1])

    def wait(self) -> None:
        """Return when all other threads that have not ended wait too."""
        with self.condition:
            barrier = self.barriers
            self.waiting += 1
            self._open_if_all_wait()
            self.condition.wait_for(lambda: self.failure or self.barriers > barrier)
            if self.failure:
                raise RuntimeError("another thread of the block failed")

    def leave(self, thread: Thread) -> None:
        """Note that `thread` has ended, and how."""
        with self.condition:
            self.alive -= 1
            self.failure = self.failure or thread.exception
            self._open_if_all_wait()
            self.condition.notify_all()

    def _open_if_all_wait(self) -> None:
        if self.waiting == self.alive:
            self.barriers += 1
            self.waiting = 0
            self.condition.notify_all()


_SHARING = threading.Lock()


def make_shared(shared: Any, shape: Any, dtype: Any) -> Any:
    """Return the shared array of a line of a kernel, one for all threads of the block."""
    frame = sys._getframe(1)
    place = frame.f_code, frame.f_lineno
    with _SHARING:
        if place not in shared._allocations:
            shared._allocations[place] = np.empty(shape, dtype)
        return shared._allocations[place]


def install() -> None:
    """Run simulated kernels in such blocks, on plain arrays."""
    kernel.BlockManager = Block
    kernel.FakeWithinKernelCUDAArray = lambda array: array._ary
    kernelapi.FakeCUDAShared.array = make_shared
