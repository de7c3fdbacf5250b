"""`python -m pyg_direct run` runs a program as it is."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch_geometric.sampler
from typer.testing import CliRunner

from pyg_direct.cli.app import app
from pyg_direct.noedit import install
from tests.loader.prefetch.drivers.test_cpu_threads import PROGRAM as WORKS_ON
from tests.warm import WarmPython

# Old and new versions are tried with the other cases: each starts two processes.
SLOW = pytest.mark.slow
PROGRAM = """
import pathlib, sys
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
import beside

class Batches:
    pass

assert sys.modules["__main__"].Batches is Batches and __name__ == "__main__" and __file__ == sys.argv[0]
data = Data(x=torch.randn(9, 2), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
loader = NeighborLoader(data, [2], batch_size=3)
batch = next(iter(loader)).to("cpu")
print(type(loader).__module__, batch.batch_size, beside.NAME, sys.argv[1:])
sys.exit(3)
"""

LASTING = """
import atexit, os, sys

class Lasting:
    def __del__(self, write=os.write, is_finalizing=sys.is_finalizing):
        write(1, b"finalizing %r\\n" % is_finalizing())

lasting = Lasting()
atexit.register(lambda: os.write(1, b"%s at exit\\n" % sys.modules["__main__"].Lasting.__name__.encode()))
{end}
"""


NAMES = """
import sys
from {beside} import NAME
print(NAME, __name__, __file__, __package__, __cached__, __loader__.path, sys.argv, sys.path[0])
print(__spec__.name, __spec__.parent, __spec__.origin, sys.modules["__main__"].NAME)
if "fail" in sys.argv:
    {{}}["key"]
"""


def make_environment():
    """That of a process which finds our package and no other one of the tests."""
    # Messages are broken to the width of the terminal.
    return {**os.environ, "COLUMNS": "300", "PYTHONPATH": os.pathsep.join(sys.path)}


def start(*arguments, cwd=None, **environment):
    """What Python does in a process of its own."""
    found = {**make_environment(), **environment}
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=found)


def run(*arguments, **options):
    return start("-m", "pyg_direct", *arguments, **options)


def said(done):
    """Lines on stderr that are not ours."""
    return [line for line in done.stderr.splitlines() if not line.startswith("pyg_direct: ")]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Processes that take a tenth of the time of `run`, for all that does not ask how Python begins."""
    python = WarmPython(tmp_path_factory.mktemp("warm"), make_environment())
    yield python
    python.end()


@pytest.fixture
def program(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.full
def test_a_program_sees_its_own_arguments_and_makes_our_loaders(program):
    done = run("run", "--device", "cpu", program, "--device", "3", "-v", "x")

    assert done.stdout == "pyg_direct.loader.neighbor_loader 3 beside ['--device', '3', '-v', 'x']\n", done.stderr
    # A machine that is busy tells of compiling, too.
    begun, placed, ended = (
        line for line in done.stderr.splitlines() if line.startswith("pyg_direct: ") and "so far" not in line
    )
    assert " loaders and samplers of PyG are replaced by ours" in begun
    assert len(begun) <= 120
    assert placed.startswith("pyg_direct: topology ")
    assert ended == "pyg_direct: replaced in this program: NeighborLoader (1)"
    assert done.returncode == 3


def test_every_loader_is_told_when_asked(warm, program):
    done = warm.run("run", "--verbose", "--device", "cpu", program)

    assert "pyg_direct: NeighborLoader of pyg_direct.loader.neighbor_loader on cpu\n" in done.stderr
    assert "pyg_direct: replaced: loader.NeighborLoader, " in done.stderr


ENDED = """
import torch
from torch_geometric.data import Data, TemporalData
from torch_geometric.loader import NeighborLoader, TemporalDataLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models.tgn import LastNeighborLoader
try:
    from torch_geometric.sampler import BidirectionalNeighborSampler
except ImportError:
    # PyG 2.6 has none.
    def BidirectionalNeighborSampler(*args):
        return None

class Mine(TemporalDataLoader):
    pass

edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]])
data = Data(x=torch.randn(9, 8), edge_index=edge_index)
ends = torch.tensor([0, 1])
events = TemporalData(src=ends, dst=ends, t=ends, msg=torch.zeros(2, 1))
TemporalDataLoader(events), TemporalDataLoader(events), Mine(events), LastNeighborLoader(9, 2, "cpu")
BidirectionalNeighborSampler(data, [2]), BidirectionalNeighborSampler(data, [2])
conv = SAGEConv(8, 8)
for batch in NeighborLoader(data, [2], batch_size=5):
    conv(batch.x, batch.edge_index)
conv(data.x, edge_index)
"""


@pytest.mark.parametrize("verbose", [[], ["--verbose"]])
def test_what_a_program_made_is_told_at_its_end(warm, tmp_path, verbose):
    (tmp_path / "ended.py").write_text(ENDED)

    done = warm.run("run", *verbose, "--device", "cpu", tmp_path / "ended.py")

    *_, made, calls, left = done.stderr.splitlines()
    assert made == (
        "pyg_direct: replaced in this program: LastNeighborLoader (1), NeighborLoader (1), TemporalDataLoader (2)"
    )
    assert calls.startswith("pyg_direct: SAGEConv: 2 accelerated, 1 left to PyG (")
    assert calls.endswith(
        f"({'1: ' if verbose else ''}edges are not known to be sorted, and are too few to sort a graph for)"
    )
    counts = "Mine (1)"
    if hasattr(torch_geometric.sampler, "BidirectionalNeighborSampler"):
        assert "pyg_direct: BidirectionalNeighborSampler left to PyG: there is none of ours\n" in done.stderr
        counts = f"BidirectionalNeighborSampler (2), {counts}"
    assert left == f"pyg_direct: left to PyG: {counts}"
    assert "pyg_direct: Mine left to PyG: it is a class of the program, derived from PyG's\n" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--placement", "nowhere"], "placement"), (["--device", "tpu"], "device"), (["--speed", "9"], "speed")],
)
def test_bad_options_are_told_before_the_program_starts(program, arguments, word):
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["run", *arguments, str(program)])

    assert done.exit_code == 2
    assert word in done.stderr
    assert done.stdout == ""


