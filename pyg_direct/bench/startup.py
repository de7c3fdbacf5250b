"""Seconds until a program has its first batch, each time in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pyg_direct.bench.row import Row
from pyg_direct.datasets import synthetic_graph
from pyg_direct.kernels.shipped import ARCHIVE

_PROGRAM = """
import json, sys, time
import torch, torch_geometric.loader
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
    """Import and first batch: with the PTX of the wheel, with all to compile, and with all kept from an earlier run."""
    on_gpu = torch.cuda.is_available()
    graph = synthetic_graph("products", scale=scale, device="cuda" if on_gpu else "cpu").to("cpu")
    states = (["wheel"] if on_gpu and ARCHIVE.exists() else []) + ["nothing compiled", "all cached"]
    imports = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.pt"
        torch.save(graph.to_data(), file)
        for state in states:
            seconds = []
            for number in range(repeats):
                cache = Path(folder) / (state if state == "all cached" else f"{state} {number}")
                if state == "all cached" and number == 0:
                    _run(file, cache, state)
                imported, first = _run(file, cache, state)
                imports.append(imported)
                seconds.append(first)
            yield Row.of(f"startup/products x {scale:g}/{state}", "first batch", "s", seconds,
                         note="placement and CUDA context included; imports not")  # fmt: skip
    yield Row.of("startup/import", "import pyg_direct", "s", imports, note="after torch and torch_geometric")


def _run(file: Path, cache: Path, state: str) -> tuple[float, float]:
    """Seconds of the import and of the first batch in a fresh process with this cache, which holds the driver's too."""
    environment = {**os.environ, "PYG_DIRECT_CACHE": str(cache), "CUDA_CACHE_PATH": str(cache / "driver"),
                   "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}  # fmt: skip
    if state != "wheel":
        # A compiler that is asked for is used, whatever the wheel carries.
        environment["PYG_DIRECT_COMPILER"] = "numba"
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(file)], env=environment, capture_output=True, text=True,
                          check=True, cwd=file.parent)  # fmt: skip
    imported, first = json.loads(done.stdout.splitlines()[-1])
    return imported, first
