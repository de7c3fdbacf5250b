"""Choices of `placement="auto"` for a graph known by its size alone, and faults of a machine, each with advice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pyg_direct.compiler.nvrtc import PTX_VERSIONS
from pyg_direct.graph.placed_topology import SMALL_SHARE
from pyg_direct.loader.memory_placement import Placed, Rows, choose_places
from pyg_direct.profiling import show_bytes
from pyg_direct.runtime.cuda.device import budget_of


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
        host: The kind of host memory that the GPU reads faster.
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
    """Something to know.

    Attributes:
        level: `fix` if something does not work, `hint` if it costs speed, `note` otherwise.
    """

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
