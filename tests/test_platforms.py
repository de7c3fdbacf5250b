"""The package works on the CPU where modules and calls of Linux, CUDA's bindings and optional packages are missing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pyg_direct

PACKAGE = Path(pyg_direct.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Modules of the standard library that one of Linux, macOS and Windows lacks.
NOT_EVERYWHERE = {"crypt", "fcntl", "grp", "msvcrt", "nis", "ossaudiodev", "posix", "pty", "pwd", "readline",
                  "resource", "spwd", "syslog", "termios", "tty", "winreg", "winsound", "_posixshmem",
                  "_winapi"}  # fmt: skip
OPTIONAL = ("cuda", "kvikio", "lightning", "matplotlib", "numba_cuda", "numba_cuda_mlir", "ogb", "pandas", "pyarrow",
            "pyg_lib", "pylibwholegraph", "pymetis", "pytorch_lightning", "ray", "torch_cluster",
            "torch_geometric_temporal", "torch_scatter", "torch_sparse", "torch_spline_conv")  # fmt: skip


def find_unguarded_imports(tree):
    """Names of modules that importing a file imports whatever happens: not inside functions, nor inside `try`."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, (ast.ClassDef, ast.If, ast.With)):
            yield from find_unguarded_imports(node)


def test_unguarded_imports_are_found():
    text = "import a.b\nfrom c import d\nif x:\n    import e\ntry:\n    import f\nexcept ImportError:\n    f = None\n"

    found = list(find_unguarded_imports(ast.parse(text + "def g():\n    import h\nclass I:\n    import j\n")))

    assert found == ["a", "c", "e", "j"]


def test_no_file_needs_a_module_of_one_system():
    found = {str(file): NOT_EVERYWHERE & set(find_unguarded_imports(ast.parse(file.read_text()))) for file in FILES}

    assert len(found) > 200
    assert {file: names for file, names in found.items() if names} == {}


PROGRAM = """
import importlib, mmap, os, pkgutil, sys
import filelock, multiprocessing.reduction, numba.core.config, psutil, rich.console, tempfile, torch
import torch_geometric.loader, torch_geometric.nn, torch_geometric.transforms, tqdm, typer
torch.utils.data.DataLoader([0])

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocked())
for name in [n for n in sys.modules if n.partition(".")[0] in BLOCKED]:
    del sys.modules[name]
for module, names in ((os, ["sched_getaffinity", "memfd_create", "MFD_CLOEXEC", "register_at_fork", "fork", "sysconf",
                       "preadv"]),
                      (mmap, [n for n in dir(mmap) if n.startswith(("MADV_", "MAP_", "PROT_"))]),
                      (multiprocessing.reduction, ["DupFd"])):
    for name in names:
        delattr(module, name)
sys.platform = "elsewhere"
plain_open = os.open

def open_no_folder(path, *args, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(13, "a folder", str(path))
    return plain_open(path, *args, **kwargs)

os.open = open_no_folder

import pyg_direct
from pyg_direct import *
for module in pkgutil.walk_packages(pyg_direct.__path__, "pyg_direct."):
    # Those of Ray's actors and Lightning's callback are for programs that have these packages.
    if module.name not in ("pyg_direct.distributed.server.ray_servers", "pyg_direct.loader.lightning"):
        importlib.import_module(module.name)
assert NeighborLoader is pyg_direct.loader.neighbor_loader.NeighborLoader
assert "numba.cuda" not in sys.modules

import numpy as np
from torch_geometric.data import Data
from pyg_direct.runtime.host.shared_memory import share
from typer.testing import CliRunner
ids = torch.arange(300)
data = Data(x=torch.rand(100, 4), edge_index=torch.stack([ids % 100, ids * 7 % 100]))
loader = pyg_direct.NeighborLoader(data, [2], batch_size=50)
for batch in loader:
    assert torch.equal(batch.x, data.x[batch.n_id])
np.save(sys.argv[2], data.x.numpy())
feature = pyg_direct.Feature(host_cache_size="64B").from_file(sys.argv[2])
assert torch.equal(feature[ids % 100], data.x[ids % 100])
pyg_direct.save_rows(sys.argv[2], data.x)
from pyg_direct.distributed import partition_graph
partition_graph(sys.argv[2] + ".parts", data.edge_index, 2, num_nodes=100, progress=False)
shared = data.x.clone()
assert torch.equal(share(shared).view(torch.float32, (100, 4)), data.x)
done = CliRunner().invoke(pyg_direct.cli.app.app, ["doctor", "--json"])
assert done.exit_code in (0, 1) and "findings" in done.output, done.output
print("works")
"""


def test_the_package_works_without_what_other_systems_lack(tmp_path):
    """Simulated: the calls of Linux are taken away, and so are CUDA's bindings, Ray and all extras."""
    blocked = ",".join(sorted(NOT_EVERYWHERE - {"posix"} | set(OPTIONAL)))

    done = subprocess.run([sys.executable, "-c", PROGRAM, blocked, str(tmp_path / "x.npy")], capture_output=True,
                          text=True, timeout=280, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})  # fmt: skip

    assert done.stdout == "works\n", done.stderr
