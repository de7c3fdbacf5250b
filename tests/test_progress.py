"""Steps that take long say so, and others say nothing."""

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
import threading
import time

import numba
import numpy as np
import pytest

from pyg_direct import progress
from pyg_direct.progress import Bar, show_wait
from tests.interpreter import BARE_PACKAGE, run_python


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "_BEGUN", {})
    monkeypatch.setattr(progress, "_TOLD", {})


@pytest.fixture
def clock(impatient, monkeypatch):
    """Seconds that pass as a test says, however busy the machine is."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(impatient, monkeypatch):
    monkeypatch.setattr(progress, "_is_terminal", lambda: True)


def wait_for_words(capfd, words, count=1):
    """What is said until the words were said so often; a thread says it, which a busy machine may keep waiting."""
    said, until = "", time.perf_counter() + 60
    while said.count(words) < count and time.perf_counter() < until:
        time.sleep(0.01)
        said += capfd.readouterr().err
    return said


def test_a_long_step_has_a_bar(terminal, capfd):
    with Bar(4, "drawing edges", "edges") as bar:
        for _ in range(4):
            time.sleep(0.03)
            bar.update(1)

    err = capfd.readouterr().err
    assert "drawing edges: 100%" in err
    assert "4.00/4.00" in err


def test_a_short_step_has_none(capfd):
    with Bar(4, "drawing edges") as bar:
        bar.update(4)
    with show_wait("sorting"):
        pass

    assert capfd.readouterr().err == ""


def test_a_bar_goes_on_where_work_was_left(terminal, capfd):
    with Bar(4, "drawing edges", done=2) as bar:
        for _ in range(2):
            time.sleep(0.06)
            bar.update(1)

    err = capfd.readouterr().err
    assert " 50%" in err
    assert "4.00/4.00" in err


def test_a_bar_that_nobody_wants_says_nothing(terminal, capfd):
    with Bar(1, "drawing edges", is_shown=False) as bar:
        time.sleep(0.06)
        bar.update(1)

    assert capfd.readouterr().err == ""


def test_a_step_of_unknown_length_is_told(terminal, capfd):
    with show_wait("sorting edges", ": many"):
        said = wait_for_words(capfd, "sorting edges")

    assert "sorting edges: many: 00:" in said


def test_a_file_gets_whole_lines_of_a_bar(impatient, monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(progress.time, "time", lambda: now[0])

    with Bar(100, "drawing edges") as bar:
        for _ in range(100):
            now[0] += 1.5
            bar.update(1)

    assert capfd.readouterr().err.splitlines() == [
        "pyg_direct: drawing edges: 1% after 2 s",
        "pyg_direct: drawing edges: 41% after 62 s",
        "pyg_direct: drawing edges: 81% after 122 s",
        "pyg_direct: drawing edges: 100% after 150 s",
    ]


def test_a_file_gets_one_line_of_many_short_steps(impatient, capfd):
    with show_wait("compiling", ": kernel 0"):
        said = wait_for_words(capfd, "compiling")
    for number in range(1, 4):
        with show_wait("compiling", f": kernel {number}"):
            time.sleep(0.1)

    line = "pyg_direct: compiling: kernel 0: "
    assert re.fullmatch(rf"{line}\d+ s so far\n{line}done after \d+ s\n", said + capfd.readouterr().err)


def test_a_file_is_told_that_a_step_failed(impatient, capfd):
    def fail():
        with show_wait("sorting"):
            said.append(wait_for_words(capfd, "sorting"))
            raise RuntimeError("sorted wrongly")

    said = []
    with pytest.raises(RuntimeError, match="sorted wrongly"):
        fail()

    assert re.search(r"^pyg_direct: sorting: failed after \d+ s$", capfd.readouterr().err, re.MULTILINE)


def test_a_file_gets_a_line_a_minute_of_a_long_step(impatient, monkeypatch, capfd):
    monkeypatch.setattr(progress, "_MINUTE", 0.1)

    begin = time.monotonic()
    with show_wait("sorting"):
        said = wait_for_words(capfd, "pyg_direct: sorting: ", count=3)
    said += capfd.readouterr().err

    assert 3 <= said.count("pyg_direct: sorting: ") <= 2 + (time.monotonic() - begin) / 0.1


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_work_goes_on_without_stderr(impatient, monkeypatch, stderr):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if stderr else None)

    with show_wait("sorting"), Bar(1, "drawing") as bar:
        time.sleep(0.1)
        bar.update(1)

    assert bar._bar is not None


def test_a_terminal_is_known():
    program = "import sys\nfrom pyg_direct import progress\nprint(progress._is_terminal())"
    ours, its = os.openpty()

    found = [subprocess.run([sys.executable, "-c", BARE_PACKAGE + program], stdout=subprocess.PIPE, stderr=stderr,
                            text=True, check=True).stdout for stderr in (its, subprocess.DEVNULL)]  # fmt: skip

    os.close(ours)
    os.close(its)
    assert found == ["True\n", "False\n"]


def test_many_short_steps_are_one(clock, monkeypatch, capfd):
    monkeypatch.setattr(progress, "PATIENCE", 100.0)

    for _ in range(6):
        with show_wait("compiling"):
            clock[0] += 40
            # The last one is told of at once, though it is as short as the others.
            said = wait_for_words(capfd, "compiling") if clock[0] == 240 else ""

    assert "compiling" in said


def test_a_step_long_after_is_another(clock, monkeypatch, capfd):
    monkeypatch.setattr(progress, "PATIENCE", 60.0)

    for _ in range(3):
        with show_wait("compiling"):
            time.sleep(0.05)
        clock[0] += 61

    assert capfd.readouterr().err == ""


def test_few_items_start_no_thread(impatient, capfd):
    with show_wait("sorting edges", items=1000):
        assert not any(thread.name == "pyg_direct_wait" for thread in threading.enumerate())
        time.sleep(0.2)

    assert capfd.readouterr().err == ""


def test_a_step_inside_another_says_nothing(impatient, capfd):
    with show_wait("outer"), show_wait("inner"):
        said = wait_for_words(capfd, "outer")
        time.sleep(0.1)

    said += capfd.readouterr().err
    assert "outer" in said
    assert "inner" not in said


def test_an_error_ends_what_is_shown(terminal):
    def fail(bar):
        with show_wait("sorting"), bar:
            time.sleep(0.1)
            bar.update(1)
            raise KeyError

    bar = Bar(3, "drawing")
    with pytest.raises(KeyError):
        fail(bar)

    assert not any(thread.name == "pyg_direct_wait" for thread in threading.enumerate())
    assert bar._bar.disable


def test_work_goes_on_where_no_thread_can_start(impatient, monkeypatch, capfd):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with show_wait("sorting"):
            pass
        with pytest.raises(KeyError), show_wait("sorting"):
            raise KeyError
    with show_wait("sorting"):
        said = wait_for_words(capfd, "sorting")

    assert "sorting" in said


@pytest.mark.parametrize("step", ["with progress.Bar(1, 'x') as bar: bar.update(1)", "with progress.show_wait('x'): 0"])
def test_a_short_step_imports_nothing(step):
    found = run_python(f"from pyg_direct import progress\n{step}\nprint('tqdm' in sys.modules)")

    assert found == "False"


def test_the_first_use_of_a_kernel_is_told_and_logged(impatient, capfd, caplog, monkeypatch):
    from pyg_direct.compiler import jit

    monkeypatch.setattr(jit, "find_unwritable", lambda kind: None)
    monkeypatch.setattr(jit, "_NUMBERS", iter([7]))

    caplog.set_level("INFO", "pyg_direct")

    with jit._compiling("sample_neighbors_cpu", "gpu"):
        said = wait_for_words(capfd, "sample_neighbors_cpu")

    assert "compiling kernels, once for this machine: number 7, sample_neighbors_cpu" in said
    assert caplog.messages[0].startswith("compiled sample_neighbors_cpu in ")


def double_cpu(values):
    for i in numba.prange(len(values)):
        values[i] *= 2


def halve_cpu(values):
    for i in numba.prange(len(values)):
        values[i] /= 2


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Steps that were told of, of kernels whose code is kept in an empty folder."""
    from pyg_direct.compiler import jit

    told = []

    @contextlib.contextmanager
    def note(what, detail=""):
        told.append(detail)
        yield

    monkeypatch.setattr(jit, "show_wait", note)
    monkeypatch.setattr(jit, "cache_folder", lambda kind: tmp_path / kind)
    return told


