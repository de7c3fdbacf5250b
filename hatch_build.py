"""Puts PTX of every kernel specialisation into the wheel; needs no GPU, but numba-cuda and its libraries.

Where they are missing, or do not work, the wheel is built without PTX, with a warning: kernels then compile at first
use, which takes an extra (`compile13`). An editable install has none, since an edit of the sources would make it stale.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
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
        """Add the archive of PTX to what goes into the wheel."""
        if version == "editable":
            return
        self.folder = tempfile.mkdtemp()
        archive = os.path.join(self.folder, "ptx.zip")
        # A process of its own: the package is imported without its dependencies.
        done = subprocess.run([sys.executable, __file__, archive], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            build_data["force_include"][archive] = "pyg_direct/compiler/ptx.zip"
        else:
            reason = done.stderr.strip().rpartition("\n")[2]
            self.app.display_warning("the wheel holds no PTX, its GPU kernels will compile at first use, with the "
                                     f"extra compile13: {reason}")  # fmt: skip

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the archive, of which the wheel holds a copy."""
        if version != "editable":
            shutil.rmtree(self.folder, ignore_errors=True)


def compile_kernel(number: int) -> dict[str, str]:
    """PTX of all specialisations of a kernel for all architectures, by file name."""
    from pyg_direct.compiler.jit import GPU_KERNELS
    from pyg_direct.compiler.targets import PTX_VERSIONS

    kernel, texts = GPU_KERNELS[number], {}
    for choice in kernel.specialisations():
        for target, code in zip(PTX_VERSIONS, kernel.compile_all(list(PTX_VERSIONS), choice), strict=True):
            texts[kernel.file_name(target, choice)] = code.ptx
    return texts


def write_ptx(path: str) -> None:
    """Compile every kernel for every architecture into one archive."""
    # The package's own __init__ imports torch and PyG, which a build has no use for.
    package = sys.modules["pyg_direct"] = types.ModuleType("pyg_direct")
    package.__path__ = [str(ROOT / "pyg_direct")]
    import pyg_direct.kernels
    from pyg_direct.compiler.code_cache import write_archive
    from pyg_direct.compiler.jit import GPU_KERNELS

    for module in pkgutil.walk_packages(pyg_direct.kernels.__path__, "pyg_direct.kernels."):
        importlib.import_module(module.name)
    # Forked, so that the processes know the bare package.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        texts = [text for part in pool.map(compile_kernel, range(len(GPU_KERNELS))) for text in part.items()]
    write_archive(Path(path), dict(texts))


if __name__ == "__main__":
    write_ptx(sys.argv[1])
