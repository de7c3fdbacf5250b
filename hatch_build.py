"""Puts PTX of every kernel specialisation into the wheel; needs no GPU, but numba-cuda and its libraries.

Where they are missing, or do not work, the wheel is built without PTX, with a warning: kernels then compile at first
use, which takes an extra (`compile13`). An editable install has none, since an edit of the sources would make it stale.

CPU loops are compiled for families of processors too. They serve the version of Python and Numba that builds the wheel.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent


class PtxHook(BuildHookInterface):
    """Compiles the kernels before the wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the archives of compiled code to what goes into the wheel."""
        if version == "editable":
            return
        self.folder = tempfile.mkdtemp()
        # Processes of their own: the package is imported without its dependencies.
        for name, missing in (
            ("ptx.zip", "the wheel holds no PTX, its GPU kernels will compile at first use, with the extra compile13"),
            ("cpu_loops.zip", "the wheel holds no loops for CPUs, which will compile at first use"),
        ):
            archive = os.path.join(self.folder, name)
            done = subprocess.run([sys.executable, __file__, archive], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                build_data["force_include"][archive] = f"pyg_direct/compiler/{name}"
            else:
                self.app.display_warning(f"{missing}: {done.stderr.strip().rpartition(chr(10))[2]}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the archives, of which the wheel holds copies."""
        if version != "editable":
            shutil.rmtree(self.folder, ignore_errors=True)


def compile_kernel(number: int) -> dict[str, str]:
    """PTX of all specialisations of a kernel for all architectures, by file name."""
    from pyg_direct.compiler.jit import GPU_KERNELS
    from pyg_direct.compiler.nvrtc import PTX_VERSIONS

    kernel, texts = GPU_KERNELS[number], {}
    for choice in kernel.specialisations():
        for target, code in zip(PTX_VERSIONS, kernel.compile_all(list(PTX_VERSIONS), choice), strict=True):
            texts[kernel.file_name(target, choice)] = code.ptx
    return texts


def import_kernels() -> None:
    """Have all kernels declare themselves, without the package's own __init__, which imports torch and PyG."""
    package = sys.modules["pyg_direct"] = types.ModuleType("pyg_direct")
    package.__path__ = [str(ROOT / "pyg_direct")]
    import pyg_direct.kernels

    for module in pkgutil.walk_packages(pyg_direct.kernels.__path__, "pyg_direct.kernels."):
        importlib.import_module(module.name)


def write_ptx(path: str) -> None:
    """Compile every kernel for every architecture into one archive."""
    import_kernels()
    from pyg_direct.compiler.code_cache import write_archive
    from pyg_direct.compiler.jit import GPU_KERNELS

    # Forked, so that the processes know the bare package.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        texts = [text for part in pool.map(compile_kernel, range(len(GPU_KERNELS))) for text in part.items()]
    write_archive(Path(path), dict(texts))


def compile_family(family: str, folder: str, kept: str) -> None:
    """Write the code of all listed loops for a family of processors, which Numba reads from the environment.

    Code that an earlier build kept is copied.
    """
    import_kernels()
    from pyg_direct.compiler.jit import CPU_KERNELS
    from pyg_direct.compiler.shipped_loops import name_entry, read_type

    kernels = {kernel.title: kernel for kernel in CPU_KERNELS}
    for line in (ROOT / "pyg_direct/compiler/cpu_loops.txt").read_text().splitlines():
        title, threads, *codes = line.split()
        args = [read_type(code) for code in codes]
        name = name_entry(family, title, threads, args).replace("/", "+")
        own, known = Path(folder, name), Path(kept, name)
        if known.exists():
            shutil.copy(known, own)
            continue
        own.write_bytes(kernels[title].compile(threads, args))
        # Other builds see all of it or none of it.
        part = Path(kept, f"{os.getpid()}.part")
        shutil.copy(own, part)
        part.replace(known)


def write_loops(path: str) -> None:
    """Compile the listed CPU loops for every family into one archive."""
    import_kernels()
    from pyg_direct.compiler.code_cache import cache_folder
    from pyg_direct.compiler.shipped_loops import FAMILIES, write_archive

    # Of these sources and this compiler, as all compiled code there, and of this Python.
    kept = cache_folder(f"families_{sys.implementation.cache_tag}_{platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        # The library of vector functions is found where Intel's is installed, which may not be so elsewhere.
        common = {**os.environ, "PYG_DIRECT_CACHE": os.path.join(folder, "cache"), "NUMBA_DISABLE_INTEL_SVML": "1"}
        made = []
        for family in FAMILIES:
            Path(folder, family).mkdir()
            named = {"NUMBA_CPU_NAME": family, "NUMBA_CPU_FEATURES": ""}
            made.append(subprocess.Popen([sys.executable, __file__, family, os.path.join(folder, family), str(kept)],
                                         env={**common, **named}))  # fmt: skip
        codes = [process.wait() for process in made]
        if any(codes):
            raise RuntimeError("CPU loops could not be compiled")
        files = [file for family in FAMILIES for file in Path(folder, family).iterdir()]
        write_archive(Path(path), {file.name.replace("+", "/"): file.read_bytes() for file in files})


if __name__ == "__main__":
    if len(sys.argv) == 4:
        compile_family(*sys.argv[1:])
    elif sys.argv[1].endswith("ptx.zip"):
        write_ptx(sys.argv[1])
    else:
        write_loops(sys.argv[1])
