"""Threads of simulated blocks wait for each other as on a GPU."""

import numpy as np
import pytest

from pyg_direct.compiler.jit import SIMULATED

if SIMULATED:
    # The simulator replaces the function that kernels call by this name.
    from numba import cuda

pytestmark = pytest.mark.sim


def launch(kernel, blocks, *arrays):
    cuda.jit(kernel)[blocks, 8](*arrays)


def test_no_thread_passes_a_barrier_before_all_are_there():
    def shift_eight_times(values):
        i, first = cuda.threadIdx.x, cuda.blockIdx.x * 8
        for _ in range(8):
            read = values[first + (i + 1) % 8]
            cuda.syncthreads()
            values[first + i] = read
            cuda.syncthreads()
            read = values[first + (i + 3) % 8]
            cuda.syncthreads()
            values[first + i] = read
            cuda.syncthreads()

    values = np.arange(24)
    launch(shift_eight_times, 3, values)

    # 32 places to the left, of 8.
    assert values.tolist() == list(range(24))

    def shift_once(values):
        read = values[(cuda.threadIdx.x + 1) % 8]
        cuda.syncthreads()
        values[cuda.threadIdx.x] = read

    launch(shift_once, 1, values)
    assert values[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]


def test_threads_that_ended_are_not_waited_for():
    def count_those_there(arrived, counts):
        i = cuda.threadIdx.x
        for barrier in range(i):
            cuda.atomic.add(arrived, barrier, 1)
            cuda.syncthreads()
            counts[i] = arrived[barrier]

    arrived, counts = np.zeros(8, dtype=np.int64), np.zeros(8, dtype=np.int64)
    launch(count_those_there, 1, arrived, counts)

    # At the last barrier of thread i are the threads i and above; the threads above i go on.
    assert counts.tolist() == [0, 7, 6, 5, 4, 3, 2, 1]


def test_an_exception_of_one_thread_ends_all():
    def fail(values):
        if cuda.threadIdx.x == 5:
            raise ValueError("thread 5 fails")
        cuda.syncthreads()
        values[cuda.threadIdx.x] = 1

    values = np.zeros(8, dtype=np.int64)
    with pytest.raises(ValueError, match="thread 5 fails"):
        launch(fail, 1, values)
    assert not values.any()
