"""The threads of CPU loops: OpenMP's where Numba has it, none in forked children, the user's choice first."""

import os
import sys

import pytest

from tests.interpreter import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have an OpenMP that survives forking")

RANK = """
import os
import numpy as np
from pyg_direct.kernels.local_ids.bitmap import rank_words_cpu
from pyg_direct.compiler.jit import get_cpu_threads, set_cpu_threads
def rank():
    ranks = np.empty(1 << 12, np.int32)
    rank_words_cpu(np.full(1 << 12, 7, np.uint32), ranks, np.zeros(get_cpu_threads(), np.int64))
    return int(ranks[-1]) == 3 * ((1 << 12) - 1)
"""
FORK = """
def fork(say):
    child = os.fork()
    if child == 0:
        print(*say(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def run(code, **environment):
    return run_python(code, NUMBA_NUM_THREADS="2", **environment).splitlines()


def test_forked_processes_run_loops_on_one_thread():
    if run("from pyg_direct.compiler import openmp\nprint(openmp.load())") == ["False"]:
        pytest.skip("needs the library of GNU OpenMP")
    said = run(
        RANK
        + FORK
        + """
print(rank(), get_cpu_threads())
fork(lambda: (rank(), get_cpu_threads(), set_cpu_threads(2), get_cpu_threads(), rank()))
print(rank(), get_cpu_threads())
"""
    )

    assert said == ["True 2", "True 1 1 1 True", "True 2"]


@pytest.mark.full
def test_loops_have_threads_beside_those_of_torch():
    # Torch's wait awake for ten milliseconds: processes that share cores would wait for each other at every loop.
    if run("from pyg_direct.compiler import openmp\nprint(openmp.load())") == ["False"]:
        pytest.skip("needs the library of GNU OpenMP")
    said = run(
        RANK
        + """
import time, torch
def count():
    return len(os.listdir("/proc/self/task"))
set_cpu_threads(1)
rank()
torch.set_num_threads(2)
torch.ones(1 << 22).mul_(2)
before = count()
set_cpu_threads(2)
rank()
# One that tells of compiling ends by itself.
deadline = time.monotonic() + 60
while count() - before != 1 and time.monotonic() < deadline:
    time.sleep(0.1)
print(count() - before)
"""
    )

    assert said == ["1"]


def test_processes_forked_before_the_first_loop_have_threads_of_their_own():
    said = run(
        RANK + FORK + "import numba\nfork(lambda: (rank(), get_cpu_threads()))\nprint(rank(), get_cpu_threads())"
    )

    assert said == ["True 2", "True 2"]


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_processes_forked_while_a_thread_of_the_program_runs_loops_run_theirs(layer):
    if layer == "omp" and run("from pyg_direct.compiler import openmp\nprint(openmp.load())") == ["False"]:
        pytest.skip("needs the library of GNU OpenMP")
    said = run(
        RANK
        + """
import signal, threading
from pyg_direct.compiler import jit
rank()
inside, done = threading.Event(), threading.Event()
def stay():
    with jit._LOCK:
        inside.set()
        done.wait()
thread = threading.Thread(target=stay)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    print(rank(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
done.set()
thread.join()
print(rank())
""",
        NUMBA_THREADING_LAYER=layer,
    )

    assert said == ["True", "0", "True"]


def test_the_layer_of_the_user_is_kept_with_its_threads_in_children():
    said = run(
        RANK
        + FORK
        + """
print(rank(), get_cpu_threads())
fork(lambda: (rank(), get_cpu_threads()))
import numba
print(numba.threading_layer())
""",
        NUMBA_THREADING_LAYER="workqueue",
    )

    assert said == ["True 2", "True 2", "workqueue"]


def test_loops_run_where_openmp_is_missing():
    said = run(
        "import sys\nsys.modules['numba.np.ufunc.omppool'] = None\n"
        + RANK
        + """
import numba
print(rank(), get_cpu_threads(), numba.threading_layer() == "omp")
"""
    )

    assert said == ["True 2 False"]


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}])
def test_the_environment_is_left_as_it_was(given):
    names = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
    code = f"from pyg_direct.compiler import openmp\nopenmp.load()\nimport os\nprint(*map(os.environ.get, {names}))"
    said = run(code, **given)

    assert said == [" ".join(str(given.get(name, os.environ.get(name))) for name in names)]


def test_a_forked_process_does_not_wait_for_one_that_died_as_it_started_threads():
    said = run(
        FORK
        + """
import os
import numba
import numba.np.ufunc.parallel as parallel
import pyg_direct.compiler.jit
parallel._set_init_process_lock()
parallel._backend_init_process_lock.acquire()
fork(lambda: [numba.get_num_threads()])
"""
    )

    assert said == ["2"]
