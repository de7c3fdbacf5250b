"""What tests change of Numba's simulator: threads of a block wait for each other asleep, arrays are read without
wrappers, and speeds are not measured.

Numba's own block asks all its threads again and again whether they have come to a barrier, and takes the interpreter
from them meanwhile: a launch with six barriers then takes 30 times the processor time. What threads see is the same: a
barrier opens when every thread of the block that has not ended is at it, and an exception of one ends all.

Numba wraps arrays twice, for fields of structures, which no kernel here has: half of the time of a kernel that reads
element by element.
"""

import threading
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel

from pyg_direct.dynamic import snapshot_plan
from pyg_direct.dynamic.group_tuner import Speeds

# As a GPU's; those of the simulator would take a minute to measure and tell nothing.
SPEEDS = Speeds(((4e-11, 4e-11, 4e-11, 16e-11, 64e-11, 256e-11),) * 3, 0.0, 1e-6, 1e-6, 5e10)


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


def install() -> None:
    """Make simulated kernels run in such blocks, on plain arrays, and snapshots be put together by these speeds."""
    kernel.BlockManager = Block
    kernel.FakeWithinKernelCUDAArray = lambda array: array._ary
    snapshot_plan.find_speeds = lambda device: SPEEDS
