"""Seconds until a program has its first batch, each time in a process that has imported only torch and PyG."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pyg_direct.bench.result_row import Row
from pyg_direct.compiler.code_cache import ARCHIVE
from pyg_direct.datasets import synthetic_graph

# Imports torch and PyG, which takes longer than the measurement, and waits: without this package and CUDA so far.
_PROGRAM = """
import json, os, sys, time
import torch, torch_geometric.loader
print("imported", flush=True)
line = sys.stdin.readline()
if not line:
    sys.exit()
os.environ.update(json.loads(line))
begin = time.perf_counter()
import pyg_direct
imported = time.perf_counter()
data = torch.load(sys.argv[1], weights_only=False)
loaded = time.perf_counter()
batch = next(iter(pyg_direct.NeighborLoader(data, [15, 10, 5], batch_size=1024, shuffle=True)))
float(batch.x[0, 0])
print(json.dumps([imported - begin, time.perf_counter() - loaded]))
"""


def measure_startup(scale: float = 0.1, repeats: int = 3) -> Iterator[Row]:
    """Measure import and first batch: with the wheel's PTX, without any cache, and with an earlier run's cache."""
    on_gpu = torch.cuda.is_available()
    graph = synthetic_graph("products", scale=scale, device="cuda" if on_gpu else "cpu").to("cpu")
    states = (["wheel"] if on_gpu and ARCHIVE.exists() else []) + ["nothing compiled", "all cached"]
    imports = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder) / "data.pt"
        torch.save(graph.to_data(), file)
        # All import at once; each waits until the last has finished.
        waiting = [stack.enter_context(_Program(file, number)) for number in range(repeats * len(states) + 1)]
        for program in waiting:
            program.wait()
        for state in states:
            seconds = []
            for number in range(repeats):
                cache = Path(folder) / (state if state == "all cached" else f"{state} {number}")
                if state == "all cached" and number == 0:
                    waiting.pop().run(cache, state)
                imported, first = waiting.pop().run(cache, state)
                imports.append(imported)
                seconds.append(first)
            yield Row.of(f"startup/products x {scale:g}/{state}", "first batch", "s", seconds,
                         note="placement and CUDA context included; imports not")  # fmt: skip
    yield Row.of("startup/import", "import pyg_direct", "s", imports, note="after torch and torch_geometric")


class _Program:
    """Program over the graph of a file; it runs once, on request."""

    def __init__(self, file: Path, number: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        self._log = file.with_name(f"errors {number}.txt")
        with self._log.open("w") as log:
            self._process = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(file)], env=environment, text=True,
                                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                             cwd=file.parent)  # fmt: skip

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def wait(self) -> None:
        """Wait until all imports that are not measured have finished."""
        self._read("imports")

    def run(self, cache: Path, state: str) -> tuple[float, float]:
        """Run with this cache, which includes the driver's, and return seconds of the import and of the first batch."""
        # A requested compiler is used even if the wheel has PTX.
        compiler = {} if state == "wheel" else {"PYG_DIRECT_COMPILER": "numba"}
        settings = {"PYG_DIRECT_CACHE": str(cache), "CUDA_CACHE_PATH": str(cache / "driver"), **compiler}
        assert self._process.stdin is not None
        # If the process has ended already, its log has the reason.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(settings), file=self._process.stdin, flush=True)
        imported, first = json.loads(self._read(state))
        self._process.wait()
        return imported, first

    def _read(self, state: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the program ended without a batch ({state}):\n{self._log.read_text()}")
        return line