def test_a_program_that_is_not_there_is_told(tmp_path):
    for name, why in (("nothing.py", "does not exist"), ("", "is a folder")):
        done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["run", str(tmp_path / name)])

        assert done.exit_code == 2
        assert f"{name}' {why}" in done.stderr


@pytest.mark.parametrize(
    "end", ["pass", *(pytest.param(end, marks=SLOW) for end in ("sys.exit(3)", "raise ValueError"))]
)
def test_what_a_program_made_stays_until_the_interpreter_ends(warm, tmp_path, end):
    path = tmp_path / "program.py"
    path.write_text(LASTING.format(end=end))

    done = warm.run("run", "--device", "cpu", path)

    assert done.stdout == "Lasting at exit\nfinalizing True\n", done.stderr


@pytest.mark.parametrize("text", [
    pytest.param("def fail():\n    {}['key']\n\nfail()\n", id="error"),
    pytest.param("x = (\n", id="syntax"),
    pytest.param("raise KeyboardInterrupt\n", id="interrupt", marks=SLOW),
    pytest.param("raise EOFError('Ran out of input')\n", id="end of file", marks=SLOW),
    pytest.param("import errno\nraise OSError(errno.EPIPE, 'a worker is gone')\n", id="pipe", marks=SLOW),
    pytest.param("import typer\nraise typer.Exit(3)\n", id="exit of typer", marks=SLOW),
    pytest.param("import typer\nraise typer.BadParameter('its own')\n", id="usage of typer", marks=SLOW),
    pytest.param("try:\n    {}['key']\nexcept KeyError as error:\n    raise EOFError from error\n", id="cause"),
])  # fmt: skip
def test_an_error_is_shown_as_python_shows_it(warm, tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)

    done = warm.run("run", "--device", "cpu", path)

    expected = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert (said(done), done.returncode) == (expected.stderr.splitlines(), expected.returncode)


def test_an_error_that_another_file_shows_is_shown_whole(warm, tmp_path):
    (tmp_path / "helper.py").write_text(
        "import sys\n\ndef fail():\n    {}['key']\n\n"
        "def show():\n    try:\n        fail()\n    except KeyError:\n        sys.excepthook(*sys.exc_info())\n"
    )
    path = tmp_path / "program.py"
    path.write_text("import helper\nhelper.show()\n")

    done = warm.run("run", "--device", "cpu", path)

    expected = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert "in fail" in expected.stderr
    assert said(done) == expected.stderr.splitlines()


def test_a_program_may_come_through_a_pipe(warm, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("import sys\nprint(sys.argv[1:])\n",), daemon=True)
    writer.start()

    done = warm.run("run", "--device", "cpu", path, "one")

    assert done.stdout == "['one']\n", done.stderr


