"""The report of `pyg-direct doctor`: facts, measured rates, the plan of `auto` and findings, and their tables."""

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
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import pyg_direct
from pyg_direct.cache_folder import cache_root
from pyg_direct.cli.advice import Finding, Graph, find_faults, judge_plan, judge_rates, plan_placement
from pyg_direct.compiler.code_cache import _open_archive
from pyg_direct.compiler.jit import get_cpu_threads
from pyg_direct.errors import PygDirectError
from pyg_direct.loader.memory_placement import describe
from pyg_direct.ops.rows.gather_rows import gather_rows
from pyg_direct.profiling import show_bytes
from pyg_direct.progress import show_wait
from pyg_direct.runtime.cuda.device import abilities, call, free_bytes, load_driver
from pyg_direct.runtime.cuda.memory import choose_host_memory
from pyg_direct.runtime.cuda.peer_memory import p2pCliqueTopo, read_link
from pyg_direct.runtime.host.host_memory import available_bytes, count_cores, page_lock_limit, total_bytes

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


_STYLES = {"fix": "bold red", "hint": "yellow", "note": "dim"}


def examine(graph: Graph | None, free: int | None, *, measure: bool) -> dict[str, Any]:
    """Collect the facts about this machine, as JSON can hold them, with the faults found as `findings`.

    Args:
        graph: The size of a graph to place; None for none.
        free: Free bytes of GPU memory to place it in; None for the free bytes of this machine.
        measure: Whether the link to host memory is measured, if there is a GPU.
    """
    with show_wait("looking at this machine"):
        facts = collect_facts()
    facts |= {"measured": [], "host_memory": None, "plan": None}
    findings = find_faults(facts)
    if facts["gpus"]:
        findings += _look_at_link(facts, measure)
    if graph is not None:
        if free is None and facts["gpus"]:
            free = facts["gpus"][torch.cuda.current_device()]["free_bytes"]
        plan = plan_placement(graph, free, facts["host_memory"] or "unified")
        facts["plan"] = {**graph._asdict(), "free_gpu_bytes": free, "gpu_bytes": plan.gpu_bytes,
                         "host_bytes": plan.host_bytes, "parts": [part._asdict() for part in plan.parts],
                         "line": describe(plan.parts)}  # fmt: skip
        findings += judge_plan(plan, facts["memory"]["available_bytes"])
    findings.sort(key=lambda finding: list(_STYLES).index(finding.level))
    facts["findings"] = [finding._asdict() for finding in findings]
    return facts


def _look_at_link(facts: dict[str, Any], measure: bool) -> list[Finding]:
    """Measure the current GPU, and note which host memory `auto` takes for it."""
    index = torch.cuda.current_device()
    try:
        facts["host_memory"] = choose_host_memory(index)
        if not measure:
            return []
        with show_wait("measuring host memory"):
            rates = measure_host_memory(index)
    except (PygDirectError, RuntimeError) as error:
        return [Finding("fix", f"GPU {index} could not be measured: {error}", "see whether other programs can use it")]
    facts["measured"] = [rates]
    return list(judge_rates(rates, facts["host_memory"]))


def print_report(facts: dict[str, Any]) -> None:
    """Print tables, and advice."""
    findings = [Finding(**finding) for finding in facts["findings"]]
    console = Console(highlight=False)
    # Words of the system and paths, which may hold brackets, are no markup.
    for title, rows in _sections(facts).items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, min_width=60)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        if rows:
            console.print(table)
    table = Table(title="What to do", title_justify="left", title_style="bold", min_width=60)
    for name in ("", "found", "do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", *map(escape, (finding.what, finding.how)))
    if findings:
        console.print(table)
    num_fixes = sum(finding.level == "fix" for finding in findings)
    console.print("fine: nothing to fix" if num_fixes == 0 else f"to fix: {num_fixes}")


