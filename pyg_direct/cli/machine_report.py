"""The report of `pyg-direct doctor`: facts, measured rates, the plan of `auto`, findings, and their tables.

`plan_placement` has the choices of `placement="auto"` for a graph known by its size alone.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import pyg_direct
from pyg_direct.cache_folder import cache_root
from pyg_direct.compiler.code_cache import _open_archive
from pyg_direct.compiler.jit import get_cpu_threads
from pyg_direct.compiler.nvrtc import PTX_VERSIONS
from pyg_direct.errors import PygDirectError
from pyg_direct.graph.placed_topology import SMALL_SHARE
from pyg_direct.loader.memory_placement import Placed, Rows, choose_places, describe
from pyg_direct.ops.rows.gather_rows import gather_rows
from pyg_direct.profiling import show_bytes
from pyg_direct.progress import show_wait
from pyg_direct.runtime.cuda.device import abilities, budget_of, call, free_bytes, load_driver
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


class Graph(NamedTuple):
    """The size of a graph: nodes, edges, and float32 features of a node."""

    num_nodes: int
    num_edges: int
    num_features: int = 0

    @property
    def offset_bytes(self) -> int:
        """Bytes of the row offsets."""
        return 8 * (self.num_nodes + 1)

    @property
    def edge_id_bytes(self) -> int:
        """Bytes of the edge ids."""
        return (4 if self.num_edges < 2**31 else 8) * self.num_edges

    @property
    def topology_bytes(self) -> int:
        """Bytes of offsets, neighbors and edge ids, as `CSRTopo` holds them for a list of edges."""
        return self.offset_bytes + (4 if self.num_nodes < 2**31 else 8) * self.num_edges + self.edge_id_bytes

    @property
    def attributes(self) -> list[Rows]:
        """Features `x`, if any, and labels `y`."""
        x = Rows("x", 4 * self.num_features * self.num_nodes, self.num_nodes, may_be_cached=True)
        y = Rows("y", 8 * self.num_nodes, self.num_nodes, may_be_cached=True)
        return [x, y] if self.num_features else [y]


class Plan(NamedTuple):
    """Places of a graph."""

    parts: list[Placed]
    gpu_bytes: int
    host_bytes: int


def plan_placement(graph: Graph, free_on_gpu: int | None, host: str = "unified") -> Plan:
    """Choose places for topology, features and labels, as loaders do by default.

    Args:
        free_on_gpu: Free GPU memory in bytes; None without a GPU.
    """
    if free_on_gpu is None:
        sizes = {"topology": graph.topology_bytes} | {rows.key: rows.num_bytes for rows in graph.attributes}
        return Plan([Placed(name, size, "cpu") for name, size in sizes.items()], 0, sum(sizes.values()))
    parts, on_gpu = [Placed("topology", graph.topology_bytes, "cuda")], graph.topology_bytes
    if graph.topology_bytes > budget_of(free_on_gpu):
        # Short arrays go to the GPU all the same.
        short = graph.offset_bytes, graph.edge_id_bytes
        on_gpu = sum(size for size in short if size <= SMALL_SHARE * free_on_gpu)
        parts = [Placed("topology", graph.topology_bytes, host)]
    on_host = graph.topology_bytes - on_gpu
    places = choose_places(graph.attributes, budget_of(free_on_gpu - on_gpu), is_auto=True, fill_cache=True)
    for rows in graph.attributes:
        place, hot_bytes = places[rows.key]
        if place == "cuda":
            parts.append(Placed(rows.key, rows.num_bytes, "cuda"))
            on_gpu += rows.num_bytes
        else:
            parts.append(Placed(rows.key, rows.num_bytes, host, min(1.0, hot_bytes / max(1, rows.num_bytes))))
            on_gpu += hot_bytes
            on_host += rows.num_bytes
    return Plan(parts, on_gpu, on_host)


# Reading from one kind of memory must be this much faster to be worth a word.
_MARGIN = 1.1


class Finding(NamedTuple):
    """Something to know. `level`: `fix` if something does not work, `hint` if it costs speed, `note` otherwise."""

    level: Literal["fix", "hint", "note"]
    what: str
    how: str


def find_faults(facts: dict[str, Any]) -> list[Finding]:
    """Everything to say about the facts of `collect_facts`."""
    return [*_check_packages(facts), *_check_cuda(facts), *_check_gpus(facts), *_check_host(facts)]


def _check_packages(facts: dict[str, Any]) -> Iterator[Finding]:
    for sentence in facts["outdated"]:
        yield Finding("fix", sentence, "pip install . in the clone of pyg_direct, which installs what it needs")
    if facts["packages"]["numba"] is None:
        yield Finding("fix", "numba is missing: nothing can be compiled for the CPU", "pip install numba")


def _check_cuda(facts: dict[str, Any]) -> Iterator[Finding]:
    cuda = facts["cuda"]
    if cuda["torch_hip"] is not None:
        yield Finding("fix", f"torch is built for ROCm {cuda['torch_hip']}; only NVIDIA GPUs are supported",
                      "give device='cpu' to loaders, or install a torch for CUDA or the CPU")  # fmt: skip
    elif not cuda["has_driver"]:
        yield Finding(
            "note",
            "there is no NVIDIA driver: batches are made on the CPU",
            "nothing, if there is no GPU; else install its driver, or start the container with its GPUs",
        )
    elif cuda["torch_cuda"] is None:
        yield Finding("fix", "there is an NVIDIA driver, but torch is built without CUDA",
                      "install a torch with CUDA: https://pytorch.org/get-started/locally")  # fmt: skip
    elif facts["environment"].get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Finding("note", "CUDA_VISIBLE_DEVICES hides all GPUs: batches are made on the CPU",
                      "unset it to use them")  # fmt: skip
    else:
        yield from _check_bindings(facts)


def _check_bindings(facts: dict[str, Any]) -> Iterator[Finding]:
    cuda = facts["cuda"]
    extra = "cu" + str(cuda["torch_cuda"]).partition(".")[0]
    if cuda["reason"] is not None:
        how = "see whether the driver works: nvidia-smi"
        if cuda["driver_cuda"] is not None and _is_older(cuda["driver_cuda"], cuda["torch_cuda"]):
            how = (f"torch is built for CUDA {cuda['torch_cuda']}, the driver runs up to {cuda['driver_cuda']}: update "
                   "the driver, or install a torch for an older CUDA")  # fmt: skip
        yield Finding("fix", f"torch cannot use the GPU: {cuda['reason']}", how)
    elif cuda["bindings_error"] is not None:
        yield Finding("fix", cuda["bindings_error"], f'pip install ".[{extra}]" in the clone of pyg_direct')
    has_compiler = cuda["compiler"] is not None and facts["optional"]["numba-cuda"] is not None
    if not cuda["ptx_in_wheel"] and not has_compiler:
        yield Finding("fix", "this installation carries no compiled GPU kernels, and there is nothing to compile with",
                      f'pip install ".[{extra.replace("cu", "compile")}]" in the clone of pyg_direct')  # fmt: skip


def _is_older(driver: str, torch: str) -> bool:
    """Check for a driver of an older CUDA; minor versions of one CUDA run each other's code."""
    return int(driver.partition(".")[0]) < int(torch.partition(".")[0])