def test_compilations_are_counted_to_the_last_of_the_nearest_small_program(compiled, monkeypatch):
    from pyg_direct.compiler import jit, shipped_loops

    title = "tests.test_progress.{}_cpu".format
    programs = [frozenset([title("double")]), frozenset([title("double"), title("halve")])]
    monkeypatch.setattr(shipped_loops, "read_parts", lambda: {"part": programs})
    monkeypatch.setattr(jit, "CPU_KERNELS", [])
    monkeypatch.setattr(jit, "_NUMBERS", itertools.count(1))
    double, halve = map(jit.cpu_kernel, (double_cpu, halve_cpu))

    halve(np.ones(3))
    double(np.ones(3))
    # In another process all code of `double` is kept.
    monkeypatch.setattr(jit, "CPU_KERNELS", [])
    double, halve = map(jit.cpu_kernel, (double_cpu, halve_cpu))
    halve(np.ones(3, dtype=np.float32))

    assert compiled == [": 1 of about 2, halve_cpu", ": 2 of about 2, double_cpu", ": 3 of about 3, halve_cpu"]


def test_code_of_a_loop_that_is_read_from_the_disk_is_not_told(compiled):
    from pyg_direct.compiler.jit import cpu_kernel

    values = np.ones(3)
    for times in (1, 2):
        # As in another process.
        cpu_kernel(double_cpu)(values)

        assert [detail.rpartition(", ")[2] for detail in compiled] == ["double_cpu"]
        assert values.tolist() == [2.0**times] * 3

    cpu_kernel(double_cpu)(np.ones(3, dtype=np.int32))
    assert len(compiled) == 2


def test_code_of_a_grid_that_is_read_from_the_disk_is_not_told(compiled, monkeypatch):
    from pyg_direct.compiler import jit
    from pyg_direct.kernels.local_ids import relabel

    kernel = next(kernel for kernel in vars(relabel).values() if isinstance(kernel, jit.GpuKernel))
    monkeypatch.setattr(jit, "find_shipped", lambda name: None)
    monkeypatch.setattr(jit, "stamp_version", lambda text, target: text)
    monkeypatch.setattr(kernel, "compile_ptx", lambda target, choice: "code")

    for _ in range(2):
        kernel.compile((9, 0), next(kernel.specialisations()))

        assert [detail.rpartition(", ")[2] for detail in compiled] == [kernel.fn.__name__]