def _sections(facts: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """List the tables, a name and its text in each row."""
    cpu, memory, cuda, system = facts["cpu"], facts["memory"], facts["cuda"], facts["system"]
    limit = memory["page_lock_limit_bytes"]
    machine = [
        ("system", f"{system['system']} {system['machine']}, Python {system['python']}"),
        ("CPU", f"{cpu['cores']} cores, {cpu['kernel_threads']} threads for kernels, {cpu['torch_threads']} for torch"),
        ("memory", f"{show_bytes(memory['total_bytes'])}, {show_bytes(memory['available_bytes'])} free"),
        ("page-lock limit", "none" if limit is None else f"{show_bytes(limit)} (ulimit -l; CUDA's own does not count)"),
        ("NVIDIA driver", _join(cuda["driver"], cuda["driver_cuda"] and f"CUDA up to {cuda['driver_cuda']}")),
        ("GPU kernels", _join(cuda["ptx_in_wheel"] and "compiled in the wheel",
                              cuda["compiler"] and f"compiler {cuda['compiler']}")),
        ("compiled code", f"{facts['cache']['folder']}{'' if facts['cache']['writable'] else ' (cannot be written)'}"),
    ]  # fmt: skip
    machine += [(name, value or "(empty)") for name, value in facts["environment"].items()]
    versions = [("pyg_direct", facts["pyg_direct"])]
    versions += [(name, version or "missing") for name, version in facts["packages"].items()]
    extras = [(name, version or f"not installed; {OPTIONAL[name][1]}: extra {OPTIONAL[name][0]}")
              for name, version in facts["optional"].items()]  # fmt: skip
    sections = {"Machine": machine, "Versions": versions, "Optional": extras}
    sections |= {f"GPU {gpu['index']}": _describe_gpu(gpu) for gpu in facts["gpus"]}
    links = [(f"{link['reader']} reads {link['owner']}",
              "no" if not link["can_read"] else "over NVLink" if link["is_nvlink"] else "over PCIe")
             for link in facts["links"]]  # fmt: skip
    links += [("clique", ", ".join(map(str, clique))) for clique in facts["cliques"]]
    return sections | {"Between GPUs": links, "Measured": _describe_rates(facts), "auto": _describe_plan(facts["plan"])}


def _join(*words: Any) -> str:
    return ", ".join(word for word in words if word) or "none"


def _describe_gpu(gpu: dict[str, Any]) -> list[tuple[str, str]]:
    link = gpu["pcie"] or {}
    speed, width = link.get("current_link_speed"), link.get("current_link_width")
    best = _join(link.get("max_link_speed"), link.get("max_link_width") and f"{link['max_link_width']} lanes")
    return [
        ("name", f"{gpu['name']}, compute capability {'.'.join(map(str, gpu['compute_capability']))}"),
        ("memory", f"{show_bytes(gpu['total_bytes'])}, {show_bytes(gpu['free_bytes'])} free"),
        ("link", "unknown" if not link else f"{_join(speed, width and f'{width} lanes')}; at most {best}"),
        ("unified memory", "stays where it is" if gpu["unified_without_migration"] else "cannot be used"),
        ("ordinary memory", "read in place" if gpu["reads_ordinary_memory"] else "not read by the GPU"),
    ]  # fmt: skip


def _describe_rates(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [] if facts["host_memory"] is None else [("auto takes", f"{facts['host_memory']} memory on the host")]

    def rate(value: float | None) -> str:
        return "not measured" if value is None else f"{value / 1e9:.1f} GB/s"

    for rates in facts["measured"]:
        rows.append(("page-locked copy", rate(rates["copy"])))
        for kind in ("unified", "pinned"):
            rows.append((f"{kind} memory", f"{rate(rates[f'{kind}_random'])} at random, "
                         f"{rate(rates[f'{kind}_ascending'])} in ascending order"))  # fmt: skip
        rows.append(("how", f"rows of {rates['row_bytes']} B out of {show_bytes(rates['table_bytes'])}, read by GPU "
                     f"{rates['gpu']}; took {rates['seconds']} s"))  # fmt: skip
    return rows


def _describe_plan(plan: dict[str, Any] | None) -> list[tuple[str, str]]:
    if plan is None:
        return []
    free = plan["free_gpu_bytes"]
    return [
        ("graph", f"{plan['num_nodes']} nodes, {plan['num_edges']} edges, {plan['num_features']} features"),
        ("GPU", "none" if free is None else f"{show_bytes(free)} free, {show_bytes(plan['gpu_bytes'])} taken"),
        ("host", f"{show_bytes(plan['host_bytes'])} taken"),
        ("placement", plan["line"]),
    ]
