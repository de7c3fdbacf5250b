"""Samplers of other projects, each called through its own public API on one set of compressed rows.

A peer that is not installed is left out. Two frontiers exist, and only samplers of one of them are compared. PyG's
`NeighborLoader` expands the nodes new in the last hop; PyG's old `NeighborSampler` expands all nodes so far.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Seeds, int64 `[B]` on the CPU, to the number of edges sampled around them.
Sampler = Callable[[Tensor], int]
# Quiver and WholeGraph read the memory they were given for as long as the process lives.
_KEPT: list[Any] = []


class Rows(NamedTuple):
    """A graph as peers take it, on the CPU: int64 `indptr` `[N + 1]`, `indices` and `edge_ids` `[E]`."""

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor


class Peer(NamedTuple):
    """A project that samples neighbors.

    Attributes:
        title: As its row is named, with the version.
        modules: Modules that must be installed; `modules[0]` is imported.
        placements: Kinds of memory that can hold a topology, in our words.
        expand_all: Whether a hop expands all nodes so far.
    """

    title: str
    modules: tuple[str, ...]
    distribution: str
    placements: tuple[str, ...]
    expand_all: bool
    open: Callable[[Rows, str, tuple[int, ...]], Sampler]
    note: str = "with e_id"

    @property
    def is_installed(self) -> bool:
        """True if all its modules are found."""
        return all(find_spec(module) is not None for module in self.modules)

    @property
    def name(self) -> str:
        """Title and version."""
        return f"{self.title} {metadata.version(self.distribution)}"


def open_peers(
    rows: Rows, placement: str, fanouts: tuple[int, ...], *, expand_all: bool
) -> Iterator[tuple[Peer, Sampler]]:
    """Open the installed peers of one frontier that can keep a topology there, each with its sampler."""
    for peer in PEERS:
        if peer.is_installed and placement in peer.placements and peer.expand_all == expand_all:
            try:
                yield peer, peer.open(rows, placement, fanouts)
            except (ImportError, OSError) as error:
                warnings.warn(f"{peer.name} is installed and cannot be used: {error}", stacklevel=2)


def _open_glt(rows: Rows, placement: str, fanouts: tuple[int, ...], *, with_edge: bool = True) -> Sampler:
    if os.environ.get("TORCH_CPP_LOG_LEVEL") != "ERROR":
        # GLT sets it when it is imported, which is too late for a torch that is loaded already.
        warnings.warn("GLT is slowed down by torch's warnings; start with TORCH_CPP_LOG_LEVEL=ERROR", stacklevel=2)
    glt = import_module("graphlearn_torch")
    topology = glt.data.Topology((rows.indptr.clone(), rows.indices.clone()), rows.edge_ids.clone(), input_layout="CSR")
    graph = glt.data.Graph(topology, {"cuda": "CUDA", "unified": "ZERO_COPY"}[placement], 0)
    make = functools.partial(glt.sampler.NeighborSampler, graph, list(fanouts), torch.device("cuda:0"), with_edge)
    # It sizes its hash table by its first batch.
    of_size = functools.cache(lambda num_seeds: make())

    def sample(seeds: Tensor) -> int:
        inputs = glt.sampler.NodeSamplerInput(node=seeds)
        return int(of_size(seeds.numel()).sample_from_nodes(inputs).row.numel())

    return sample


def _open_pyg_lib(rows: Rows, placement: str, fanouts: tuple[int, ...]) -> Sampler:
    neighbor_sample = import_module("pyg_lib").sampler.neighbor_sample

    def sample(seeds: Tensor) -> int:
        out = neighbor_sample(rows.indptr, rows.indices, seeds, list(fanouts), csc=True)
        # As PyG's loader does for edges that were not sorted.
        return int(rows.edge_ids[out[3]].numel())

    return sample


def _open_torch_sparse(rows: Rows, placement: str, fanouts: tuple[int, ...]) -> Sampler:
    import_module("torch_sparse")

    def sample(seeds: Tensor) -> int:
        out = torch.ops.torch_sparse.neighbor_sample(rows.indptr, rows.indices, seeds, list(fanouts), False, True)
        return int(rows.edge_ids[out[3]].numel())

    return sample


def _open_quiver(rows: Rows, placement: str, fanouts: tuple[int, ...]) -> Sampler:
    quiver = import_module("quiver")
    topology = quiver.CSRTopo(indptr=rows.indptr, indices=rows.indices.clone())
    _KEPT.append(topology)
    sampler = quiver.pyg.GraphSageSampler(topology, list(fanouts), 0, {"cuda": "GPU", "unified": "UVA"}[placement])

    def sample(seeds: Tensor) -> int:
        return sum(int(adj.edge_index.shape[1]) for adj in sampler.sample(seeds)[2])

    return sample


@functools.cache
def whole_graph_communicator() -> Any:
    """WholeGraph's communicator of this one process."""
    threads = torch.get_num_threads()
    found = import_module("pylibwholegraph.torch").init_torch_env_and_create_wm_comm(0, 1, 0, 1, wm_log_level="error")
    torch.set_num_threads(threads)
    return found[0]


def whole_graph_tensor(array: Tensor, placement: str) -> Any:
    """Make a copy of a tensor `[N]` or `[N, F]` in WholeGraph's memory, on the GPU or page-locked."""
    on_gpu = placement == "cuda"
    tensor = import_module("pylibwholegraph.torch").create_wholememory_tensor(
        whole_graph_communicator(), "continuous", "cuda" if on_gpu else "cpu", list(array.shape), array.dtype, None
    )
    tensor.get_local_tensor(host_view=not on_gpu)[0].copy_(array)
    _KEPT.append(tensor)
    return tensor


def _open_whole_graph(rows: Rows, placement: str, fanouts: tuple[int, ...]) -> Sampler:
    graph = import_module("pylibwholegraph.torch").GraphStructure()
    graph.set_csr_graph(whole_graph_tensor(rows.indptr, placement), whole_graph_tensor(rows.indices, placement))

    def sample(seeds: Tensor) -> int:
        edges = graph.multilayer_sample_without_replacement(seeds.cuda(), list(fanouts))[1]
        return sum(int(hop.shape[1]) for hop in edges)

    return sample


_ON_GPU = ("cuda", "unified")
PEERS = (
    Peer("GLT", ("graphlearn_torch",), "graphlearn-torch", _ON_GPU, False, _open_glt),
    # It reads the ids of edges from the memory of the graph, which costs it most of the time there.
    Peer("GLT without e_id", ("graphlearn_torch",), "graphlearn-torch", ("unified",), False,
         functools.partial(_open_glt, with_edge=False), "without e_id"),
    Peer("pyg-lib", ("pyg_lib",), "pyg-lib", ("cpu",), False, _open_pyg_lib, "with e_id, one thread"),
    Peer("torch-sparse", ("torch_sparse",), "torch-sparse", ("cpu",), False, _open_torch_sparse,
         "with e_id, one thread"),
    Peer("Quiver", ("quiver", "torch_quiver"), "torch-quiver", _ON_GPU, True, _open_quiver, "without e_id"),
    Peer("WholeGraph", ("pylibwholegraph",), "pylibwholegraph-cu13", _ON_GPU, True, _open_whole_graph,
         "without e_id"),
)  # fmt: skip
