"""Steps that take long say so, and others say nothing."""

import threading
import time

import pytest

from pyg_direct import progress
from pyg_direct.progress import Bar, show_wait
from tests.interpreter import run_python


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "_BEGUN", {})


def test_a_long_step_has_a_bar(impatient, capfd):
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


def test_a_step_of_unknown_length_is_told(impatient, capfd):
    with show_wait("sorting edges", ": many"):
        time.sleep(0.3)

    assert "sorting edges: many: 00:00" in capfd.readouterr().err


def test_many_short_steps_are_one(impatient, capfd):
    for _ in range(6):
        with show_wait("compiling"):
            time.sleep(0.02)

    assert "compiling" in capfd.readouterr().err


def test_a_step_long_after_is_another(impatient, capfd):
    for _ in range(3):
        with show_wait("compiling"):
            pass
        time.sleep(0.1)

    assert capfd.readouterr().err == ""


def test_few_items_start_no_thread(impatient, capfd):
    with show_wait("sorting edges", items=1000):
        assert not any(thread.name == "pyg_direct_wait" for thread in threading.enumerate())
        time.sleep(0.2)

    assert capfd.readouterr().err == ""


def test_a_step_inside_another_says_nothing(impatient, capfd):
    with show_wait("outer"), show_wait("inner"):
        time.sleep(0.3)

    err = capfd.readouterr().err
    assert "outer" in err
    assert "inner" not in err


def test_an_error_ends_what_is_shown(impatient):
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
        time.sleep(0.3)

    assert "sorting" in capfd.readouterr().err


@pytest.mark.parametrize("step", ["with progress.Bar(1, 'x') as bar: bar.update(1)", "with progress.show_wait('x'): 0"])
def test_a_short_step_imports_nothing(step):
    found = run_python(f"from pyg_direct import progress\n{step}\nprint('tqdm' in sys.modules)")

    assert found == "False"


def test_the_first_use_of_a_kernel_is_told_and_logged(impatient, monkeypatch, capfd, caplog):
    from pyg_direct.kernels import jit

    monkeypatch.setattr(jit, "_LOGGED_SECONDS", 0.1)
    caplog.set_level("INFO", "pyg_direct")

    with jit._compiling("sample_neighbors_cpu"):
        time.sleep(0.3)

    assert "compiling kernels, once for this machine: sample_neighbors_cpu" in capfd.readouterr().err
    assert caplog.messages[0].startswith("compiled sample_neighbors_cpu in 0.")