def test_a_program_that_is_named_from_its_folder_knows_where_it_lies(warm, tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\nprint(__file__, __loader__.path, sys.argv[0], sys.path[0])\n{}['key']\n"
    )

    done = warm.run("run", "--device", "cpu", "program.py", cwd=tmp_path)

    expected = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if not line.startswith("pyg_direct: ")]
    assert done.stdout == expected.stdout
    assert said == expected.stderr.splitlines()


def test_a_program_finds_the_module_of_builtins(warm, tmp_path):
    path = tmp_path / "program.py"
    path.write_text("import builtins\nprint(__builtins__ is builtins)\n")

    done = warm.run("run", "--device", "cpu", path)

    assert done.stdout == start(path).stdout, done.stderr


@pytest.mark.full
def test_spawned_processes_give_a_program_objects_of_its_own_classes(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("""
import multiprocessing

class Answer:
    pass

def answer(queue):
    queue.put(Answer())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=answer, args=(queue,))
    process.start()
    print(type(queue.get()) is Answer)
    process.join()
""")

    done = run("run", "--device", "cpu", path)

    assert done.stdout == "True\n", done.stderr


@pytest.fixture
def folder(tmp_path):
    """A package with modules of all kinds, where a program may be started."""
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("import sys\nassert sys.argv[0] == '-m'\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "bad").mkdir()
    (package / "bad" / "__init__.py").write_text("{}['key']\n")
    (package / "wrong.py").write_text("x = (\n")
    for place, beside in ((tmp_path, "beside"), (package, ".beside"), (package / "inner", "..beside")):
        (place / "program.py").write_text(NAMES.format(beside=beside))
    for place in (tmp_path, package):
        (place / "beside.py").write_text(f"NAME = 'beside {place.name}'\n")
    (package / "__main__.py").write_text(NAMES.format(beside=".beside"))
    return tmp_path


@pytest.mark.parametrize("name", ["package.inner.program", *(pytest.param(name, marks=SLOW)
                                                              for name in ("program", "package"))])  # fmt: skip
def test_a_module_is_run_as_python_runs_it(warm, folder, name):
    arguments = [name, "--device", "3", "-m", "--", "x"]

    done = warm.run("run", "--device", "cpu", "-m", *arguments, cwd=folder)

    expected = start("-m", *arguments, cwd=folder)
    assert expected.returncode == 0
    assert (done.returncode, done.stdout, said(done)) == (0, expected.stdout, [])


@pytest.mark.full
def test_a_module_is_looked_for_where_the_command_is_given(folder, tmp_path_factory):
    # As the command that pip installs, whose own folder Python looks in.
    command = tmp_path_factory.mktemp("bin") / "pyg-direct"
    command.write_text("from pyg_direct.cli.app import main\nmain()\n")

    done = start(command, "run", "--module", "--device", "cpu", "--", "package.program", "--", "x", cwd=folder)

    expected = start("-m", "package.program", "--", "x", cwd=folder)
    assert (done.stdout, said(done)) == (expected.stdout, [])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (["program.py"], "No module named 'beside'"),
        pytest.param(["-m", "program"], "No module named program", marks=SLOW),
    ],
)
@pytest.mark.full
def test_no_folder_is_looked_in_where_python_is_told_so(folder, program, message):
    done = run("run", "--device", "cpu", *program, cwd=folder, PYTHONSAFEPATH="1")

    # Python 3.10 does not know of it.
    expected = start(*program, cwd=folder, PYTHONSAFEPATH="1")
    assert (message in done.stderr) == (message in expected.stderr) == (sys.version_info >= (3, 11))
    assert done.stdout == expected.stdout


def without_runpy(lines):
    """A traceback without frames of the module that starts others."""
    kept, is_inside = [], False
    for line in lines:
        if not line.startswith("    "):
            is_inside = line.startswith("  File ") and "runpy" in line
        if not is_inside:
            kept.append(line)
    return kept


@pytest.mark.parametrize("arguments", [["package.program", "fail"], ["package.bad.program"], ["package.wrong"]],
                         ids=["error", "before", "syntax"])  # fmt: skip
def test_an_error_of_a_module_is_shown_as_python_shows_it(warm, folder, arguments):
    done = warm.run("run", "--device", "cpu", "-m", *arguments, cwd=folder)

    expected = start("-m", *arguments, cwd=folder)
    assert done.returncode == expected.returncode == 1
    assert without_runpy(said(done)) == without_runpy(expected.stderr.splitlines())
    assert "typer" not in done.stderr


