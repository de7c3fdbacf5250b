"""GraphSAINT's samplers (Zeng et al., ICLR 2020), after PyG's classes of these names, on the device.

Each draws nodes for a batch, which has all edges among them. Norms count how often batches have each node and edge.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch_geometric.loader as pyg_loader
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError, warn_unused
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.kernels.batch_counters import WALK_START_DRAW
from pyg_direct.loader.arguments import ShuffledOptions
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.induced_loader import InducedLoader, load_saved, save_whole
from pyg_direct.loader.prefetch.batch_groups import Work
from pyg_direct.ops.argument_checks import check_count, check_flag
from pyg_direct.ops.sampling.draw_random import draw_below
from pyg_direct.ops.sampling.draw_walks import check_walk_length, walk
from pyg_direct.ops.sampling.find_induced import NeighborLists
from pyg_direct.progress import Bar
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampler.graph_reader import compress_edges, count_nodes, describe_other, read_topology
from pyg_direct.sampling.induced_plan import PendingInduced, PendingInducedGroup, list_neighbors
from pyg_direct.sampling.random_key import EpochKey, draw_seed, norm_key
from pyg_direct.typing import Device

# As in PyG: limit of norms, for edges that hardly any batch has, and replacement of a count of zero.
_MOST_NORM, _NO_COUNT = 1e4, 0.1


class GraphSAINTSampler(InducedLoader, pyg_loader.GraphSAINTSampler):  # type: ignore[misc]
    """Batches of subgraphs induced by drawn nodes, after PyG's class; one of its three subclasses draws them.

    A batch has its nodes ascending, its edges sorted by target, and `num_nodes`. With `sample_coverage` it also has
    PyG's `node_norm` and `edge_norm`. Of S counted batches, C_v have node v and C_e edge e. Node norms are S / (N C_v);
    norms of edges from v are C_v / C_e, at most 10,000. The constructor counts them once, in separate batches. With
    `ranks="auto"` and no seed, create the sampler after the process group, so that norms are equal in all processes.

    Args:
        data: A `Data` with `edge_index`.
        batch_size: Draws per batch, at least 1: nodes, edges or walks.
        num_steps: Batches per epoch, at least 1.
        sample_coverage: Average number of counted batches that have a node; 0 for no norms.
        save_dir: Folder that keeps the norms for later runs; None for none. Files are PyG's.
        log: Show a progress bar while norms are counted.
        device, placement, topology_placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven: See
            `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`; options of workers are absorbed.

    Attributes:
        node_norm, edge_norm: float32 `[N]` and `[E]` on the CPU, with `sample_coverage`.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value; a file of another graph.
    """

    _pyg_hooks = ("_sample_nodes", "_collate", "__getitem__")
    _makes_groups = True
    # Tensors for drawing, in addition to the rows.
    _drawing: Any = None
    _numbers: Any = None
    _norms: dict[str, Tensor] | None = None

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Data]: ...

    def __init__(self, data: Data, batch_size: int, num_steps: int = 1, sample_coverage: int = 0,
                 save_dir: str | None = None, log: bool = True, *, device: Device = None, placement: str = "auto",
                 topology_placement: str | None = None, feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", **kwargs: Unpack[ShuffledOptions]
                 ) -> None:  # fmt: skip
        self.N, self.E = self._check_data(data)
        self._batch_size, self.num_steps = check_count("batch_size", batch_size), check_count("num_steps", num_steps)
        self.sample_coverage = check_count("sample_coverage", sample_coverage, 0)
        self.save_dir, self.log = save_dir, check_flag("log", log)
        options: dict[str, Any] = {**kwargs}
        unused = {name: options.pop(name) for name in ("shuffle", "drop_last") if options.get(name)}
        warn_unused(unused, "each batch is drawn for itself")
        self._open_induced(data, self.num_steps, 1, device, placement, topology_placement, feature_cache, store_dtype,
                           seed, prefetch, ranks, uneven, options)  # fmt: skip
        if self.sample_coverage > 0:
            self.node_norm, self.edge_norm = self._find_norms()
            self._norms = {"node_norm": self.node_norm, "edge_norm": self.edge_norm}

    _item = ("step", None)

    def _list_parts(self) -> Iterator[str]:
        for part in super()._list_parts():
            # A batch of torch's loader is one step.
            yield f"batch_size={self._batch_size}" if part == "batch_size=1" else part

    def _check_data(self, data: Any) -> tuple[int, int]:
        """Check a graph, and return the numbers of nodes and edges."""
        if not isinstance(data, Data):
            raise ArgumentTypeError(f"data must be a Data, got {describe_other(data)}")
        if "adj_t" in data:
            raise NotImplementedError("data with adj_t: give edge_index alone")
        if not isinstance(data.edge_index, Tensor):
            raise ArgumentTypeError(f"data.edge_index must be a tensor, got {type(data.edge_index).__name__}")
        for name in ("node_norm", "edge_norm"):
            if name in data:
                raise ArgumentError(f"data must have no {name}, which batches are given: delete or rename it")
        num_nodes, num_edges = count_nodes(data), int(data.edge_index.shape[-1])
        if num_nodes == 0 or num_edges == 0:
            raise ArgumentError(f"data must have nodes and edges to draw from, got {num_nodes} and {num_edges}")
        return num_nodes, num_edges

    def _open_topology(self) -> CSRTopo:
        topology = read_topology(self.data, self.device)
        if (topology.node_count, topology.edge_count) != (self.N, self.E):
            raise ArgumentError(f"data must have the {self.N} nodes and {self.E} edges that it had when the sampler "
                                f"was made, got {topology.node_count} and {topology.edge_count}: make a new one"
                                )  # fmt: skip
        return topology

    def _prepare(self) -> Any:
        before = self._plan
        rows = super()._prepare()
        if self._plan is not before or self._drawing is None:
            # Numbers of the draws of a batch.
            self._numbers = torch.arange(self._batch_size, device=self.device)
            self._drawing = self._open_drawing()
        return rows

    def _show(self) -> Data:
        shown = copy.copy(self.data)
        shown.num_nodes = self.N
        for name, norm in (self._norms or {}).items():
            shown[name] = norm
        return shown

    @property
    def _lists(self) -> NeighborLists:
        """The rows: sources of each node's in-edges."""
        assert self._plan is not None
        return self._plan.lists

    def _open_drawing(self) -> Any:
        """Create the tensors for drawing, in addition to the rows, on the device."""
        return ()

    def _draw(self, items: Tensor, key: int) -> Tensor:
        """Draw a batch: edges or nodes, with possible duplicates, int64 `[D]`.

        Args:
            items: Numbers of its draws, int64 `[batch_size]`, on the device.
        """
        raise NotImplementedError("GraphSAINTSampler draws nothing: make one of the classes derived from it")

    def _find_nodes(self, draws: Tensor) -> Tensor:
        """Find the nodes of the draws of one batch or several, int64 `[..., D]`: int64 or int32 `[..., K]`."""
        return draws

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> PendingInduced:
        return self._start(key.of_batch(number))

    def _submit_group(self, key: EpochKey, work: Sequence[Work]) -> PendingInducedGroup:
        assert self._plan is not None
        draws = torch.stack([self._draw(self._numbers, key.of_batch(number)) for number, _ in work])
        return self._plan.submit_draws(self._find_nodes(draws))

    def _start(self, key: int) -> PendingInduced:
        """Start to make the subgraph of a key."""
        assert self._plan is not None
        # torch's idle threads spin for a while, in parallel with our loops.
        with one_thread(self.device.type == "cpu"):
            nodes = self._find_nodes(self._draw(self._numbers, key))
        return self._plan.submit(nodes, is_set=False)

    def _find_norms(self) -> tuple[Tensor, Tensor]:
        """Read the norms of nodes and edges from their file, or compute them."""
        path, seed = Path(self.save_dir or "", self._filename), self.seed
        if seed is None and self._ranks.ranks is not None:
            # For equal norms in all processes: the call is collective, so it is made with or without a file.
            seed = self._agree_on(draw_seed())
        if self.save_dir is None or not path.exists():
            norms = self._compute_norm(seed)
            if self.save_dir is not None:
                save_whole(norms, path)
            return norms
        found = load_saved("save_dir", "file of norms that a sampler has saved", path)
        sizes = [getattr(part, "shape", None) for part in found] if isinstance(found, (tuple, list)) else found
        if sizes != [(self.N,), (self.E,)]:
            raise ArgumentError(f"save_dir must keep norms of the {self.N} nodes and {self.E} edges of data, got "
                                f"{sizes} in {str(path)!r}: delete it, or give another folder")  # fmt: skip
        return found[0], found[1]

    def _compute_norm(self, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Count nodes and edges in batches; see the class.

        Args:
            seed: Seed of these batches; None is the sampler's own, otherwise a drawn seed.
        """
        self._prepare()
        if seed is None:
            seed = draw_seed() if self.seed is None else self.seed
        node_count = torch.zeros(self.N, device=self.device)
        edge_count = torch.zeros(self.E, device=self.device)
        wanted, num_found, num_samples = self.N * self.sample_coverage, 0, 0
        with Bar(wanted, "GraphSAINT: counting for norms", "node", is_shown=self.log) as bar:
            while num_found < wanted:
                for number in range(num_samples, num_samples + self.num_steps):
                    sample = self._start(norm_key(seed, number)).finish()
                    # A batch has no duplicates.
                    node_count[sample.n_id] += 1
                    edge_count[sample.e_id] += 1
                    num_found += sample.n_id.numel()
                    bar.update(sample.n_id.numel())
                num_samples += self.num_steps
        node_count, edge_count = node_count.cpu(), edge_count.cpu()
        edge_norm = (node_count[self.data.edge_index[0].cpu().long()] / edge_count).clamp_(0, _MOST_NORM)
        edge_norm[edge_norm.isnan()] = _NO_COUNT
        node_count[node_count == 0] = _NO_COUNT
        return num_samples / node_count / self.N, edge_norm

    def __getitem__(self, idx: Any) -> Any:
        """Raise `NotImplementedError`; PyG's returns the nodes of a batch and their `SparseTensor`, drawn again at each
        call.

        Args:
            idx: Number of the batch, without effect in PyG.
        """
        raise NotImplementedError("batches by number: go over the sampler, which draws them")

    def _collate(self, data_list: Any) -> Any:
        raise NotImplementedError("batches of what PyG's `__getitem__` gives: go over the sampler, which draws them")

    def _collate_items(self, index: Any) -> Any:
        raise NotImplementedError("batches by number: go over the sampler, which draws them")


class GraphSAINTNodeSampler(GraphSAINTSampler, pyg_loader.GraphSAINTNodeSampler):  # type: ignore[misc]
    """Sampler of the sources of `batch_size` random edges: nodes with probabilities proportional to their out-degree.

    Args:
        data, batch_size, num_steps, sample_coverage, save_dir, log: See `GraphSAINTSampler`.
        **kwargs: Further arguments of `GraphSAINTSampler`.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = GraphSAINTNodeSampler(ring, batch_size=2, num_steps=3, seed=0, device="cpu")
        >>> [batch.num_nodes for batch in loader]  # two nodes are drawn by degree, and may be equal
        [1, 2, 1]
    """

    def _draw(self, items: Tensor, key: int) -> Tensor:
        return draw_below(items, self.E, key=key)

    def _find_nodes(self, draws: Tensor) -> Tensor:
        return _find_sources(self._lists, draws)


class GraphSAINTEdgeSampler(GraphSAINTSampler, pyg_loader.GraphSAINTEdgeSampler):  # type: ignore[misc]
    """Sampler of both ends of `batch_size` edges, drawn with replacement.

    As in PyG, the probability of an edge is proportional to the in-degree of its source plus the out-degree of its
    target. The paper has the sum of their inverses instead.

    Args:
        data, batch_size, num_steps, sample_coverage, save_dir, log: See `GraphSAINTSampler`.
        **kwargs: Further arguments of `GraphSAINTSampler`.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = GraphSAINTEdgeSampler(ring, batch_size=2, num_steps=3, seed=0, device="cpu")
        >>> [(batch.num_nodes, batch.num_edges) for batch in loader]
        [(2, 1), (3, 2), (2, 1)]
    """

    def _open_drawing(self) -> tuple[Tensor, int]:
        """Create (running sums of the weights of edges in the order of the rows, int64 `[E]`; their sum)."""
        lists = self._lists
        sources = lists.neighbors[:: lists.step]
        entering = lists.indptr.diff()
        leaving = torch.bincount(sources, minlength=self.N)
        weights = leaving.repeat_interleave(entering, output_size=self.E)
        weights += entering[sources.long()]
        ends = weights.cumsum_(0)
        total = int(ends[-1])
        # If all weights are 0, all edges are equally likely, as in PyG.
        return (ends, total) if total > 0 else (torch.arange(1, self.E + 1, device=self.device), self.E)

    def _draw(self, items: Tensor, key: int) -> Tensor:
        return draw_below(items, self._drawing[1], key=key)

    def _find_nodes(self, draws: Tensor) -> Tensor:
        lists, edges = self._lists, torch.searchsorted(self._drawing[0], draws, right=True)
        sources = _find_sources(lists, edges)
        is_short = sources.dtype == torch.int32
        targets = torch.searchsorted(lists.indptr, edges, right=True, out_int32=is_short).sub_(1)
        return torch.cat([targets, sources], -1)


class GraphSAINTRandomWalkSampler(GraphSAINTSampler, pyg_loader.GraphSAINTRandomWalkSampler):  # type: ignore[misc]
    """Sampler of all nodes of `batch_size` random walks along edges, each from a random node.

    Args:
        data: See `GraphSAINTSampler`.
        batch_size: Walks per batch.
        walk_length: Steps of a walk, at least 0; at a node without out-edges a walk stays.
        num_steps, sample_coverage, save_dir, log: See `GraphSAINTSampler`.
        device, placement, topology_placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven: See
            `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = GraphSAINTRandomWalkSampler(ring, batch_size=1, walk_length=2, num_steps=2, seed=0, device="cpu")
        >>> [batch.edge_index.tolist() for batch in loader]  # the nodes of a walk of two steps
        [[[0, 1], [1, 2]], [[0, 1], [1, 2]]]
    """

    def __init__(self, data: Data, batch_size: int, walk_length: int, num_steps: int = 1, sample_coverage: int = 0,
                 save_dir: str | None = None, log: bool = True, *, device: Device = None, placement: str = "auto",
                 topology_placement: str | None = None, feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", **kwargs: Unpack[ShuffledOptions]
                 ) -> None:  # fmt: skip
        self.walk_length = check_walk_length(walk_length)
        super().__init__(data, batch_size, num_steps, sample_coverage, save_dir, log, device=device,
                         placement=placement, topology_placement=topology_placement, feature_cache=feature_cache,
                         store_dtype=store_dtype, seed=seed, prefetch=prefetch, ranks=ranks, uneven=uneven,
                         **kwargs)  # fmt: skip

    def _open_drawing(self) -> tuple[NeighborLists, PlacedTopology]:
        """Create the rows of targets of each node's out-edges, and the owner of their memory."""
        forward = compress_edges(self.data.edge_index, self.N, self.device, "out")
        placed = forward.place(self.topology_placement, self.device)
        return list_neighbors(placed), placed

    def _draw(self, items: Tensor, key: int) -> Tensor:
        start = draw_below(items, self.N, key=key, slot=WALK_START_DRAW)
        lists, _ = self._drawing
        return walk(lists, start, self.walk_length, key=key).view(-1)


def _find_sources(lists: NeighborLists, edges: Tensor) -> Tensor:
    """Find the sources of edges by their places in the rows, of any shape."""
    places = edges.view(-1) if lists.step == 1 else edges.view(-1) * lists.step
    return lists.neighbors.index_select(0, places).view(edges.shape)
