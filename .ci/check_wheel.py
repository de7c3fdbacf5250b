"""Run by a Python that has the wheel installed, from the checkout: the wheel holds what belongs to it, and all of it.

PTX of every specialisation of every GPU kernel is found for all architectures, current with the sources, without a
compiler. The CPU loops of common programs are not compiled. Its commands run, too.
"""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np

# Commands start now and are read at the end, since each imports torch and PyG meanwhile.
bin_folder, folder = Path(sys.executable).absolute().parent, tempfile.TemporaryDirectory()
script = Path(folder.name, "program.py")
script.write_text("""
import sys, torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
data = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1], [1, 2]]))
print(type(NeighborLoader(data, [2])).__module__, sys.argv[1:])
sys.exit(5)
""")
kept = {**os.environ, "PYG_DIRECT_CACHE": folder.name}
# The README's command, on a graph of three nodes.
for name, rows in {"edges": [[0, 1], [1, 2]], "x": [[0.5], [1.5], [2.5]], "y": [2, 1, 0]}.items():
    np.save(Path(folder.name, f"{name}.npy"), np.array(rows))
readme = Path("README.md").read_text()
partition = re.search(r"^python -m pyg_direct (partition .*)$", readme, re.M)[1].split()
commands = {
    name: subprocess.Popen([*start, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=kept,
                           cwd=folder.name)
    for name, start, arguments in (
        ("doctor", [bin_folder / "pyg-direct"], ["doctor", "--json"]),
        ("cache", [bin_folder / "pyg-direct"], ["cache", "--json"]),
        ("bench", [bin_folder / "pyg-direct"], ["bench", "--quick", "--scale", "0.001", "--json"]),
        ("run", [bin_folder / "python", "-m", "pyg_direct"], ["run", "--device", "cpu", script, "--some", "7"]),
        ("partition", [bin_folder / "python", "-m", "pyg_direct"], partition),
    )
}  # fmt: skip

sys.modules |= dict.fromkeys(["numba", "llvmlite", "cuda"])

import pyg_direct
import pyg_direct.kernels
from pyg_direct.compiler.code_cache import ARCHIVE, _open_archive, source_digest, source_folder
from pyg_direct.compiler.jit import GPU_KERNELS, GpuKernel
from pyg_direct.compiler.nvrtc import PTX_VERSIONS
from pyg_direct.compiler.shipped_loops import ARCHIVE as LOOPS

installed = Path(pyg_direct.__file__).parent
assert installed.is_relative_to(sys.prefix), f"{installed} is not the installed wheel"
borrowed = {one.name for one in metadata.distributions() if not Path(one.locate_file("")).is_relative_to(sys.prefix)}
assert not borrowed, f"not of this environment: {borrowed}"

assert importlib.util.find_spec("numba_cuda") is None, "the wheel would be tried with a compiler of GPU kernels"
assert (installed / "py.typed").is_file(), "type checkers of users would not look at the package"
tags = re.findall("^Tag: (.*)$", metadata.distribution("pyg_direct").read_text("WHEEL"), re.M)
assert tags == ["py3-none-any"], tags

assert source_folder() == installed / "cuda_src", source_folder()
expected = {path.name for path in Path("cuda_src").iterdir()}
found = {path.name for path in source_folder().iterdir()}
assert found == expected, f"cuda_src in the wheel: {found}, in the checkout: {expected}"

for module in pkgutil.walk_packages(pyg_direct.kernels.__path__, "pyg_direct.kernels."):
    importlib.import_module(module.name)
# What was not found would be compiled.
del GpuKernel.compile_ptx
names = set()
for kernel in GPU_KERNELS:
    for target in [*PTX_VERSIONS, (8, 6), (8, 9), (12, 0)]:
        for choice in kernel.specialisations():
            assert kernel.compile(target, choice).entry, f"{kernel.name} {choice} for {target}"
            if target in PTX_VERSIONS:
                names.add(kernel.file_name(target, choice))
archive = _open_archive()
assert archive is not None, "the wheel holds no PTX that is current with its sources"
assert set(archive.namelist()) == names, f"left over: {set(archive.namelist()) - names}"
num_bytes = sum(entry.file_size for entry in archive.infolist())
print(f"pyg_direct {pyg_direct.__version__} from {installed}, cuda_src: {', '.join(sorted(found))}")
print(f"PTX of {len(names)} specialisations of {len(GPU_KERNELS)} kernels, {num_bytes / 1e6:.1f} MB, "
      f"{ARCHIVE.stat().st_size / 1e6:.2f} MB in the wheel; sources {source_digest()[:16]}")  # fmt: skip

outputs = {name: process.communicate(timeout=200) for name, process in commands.items()}
codes = {name: process.returncode for name, process in commands.items()}
assert codes == {"doctor": 0, "cache": 0, "bench": 0, "run": 5, "partition": 0}, outputs
facts = json.loads(outputs["doctor"][0])
assert (facts["pyg_direct"], facts["outdated"]) == (pyg_direct.__version__, []), facts
assert facts["cuda"]["ptx_in_wheel"], facts
assert json.loads(outputs["cache"][0])["folder"] == folder.name, outputs["cache"]
assert outputs["run"][0] == "pyg_direct.loader.neighbor_loader ['--some', '7']\n", outputs["run"]
assert any(row["case"].startswith("loader/") for row in json.loads(outputs["bench"][0])["rows"]), outputs["bench"]
parts = sorted(Path(folder.name, "parts").glob("part-*"))
assert len(parts) == 4, parts
assert sum(len(np.load(part / "node-0.ids.npy")) for part in parts) == 3
print(f"doctor, cache, bench, run and partition work: {len(facts['findings'])} findings")

begin, warm = time.monotonic(), Path(folder.name, "warm")
subprocess.run([sys.executable, "-I", ".ci/small_programs.py"], env={**kept, "PYG_DIRECT_CACHE": str(warm)}, check=True,
               timeout=600)  # fmt: skip
compiled = [path.name for path in warm.rglob("*.nbc")]
assert not compiled, f"not in the wheel: {compiled}; run .ci/list_cpu_loops.py"
print(f"common CPU loops are in the wheel: {LOOPS.stat().st_size / 1e6:.2f} MB, read in "
      f"{time.monotonic() - begin:.1f} s")  # fmt: skip

told = metadata.metadata("pyg_direct")
assert (told["Version"], told["License-Expression"]) == (pyg_direct.__version__, "MIT"), told
table = readme.partition("| extra | for |")[2].partition("\n\n")[0]
named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
assert set(told.get_all("Provides-Extra")) == named, told.get_all("Provides-Extra")
assert told.get_payload() == readme
print(f"extras {', '.join(sorted(named))}; the README is the description")