@pytest.mark.parametrize("name", ["package.nothing", *(pytest.param(name, marks=SLOW)
                                                        for name in ("package.inner", "beside.py"))])  # fmt: skip
def test_a_module_that_is_not_there_is_told_in_words_of_python(warm, folder, name):
    done = warm.run("run", "--device", "cpu", "-m", name, cwd=folder)

    (expected,) = start("-m", name, cwd=folder).stderr.splitlines()
    assert done.returncode == 2
    assert expected.removeprefix(f"{sys.executable}: ") in done.stderr
    assert "Traceback" not in done.stderr


@SLOW
def test_threads_and_handlers_work_on_when_the_main_thread_has_ended(warm, tmp_path):
    (tmp_path / "train.py").write_text(WORKS_ON)

    done = warm.run("run", "--device", "cpu", tmp_path / "train.py", tmp_path / "rows.npy")

    assert done.stdout.splitlines() == ["in a thread [5, 5, 3] True", "at exit [5, 5, 3] True"], done.stderr
    assert done.returncode == 0


STARTING = """
import multiprocessing, subprocess, sys
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv

def tell(way, queue=None):
    data, conv = Data(x=torch.ones(9, 2), edge_index=torch.tensor([[0], [1]])), SAGEConv(2, 2)
    loader = NeighborLoader(data, [2], batch_size=9)
    told = f"{way} {type(loader).__module__} {loader.placement} {'forward' in conv.__dict__} {__name__}"
    print(told) if queue is None else queue.put(told)

if __name__ == "__main__":
    contexts = [multiprocessing.get_context(way) for way in sys.argv[1:]]
    queue = multiprocessing.get_context("spawn").Queue()
    processes = [context.Process(target=tell, args=(context.get_start_method(), queue)) for context in contexts]
    for process in processes:
        process.start()
    if contexts:
        # As torchrun and Lightning start ranks.
        subprocess.run([sys.executable, "-m", "starting"], check=True)
    for process in processes:
        print(queue.get())
        process.join()
    tell("own")
"""


@pytest.mark.parametrize(("accelerate", "ways"), [
    pytest.param([], ["spawn", "forkserver", "fork"], marks=SLOW), (["--no-accelerate"], ["fork"]),
])  # fmt: skip
@pytest.mark.full
def test_processes_that_a_program_starts_make_our_loaders_with_its_options(warm, tmp_path, accelerate, ways):
    (tmp_path / "starting.py").write_text(STARTING)

    done = warm.run("run", "--device", "cpu", "--placement", "cpu", *accelerate, "-m", "starting", *ways, cwd=tmp_path)

    ours = f"pyg_direct.loader.neighbor_loader cpu {not accelerate}"
    names = {"spawn": "__mp_main__", "forkserver": "__mp_main__", "fork": "__main__"}
    assert sorted(done.stdout.splitlines()) == sorted(
        [*[f"own {ours} __main__"] * 2, *(f"{way} {ours} {names[way]}" for way in ways)]
    ), done.stderr
    # Once for all of them.
    assert done.stderr.count("loaders and samplers of PyG are replaced") == 1
    assert done.stderr.count("replaced in this process; those that it started are not counted") == 1


@pytest.mark.full
def test_other_programs_that_a_program_starts_are_left_alone(tmp_path):
    startup = os.path.join(os.path.dirname(install.__file__), "startup")
    (tmp_path / "sitecustomize.py").write_text("NAME = 'its own'\n")
    asked = (
        "import sys, sitecustomize as own; print(own.NAME, [type(one).__name__ for one in sys.meta_path][0], sys.path)"
    )
    path = os.pathsep.join([startup, str(tmp_path)])

    told = {}
    for case, given in {"plain": "", "this": sys.prefix, "another": f"{sys.prefix}/other"}.items():
        written = json.dumps({"prefix": given, "options": {}}) if given else ""
        done = start("-c", asked, PYTHONPATH=path, PYG_DIRECT_RUN=written)
        told[case] = done.stdout.split(" ", 3)
        assert "startup" not in done.stdout, done.stderr

    plain = start("-c", asked, PYTHONPATH=str(tmp_path)).stdout.split(" ", 3)
    assert told["plain"] == told["another"] == plain
    assert told["this"] == ["its", "own", "_Watch", plain[3]]