def _check_gpus(facts: dict[str, Any]) -> Iterator[Finding]:
    for gpu in facts["gpus"]:
        name = f"GPU {gpu['index']} ({gpu['name']})"
        if tuple(gpu["compute_capability"]) < min(PTX_VERSIONS):
            least = "{}.{}".format(*min(PTX_VERSIONS))
            yield Finding("fix", f"{name} has compute capability {{}}.{{}}, and needs {least}".format(
                *gpu["compute_capability"]), "give device='cpu' to loaders")  # fmt: skip
        if not gpu["unified_without_migration"]:
            yield Finding("hint", f"{name} cannot share managed memory with the CPU (concurrentManagedAccess is 0, as "
                          "under Windows, WSL and on some virtual GPUs): what is on the host is read from page-locked "
                          "memory", "use Linux without a virtual GPU, or keep more in GPU memory")  # fmt: skip
        link = gpu["pcie"] or {}
        width, most = link.get("current_link_width"), link.get("max_link_width")
        if width and most and width.isdecimal() and most.isdecimal() and 0 < int(width) < int(most):
            yield Finding("hint", f"{name} uses {width} PCIe lanes of {most}: rows on the host come slower for it",
                          "seat the GPU in a slot with all lanes")  # fmt: skip
    pairs = [f"{link['reader']} and {link['owner']}" for link in facts["links"]
             if link["reader"] < link["owner"] and not link["can_read"]]  # fmt: skip
    if pairs:
        yield Finding("note", f"GPUs that do not read each other's memory: {', '.join(pairs)}",
                      "nothing: each keeps hot rows of its own")  # fmt: skip


