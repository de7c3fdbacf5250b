"""Choice of the tests on each machine, and the rule that no skip goes unseen.

`pytest` runs on the CPU and, if there is a GPU, on the GPU (`-m gpu` runs that half alone), with one process a core.
Without a GPU, tests that are marked gpu do not exist. It leaves out tests marked slow or full; `pytest --full`, as in
CI, and `pytest FILE` run them too.
`NUMBA_ENABLE_CUDASIM=1 pytest -m sim` runs the GPU kernels in Numba's simulator, on CPU tensors.
"""

import gc
import importlib.util
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Generator, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies
import pytest
import torch

from pyg_direct.ops import run_kernel
from tests import processes
from tests.apart import end_all, run_apart

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")

# Equal runs draw equal examples; HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50, print_blob=True)
hypothesis.settings.register_profile("sim", parent=hypothesis.settings.get_profile("ci"), max_examples=3)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "sim" if SIMULATED else "ci"))

if SIMULATED:
    from tests import simulator

    simulator.install()
    # GPU kernels on CPU tensors: the ops send them to the simulator.
    DEVICES = [pytest.param("cpu", id="sim", marks=pytest.mark.sim)]
else:
    DEVICES = [pytest.param("cpu", id="cpu")]
    if torch.cuda.is_available():
        DEVICES.append(pytest.param("cuda", id="cuda", marks=pytest.mark.gpu))


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Device of the test's tensors."""
    return torch.device(request.param)


@pytest.fixture(scope="session", params=["cpu"] if SIMULATED else DEVICES)
def real_device(request: pytest.FixtureRequest) -> torch.device:
    """CPU and GPU without the simulator, in which a batch takes a second."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def narrow_library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """C++ of the kernels that copy rows, for a CPU (`cuda_on_cpu.run`)."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    from tests import cuda_on_cpu

    return cuda_on_cpu.load(["narrow"], tmp_path_factory.mktemp("narrow"))


@pytest.fixture
def quick_starts() -> Iterator[None]:
    """Processes that are to be spawned take a tenth of the time, for tests that do not ask how they start."""
    with processes.quick_starts():
        yield


@pytest.fixture(autouse=True)
def _all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run loops of small batches of tests on as many threads as loops of large ones."""
    monkeypatch.setattr(run_kernel, "FEW_ITEMS", 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run tests marked slow or full too, as CI does; so do files by name"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Workers parse the arguments of the process that started them.
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        config.option.full = True
    if getattr(config.option, "numprocesses", None):
        # Workers inherit it. Otherwise threads of torch, which wait awake, take the cores from other workers.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("GOMP_SPINCOUNT", "100")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return a process a core for the whole suite, and none for files by name, which workers would delay."""
    return 0 if config.args_source is pytest.Config.ArgsSource.ARGS else len(os.sched_getaffinity(0))


def pytest_report_header() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, and none of its tests"
    return f"torch {torch.__version__}, GPU: {gpu}, CUDA simulator: {'on' if SIMULATED else 'off'}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import and collect without garbage collection, and leave all that out of it: half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        # Its first test looks for what refers to random generators, which is not found once it is left out.
        hypothesis.find(hypothesis.strategies.booleans(), lambda value: True)
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def runs_here(item: pytest.Item) -> bool:
        is_for_sim = item.get_closest_marker("sim") is not None
        left_out = [*(["slow"] if SIMULATED else []), *([] if config.option.full else ["slow", "full"])]
        # To collect and to skip as many tests as run takes minutes.
        left_out += [] if torch.cuda.is_available() else ["gpu"]
        return is_for_sim == SIMULATED and not any(item.get_closest_marker(name) for name in left_out)

    elsewhere = [item for item in items if not runs_here(item)]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if runs_here(item)]

    missing = {}
    if torch.cuda.device_count() < 2:
        missing["gpus"] = "needs two CUDA devices"
    if any(importlib.util.find_spec(name) is None for name in ("torch_scatter", "torch_sparse")):
        missing["sparse"] = "needs torch_scatter and torch_sparse"
    if any(importlib.util.find_spec(name) is None for name in ("torch_geometric_temporal", "torch_sparse")):
        missing["temporal"] = "needs torch_geometric_temporal"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


_HIDING = pytest.MonkeyPatch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hide the GPU from tests of the CPU, and from processes that they start."""
    if torch.cuda.is_available() and not any(item.get_closest_marker(name) for name in ("gpu", "gpus")):
        # Only processes to come read the variable then, and torch knows how many there are.
        torch.cuda.init()
        torch.cuda.device_count()
        _HIDING.setenv("CUDA_VISIBLE_DEVICES", "")
        _HIDING.setattr(torch.cuda, "is_available", lambda: False)
        _HIDING.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    _HIDING.undo()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    reports = run_apart(item)
    if reports is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Folders and modules that the test before left open for this one.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def skips(config: pytest.Config) -> Iterator[tuple[str, str]]:
    """Id and reason of every skipped test."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for report in reporter.stats.get("skipped", []) if reporter else []:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        yield report.nodeid, text.removeprefix("Skipped: ")


def is_allowed(nodeid: str, reason: str) -> bool:
    """Report whether the skip is listed in `allowed_skips.txt`."""
    lines = ALLOWED_SKIPS.read_text().splitlines()
    listed = [line.split("|", 1) for line in lines if line and not line.startswith("#")]
    return any(fnmatch(nodeid, test.strip()) and reason == why.strip() for test, why in listed)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    end_all()
    if hasattr(session.config, "workerinput"):
        return
    found = list(skips(session.config))
    if exitstatus == pytest.ExitCode.OK and not all(is_allowed(*skip) for skip in found):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif exitstatus == pytest.ExitCode.OK and len(found) == session.testscollected > 0:
        # A run with only skips has tested nothing.
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    # Tests by reason and file; the parameters of one function fold into one name.
    by_reason: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    for nodeid, reason in skips(terminalreporter.config):
        file, _, test = nodeid.partition("::")
        status = "" if is_allowed(nodeid, reason) else "NOT ALLOWED (not in tests/allowed_skips.txt): "
        by_reason[status + reason][file][re.sub(r"\[.*", "", test)] += 1
    if by_reason:
        terminalreporter.section("skipped tests")
    for reason, files in by_reason.items():
        terminalreporter.write_line(f"{sum(sum(tests.values()) for tests in files.values())} x {reason}")
        for file, tests in files.items():
            names = [(name or "the whole file") + (f" x{count}" if count > 1 else "") for name, count in tests.items()]
            terminalreporter.write_line(f"    {file}: {', '.join(names)}")
