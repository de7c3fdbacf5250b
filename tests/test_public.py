"""What users see: the names, their documentation, and an import that leaves the GPU alone."""

import inspect
import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest

import pyg_direct

NAMES = [name for name in pyg_direct.__all__ if not name.startswith("__")]
CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def test_names_are_sorted_and_exist():
    assert pyg_direct.__all__ == sorted(pyg_direct.__all__)
    assert len(set(pyg_direct.__all__)) == len(pyg_direct.__all__)
    for name in pyg_direct.__all__:
        assert hasattr(pyg_direct, name)


def test_nothing_else_is_public():
    public = {name for name in dir(pyg_direct) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(pyg_direct, name))}

    names = public - modules - {"Any", "TYPE_CHECKING", "import_module"}

    assert names == set(NAMES)


@pytest.mark.parametrize(("name", "meant"), [
    ("NeighbourLoader", "; did you mean NeighborLoader or LinkNeighborLoader?"),
    ("neighborloader", "; did you mean NeighborLoader or LinkNeighborLoader?"),
    ("Acelerate", "; did you mean accelerate?"), ("dataset", "; did you mean datasets?"),
    ("frobnicate", ""), ("__wrapped__", ""),
])  # fmt: skip
def test_a_name_that_is_not_there_is_told_with_those_spelt_like_it(name, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(pyg_direct, name)

    assert str(caught.value) == f"module 'pyg_direct' has no attribute {name!r}{meant}"


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_told_in_the_changelog(name):
    text = CHANGELOG.read_text()

    assert f"`{name}`" in text or name == "Adj"


def test_version_is_the_one_of_the_changelog():
    headings = re.findall(r"^## \[(.+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$", CHANGELOG.read_text(), re.M)

    assert pyg_direct.__version__ == headings[0]


def test_every_extra_is_told_in_the_readme():
    text = (CHANGELOG.parent / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = re.findall(r"^(\w+) = \[", text.partition("\n[")[0], re.M)

    rows = (CHANGELOG.parent / "README.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]

    named = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
    told = re.findall(r"`(\w+)`", " ".join(named))
    assert sorted(told) == sorted(extras)


# `import pyg_direct` alone enters no room. Every public name and every file, but those of Ray's actors and of
# Lightning's callback, which are for programs that have these packages.
EVERYTHING = """
import importlib, pkgutil
import pyg_direct
from pyg_direct import *
for module in pkgutil.walk_packages(pyg_direct.__path__, "pyg_direct."):
    if module.name not in ("pyg_direct.distributed.server.ray_servers", "pyg_direct.loader.lightning"):
        importlib.import_module(module.name)
assert NeighborLoader is pyg_direct.loader.neighbor_loader.NeighborLoader
"""


def run_python(program, *arguments):
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# What forks of a process find that has imported torch, or PyG too; and what it finds itself.
IMPORTS = f"""
import os, sys, time
from ast import literal_eval
WAITS = {{"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.connect", "subprocess.Popen", "time.sleep",
         "_thread.start_new_thread"}}

def fork(find):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, repr(find()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        told = file.read()
    os.wait()
    return literal_eval(told)

def import_without_compiler():
    sys.modules |= dict.fromkeys(["numba", "llvmlite", "cuda", "cuda.bindings", "matplotlib"])
    names = {{}}
    exec({EVERYTHING!r}, names)
    return names["pyg_direct"].__version__

def import_server():
    import pyg_direct.distributed.server.part_server
    return "torch_geometric" in sys.modules

def use_own_bytecode():
    # As installed: compiled, by the first import.
    sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False

def list_rooms():
    before = set(sys.modules)
    use_own_bytecode()
    import pyg_direct
    alone = sorted(set(sys.modules) - before)
    from pyg_direct import NeighborLoader
    new = sorted(set(sys.modules) - before)
    ours = [name for name in new if name.startswith("pyg_direct")]
    return alone, ours, [name for name in new if name not in ours]

def refuse(*args, **kwargs):
    raise SystemExit("CUDA was started")

def import_everything():
    torch.cuda.init = torch.cuda._lazy_init = torch._C._cuda_init = refuse
    # PyG imports Numba and tqdm where they are installed, and may warn; the commands need typer and rich.
    import torch_geometric.loader, torch_geometric.nn, tqdm, typer, warnings
    before = set(sys.modules)
    warnings.simplefilter("error")
    exec({EVERYTHING!r}, {{}})
    new = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names) - {{"rich"}}
    compilers = {{"numba.cuda", "numba_cuda_mlir", "matplotlib"}} & set(sys.modules)
    return sorted(new), sorted(compilers), torch.cuda.is_initialized()

begin = time.process_time()
import torch
seconds = time.process_time() - begin
is_first, found = len(sys.argv) < 3, {{}}
if is_first:
    found |= {{"without compiler": fork(import_without_compiler), "server": fork(import_server)}}
import torch_geometric
if is_first:
    found |= {{"rooms": fork(list_rooms), "everything": fork(import_everything)}}
waited, is_over = [], False
sys.addaudithook(lambda event, _: waited.append(event) if event in WAITS and not is_over else None)
use_own_bytecode()
begin = time.process_time()
from pyg_direct import NeighborLoader
found["time"] = (time.process_time() - begin) / seconds, waited
is_over = True
print(found)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def imports(compiled):
    return literal_eval(run_python(IMPORTS, compiled))


def test_import_warns_of_nothing_and_starts_neither_cuda_nor_a_compiler(imports):
    assert imports["everything"] == (["pyg_direct"], [], False)


def test_import_needs_no_compiler(imports):
    assert imports["without compiler"] == pyg_direct.__version__


def test_a_server_of_a_part_does_not_import_pyg(imports):
    assert imports["server"] is False


def test_import_enters_few_rooms(imports):
    alone, with_loader, others = imports["rooms"]

    assert (alone, others) == (["pyg_direct", "pyg_direct.old_import_paths"], [])
    assert len(with_loader) <= 200
    # Of other rooms, of programs of several processes, and of convolutions.
    for room in ("bench", "cli", "datasets", "distributed", "dynamic", "nn.accelerate", "nn.dispatch", "noedit",
                 "ops.aggregate.sum_rows", "ops.aggregate.build_edge_layout", "runtime.comm.communicator"):  # fmt: skip
        assert f"pyg_direct.{room}" not in with_loader


def test_import_is_quick_beside_torch(imports, compiled):
    # CPU time of a process is counted, because a clock includes other programs on the cores. A machine that is slow or
    # shared is so for both. Five hundredths are taken.
    tries = [imports["time"]]
    while len(tries) < 4 and min(computed for computed, _ in tries) >= 0.08:
        tries.append(literal_eval(run_python(IMPORTS, compiled, "again"))["time"])

    assert all(waited == [] for _, waited in tries), tries
    assert min(computed for computed, _ in tries) < 0.08, tries


@pytest.mark.gpu
def test_batches_of_compiled_kernels_need_no_compiler():
    program = """
import sys
if "--without-compiler" in sys.argv:
    sys.modules |= dict.fromkeys(["numba", "llvmlite"])
import torch
from torch_geometric.data import Data
from pyg_direct import NeighborLoader
ids = torch.arange(2000)
data = Data(x=torch.rand(1000, 33), edge_index=torch.stack([ids % 1000, ids * 7 % 1000]))
torch.manual_seed(3)
for placement in ("cuda", "unified"):
    batch = next(iter(NeighborLoader(data, [4, -1], batch_size=32, shuffle=True, placement=placement)))
    print(batch.x.device, batch.n_id.tolist(), float(batch.x.double().sum()) > 0)
"""

    expected = run_python(program)

    assert expected.count("cuda") == expected.count("True") == 2
    assert run_python(program, "--without-compiler") == expected