def _check_host(facts: dict[str, Any]) -> Iterator[Finding]:
    cpu, cache = facts["cpu"], facts["cache"]
    threads = cpu["kernel_threads"]
    if threads is not None and threads < cpu["cores"]:
        yield Finding("hint", f"CPU kernels use {threads} of {cpu['cores']} cores",
                      "set NUMBA_NUM_THREADS, or unset it")  # fmt: skip
    if threads is not None and threads > cpu["cores"]:
        yield Finding("hint", f"CPU kernels use {threads} threads, but this process may use {cpu['cores']} cores only",
                      f"set NUMBA_NUM_THREADS={cpu['cores']}")  # fmt: skip
    # By itself torch takes one thread a core, not one for each of the two that a core shows as.
    if cpu["torch_threads"] < cpu["cores"] and "OMP_NUM_THREADS" in facts["environment"]:
        yield Finding("hint", f"torch uses {cpu['torch_threads']} of {cpu['cores']} cores",
                      "unset OMP_NUM_THREADS, or call torch.set_num_threads")  # fmt: skip
    if facts["environment"].get("NUMBA_ENABLE_CUDASIM") == "1":
        yield Finding("hint", "NUMBA_ENABLE_CUDASIM=1: GPU kernels run in a simulator, for tests", "unset it")
    if not cache["writable"]:
        yield Finding("fix", f"{cache['folder']} cannot be written: every process compiles anew",
                      "set PYG_DIRECT_CACHE to a folder that can")  # fmt: skip


def judge_rates(rates: dict[str, Any], chosen: str) -> Iterator[Finding]:
    """Compare the kind of host memory that `auto` takes with the other, by measured rates."""
    unified, pinned = rates["unified_random"] or 0.0, rates["pinned_random"] or 0.0
    other = "pinned" if chosen == "unified" else "unified"
    better = max(unified, 1.0) / max(pinned, 1.0) if other == "unified" else max(pinned, 1.0) / max(unified, 1.0)
    if min(unified, pinned) > 0 and better > _MARGIN:
        yield Finding("hint", f"{other} memory is read {better:.1f} times as fast as {chosen} memory, which "
                      "placement='auto' takes", f"give placement='{other}' to loaders; or measure anew after "
                      "`pyg-direct cache clear --only facts`, if the machine has changed")  # fmt: skip


def judge_plan(plan: Plan, available: int) -> Iterator[Finding]:
    """Check that a host with so many bytes of free memory holds a planned placement."""
    if plan.host_bytes > available:
        yield Finding("fix", f"the graph takes {show_bytes(plan.host_bytes)} of host memory, of which "
                      f"{show_bytes(available)} are free", "keep features in a file (Feature.from_file), store them as "
                      "bfloat16 (store_dtype), or partition the graph (pyg-direct partition)")  # fmt: skip
