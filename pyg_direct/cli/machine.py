"""Facts about a machine, for `pyg-direct doctor`: values of JSON, without names of hosts or users."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import time
from importlib import metadata
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import torch

import pyg_direct
from pyg_direct.cache_folder import cache_root
from pyg_direct.compiler.code_cache import _open_archive
from pyg_direct.compiler.jit import get_cpu_threads
from pyg_direct.errors import PygDirectError
from pyg_direct.ops.rows.gather_rows import gather_rows
from pyg_direct.runtime.cuda.device import abilities, call, free_bytes, load_driver
from pyg_direct.runtime.cuda.peer_memory import p2pCliqueTopo, read_link
from pyg_direct.runtime.host.memory_sizes import available_bytes, count_cores, page_lock_limit, total_bytes

Facts = dict[str, Any]
REQUIRED = ("torch", "torch_geometric", "numba", "numpy", "cuda-bindings")
# Distributions of each extra of the package, and their use.
OPTIONAL = {
    "torch_sparse": ("sparse", "graphs given as SparseTensor"),
    "numba-cuda": ("compile13", "GPU kernels compiled here"),
    "ogb": ("ogb", "data sets of the Open Graph Benchmark"),
    "pymetis": ("distributed", "partitions by METIS"),
    "pyarrow": ("distributed", "edges and rows in parquet files"),
    "ray": ("ray", "servers of parts"),
    "torch-geometric-temporal": ("temporal", "its signals and layers"),
    "matplotlib": ("bench", "pictures of reports and benchmarks"),
}
_VARIABLES = ("PYG_DIRECT_COMPILER", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER", "NUMBA_ENABLE_CUDASIM",
              "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # fmt: skip
# Packages that numba-cuda compiles with, by names of their distributions.
_COMPILERS = ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")
_CONTROL, _SLOTS = Path("/dev/nvidiactl"), Path("/sys/bus/pci/devices")
_COPY_BYTES = 256 << 20
_TABLE_BYTES = 2 << 30
_LEAST_TABLE = 64 << 20
_ROW_BYTES = 512
_MOST_SECONDS = 10.0


def read_version(distribution: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def collect_facts() -> Facts:
    """Collect all facts that need no measurement; if CUDA has to start, this takes some seconds."""
    facts: Facts = {
        "pyg_direct": pyg_direct.__version__,
        "system": {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()},
        "packages": {name: read_version(name) for name in REQUIRED},
        "optional": {name: read_version(name) for name in OPTIONAL},
        "outdated": list_outdated(),
        "cpu": {"cores": count_cores(), "torch_threads": torch.get_num_threads(), "kernel_threads": _ask_threads()},
        "memory": {"total_bytes": total_bytes(), "available_bytes": available_bytes(),
                   "page_lock_limit_bytes": page_lock_limit()},
        "cache": {"folder": _shorten(cache_root()), "writable": can_write(cache_root())},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "cuda": _ask_cuda(),
        "gpus": [],
        "links": [],
        "cliques": [],
    }  # fmt: skip
    if facts["cuda"]["usable"]:
        devices = range(torch.cuda.device_count())
        facts["gpus"] = [_ask_gpu(index) for index in devices]
        for reader, owner in permutations(devices, 2):
            link = read_link(reader, owner)
            facts["links"].append({"reader": reader, "owner": owner, **link._asdict()})
        if len(devices) > 1:
            facts["cliques"] = list(p2pCliqueTopo(list(devices)).p2p_clique.values())
    return facts


def list_outdated() -> list[str]:
    """Installed packages that are not of the versions this package asks for, a sentence each."""
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires("pyg_direct") or []
    except metadata.PackageNotFoundError:
        # Run from a checkout that is not installed.
        return []
    wrong = []
    for requirement in map(Requirement, texts):
        version = read_version(requirement.name)
        # Extras are asked for by name.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} must be {requirement.specifier}, got {version or 'none'}")
    return wrong


def can_write(folder: Path) -> bool:
    """Check that files can be created in a folder, or in the folder that would hold it."""
    # `Path.exists` would raise below a folder of somebody else's.
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _shorten(path: Path) -> str:
    """Return a path without the name of the user."""
    with contextlib.suppress(ValueError, RuntimeError):
        return str(Path("~") / path.resolve().relative_to(Path.home().resolve()))
    return str(path)


def _ask_threads() -> int | None:
    try:
        return get_cpu_threads()
    except ImportError:
        return None


def _ask_cuda() -> Facts:
    """Collect facts about driver and bindings; `reason` says why torch has no GPU."""
    found: Facts = {"torch_cuda": torch.version.cuda, "torch_hip": getattr(torch.version, "hip", None),
                    "driver": _read_text(Path("/sys/module/nvidia/version")), "driver_cuda": None,
                    "bindings_error": None, "ptx_in_wheel": _open_archive() is not None, "compiler": _find_compiler(),
                    "usable": False, "reason": None}  # fmt: skip
    # A container without GPUs sees the driver's module, but no such file.
    found["has_driver"] = _CONTROL.exists() or shutil.which("nvidia-smi") is not None
    try:
        load_driver()
        version = int(call("cuDriverGetVersion"))
        found["driver_cuda"], found["has_driver"] = f"{version // 1000}.{version % 1000 // 10}", True
    except PygDirectError as error:
        found["bindings_error"] = str(error)
    found["usable"] = torch.cuda.is_available() and found["torch_hip"] is None and found["bindings_error"] is None
    if not torch.cuda.is_available() and torch.version.cuda is not None and found["has_driver"]:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            found["reason"] = str(error).splitlines()[0]
    return found


def _find_compiler() -> str | None:
    """Name the compiler of GPU kernels that the wheel does not hold."""
    found = next((name for name in _COMPILERS if read_version(name)), None)
    return found or (os.path.basename(shutil.which("nvcc") or "") or None)


def _ask_gpu(index: int) -> Facts:
    known, properties = abilities(index), torch.cuda.get_device_properties(index)
    return {"index": index, "name": properties.name, "compute_capability": list(known.compute_capability),
            "total_bytes": properties.total_memory, "free_bytes": free_bytes(index),
            "unified_without_migration": known.managed_without_migration,
            "reads_ordinary_memory": known.reads_pageable_memory, "pcie": _ask_slot(index)}  # fmt: skip


def _ask_slot(index: int) -> Facts | None:
    """Rate and width of the slot that a GPU sits in, as the system reports them; an idle link may be a slow one."""
    attribute, device = load_driver().CUdevice_attribute, call("cuDeviceGet", index)
    domain, bus, slot = (int(call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_PCI_{name}_ID"),
                                  device)) for name in ("DOMAIN", "BUS", "DEVICE"))  # fmt: skip
    folder = _SLOTS / f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    names = "current_link_speed", "max_link_speed", "current_link_width", "max_link_width"
    found = {name: _read_text(folder / name) for name in names}
    return found if any(found.values()) else None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _load_kernel() -> None:
    """Have the kernel that is measured compiled, if it has to be, and loaded."""
    rows = torch.zeros(2, _ROW_BYTES // 4, dtype=torch.int32, device="cuda")
    gather_rows(rows, torch.arange(2, device="cuda"))
    torch.cuda.synchronize()


def measure_host_memory(index: int) -> Facts:
    """Measure the bytes a second that a GPU gets from the host, within ten seconds.

    Rows are copied, and read in place at random and in ascending order, from both kinds of host memory. A kind that
    cannot be had, or time that has run out, leaves None.
    """
    from pyg_direct.bench.gather import fill_host_table, time_cold_rows
    from pyg_direct.bench.limits import pinned_copy_rate

    with torch.cuda.device(index):
        _load_kernel()
    begin = time.perf_counter()
    table_bytes = min(_TABLE_BYTES, available_bytes() // 4)
    table_bytes -= table_bytes % _ROW_BYTES
    rates: Facts = {"gpu": index, "table_bytes": table_bytes, "row_bytes": _ROW_BYTES, "copy": None}
    with torch.cuda.device(index):
        with contextlib.suppress(torch.OutOfMemoryError, RuntimeError):
            rates["copy"] = pinned_copy_rate(_COPY_BYTES, 4)
        for placement in ("unified", "pinned"):
            for order in ("random", "ascending"):
                rates[f"{placement}_{order}"] = None
            if table_bytes < _LEAST_TABLE or time.perf_counter() - begin > 0.6 * _MOST_SECONDS:
                continue
            with contextlib.suppress(PygDirectError, torch.OutOfMemoryError):
                block, table = fill_host_table(table_bytes, placement)
                for order in ("random", "ascending"):
                    rates[f"{placement}_{order}"] = median(time_cold_rows(table, _ROW_BYTES,
                                                                          ascending=order == "ascending"))  # fmt: skip
                del block, table
    rates["seconds"] = round(time.perf_counter() - begin, 2)
    return rates
