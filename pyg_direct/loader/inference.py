"""Layer-wise inference: each layer of a model over all nodes and all their neighbors, then the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError, MemoryLimitError
from pyg_direct.graph.placed_topology import place_array
from pyg_direct.graph.pyg_edges import find_edges
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.loader.option_types import InferenceLoaderOptions, InferOptions
from pyg_direct.loader.receptive_field import Graph, Reach, edges_of, find_reach, gives_each_row
from pyg_direct.ops.rows.gather_rows import DEFAULT_BLOCKS, blocks_for_rows, gather_rows
from pyg_direct.progress import Bar, show_wait
from pyg_direct.runtime.cuda.device import budget_of, free_bytes
from pyg_direct.runtime.cuda.memory import Block, allocate_or_fall_back
from pyg_direct.sampler.graph_reader import describe_other

# Average edges and most nodes per batch: enough to fill a GPU, few enough for the memory of their messages.
_BATCH_EDGES = {"cuda": 1 << 21, "cpu": 1 << 17}
_MOST_NODES = 1 << 16


class _Bare(Data):  # type: ignore[misc]
    """Edges with features that batches do not have, as they are no attribute."""

    @property
    def x(self) -> Tensor | None:
        """Features of all nodes."""
        return self.__dict__.get("_rows")

    @x.setter
    def x(self, rows: Tensor | None) -> None:
        self.__dict__["_rows"] = rows

    def __copy__(self) -> Data:
        made = Data()
        made._store._mapping.update(self._store._mapping)
        return made


def inference_loader(
    data: Data, batch_size: int | None = None, **options: Unpack[InferenceLoaderOptions]
) -> NeighborLoader:
    """Make a loader of batches of all nodes in order, each with all its neighbors, without attributes: `n_id` and
    edges.

    `infer` and PyG's `model.inference` iterate over it for every layer. `batch.edge_index` leads to the first
    `batch.batch_size` nodes; `x_all[batch.n_id]` are the rows that they need. Layers may depend on neighbors only: the
    other nodes of a batch lack edges, and so degrees. `infer` corrects this, PyG's own method does not.

    Args:
        data: A `Data` with `edge_index` or `adj_t`; of its attributes `loader.data` has only `x`, and batches none.
        batch_size: Nodes per batch; None takes as many as have about two million edges on a GPU.
        **options: Arguments of `NeighborLoader`.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = inference_loader(ring, batch_size=2, device="cpu")
        >>> [batch.n_id.tolist() for batch in loader]  # two nodes each, with all their neighbors
        [[0, 1, 3], [2, 3, 1]]
    """
    if not isinstance(data, Data):
        raise ArgumentTypeError(f"data must be a Data, got {describe_other(data)}")
    given: Mapping[str, Any] = options
    for name in ("num_neighbors", "input_nodes", "shuffle"):
        if name in given:
            raise ArgumentError(f"{name} is settled by layer-wise inference, got {given[name]!r}")
    for name in ("store_dtype", "feature_cache", "cache_policy", "cold_policy", "hotness", "presample", "ahead"):
        if name in given:
            raise ArgumentError(f"{name} is one of attributes, which batches of layer-wise inference have none of, got "
                                f"{given[name]!r}")  # fmt: skip
    bare = _Bare(num_nodes=data.num_nodes)
    bare.__dict__["_rows"] = data.x
    bare["edge_index" if data.get("adj_t") is None else "adj_t"] = find_edges(data)
    loader = NeighborLoader(bare, [-1], batch_size=1 if batch_size is None else batch_size, **options)
    if batch_size is None:
        mean = max(1.0, data.num_edges / max(1, int(data.num_nodes)))
        count = min(_MOST_NODES, max(256, int(_BATCH_EDGES[loader.device.type] / mean)))
        loader = NeighborLoader(bare, [-1], batch_size=count, **options)
    return loader


@torch.no_grad()
def infer(model: torch.nn.Module, data: Data | NeighborLoader, *, x: Tensor | None = None,
          batch_size: int | None = None, placement: str = "auto", progress_bar: bool = False,
          **options: Unpack[InferOptions]) -> Tensor:  # fmt: skip
    """Compute the output of a PyG model (`GraphSAGE`, `GCN`, ... with `jk=None` or `"last"`) for all nodes, layer by
    layer.

    The result equals `model(x, edge_index)` on the whole graph, for any batches. GCNConv gets degrees of the whole
    graph; PyG's `model.inference(loader)` counts degrees in a batch. A layer that depends on more than a node's
    neighbors (several hops, other degrees, `cached=True`) is computed for all nodes at once. So is a step after a
    convolution that mixes nodes, such as GraphNorm. Unknown layers are tested on a few nodes.

    Rows of a layer stay in GPU memory if they fit. Otherwise they lie in unified host memory, which the GPU reads and
    writes in place. The rows of a batch are then read during the previous batch. So neither rows nor graph must fit the
    GPU, unless a layer is computed for all nodes at once.

    Args:
        model: A model of PyG's `BasicGNN`, in evaluation mode, on the device of batches.
        data: A `Data` with `x`, or a loader over all nodes in order with `num_neighbors=[-1]`.
        x: Features of the nodes, floats `[N, F]`, instead of the features in `data`.
        batch_size: Nodes per batch; see `inference_loader`.
        placement: Memory of rows between layers: `auto`, `cuda`, `unified`, `pinned` or `cpu`.
        progress_bar: Show a progress bar.
        **options: Arguments of `NeighborLoader`, such as `device` and `topology_placement`.

    Returns:
        Float `[N, C]` on the GPU, or on the CPU if it does not fit the GPU.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
        MemoryLimitError: a layer that needs all nodes at once does not fit.

    Example:
        >>> from torch_geometric.nn import GraphSAGE
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> model = GraphSAGE(4, 8, num_layers=2, out_channels=3).eval()
        >>> out = infer(model, ring, device="cpu")
        >>> torch.allclose(out, model(ring.x, ring.edge_index), atol=1e-5)
        True
    """
    if not hasattr(model, "inference_per_layer"):
        raise ArgumentTypeError(f"model must be a BasicGNN of PyG, got {type(model).__name__}: for one with an "
                                "inference(loader) of its own, call model.inference(inference_loader(data))"
                                )  # fmt: skip
    if model.training:
        raise ArgumentError("model must be in evaluation mode; call model.eval() first")
    if model.jk_mode not in (None, "last"):
        raise ArgumentError(f"model must have jk=None or 'last', got {model.jk_mode!r}")
    if isinstance(data, NeighborLoader):
        if options:
            raise ArgumentError(f"{', '.join(options)} belong to the loader, where data is one: make it with them")
        loader = data
        check_inference_loader(loader)
        x = loader.data.x if x is None else x
        loader = inference_loader(loader.data, loader.batch_size if batch_size is None else batch_size,
                                  device=loader.device, topology_placement=loader.topology_placement,
                                  topology_cache=loader.topology_cache, prefetch=loader.prefetch, seed=0)  # fmt: skip
    else:
        # All neighbors in order: the program's random numbers do not move on for a seed.
        loader = inference_loader(data, batch_size, **{"seed": 0, **options})  # type: ignore[arg-type]
        x = data.x if x is None else x
    if not isinstance(x, Tensor) or len(x) != loader.data.num_nodes:
        raise ArgumentError(f"x must have a row for each of the {loader.data.num_nodes} nodes, got "
                            f"{type(x).__name__ if not isinstance(x, Tensor) else tuple(x.shape)}")  # fmt: skip
    rows, num_layers = _Rows.of(x, placement, loader.device), int(model.num_layers)  # type: ignore[arg-type]
    with Bar(num_layers * len(loader), "inference", "batches", is_shown=progress_bar) as bar:
        graph = Graph(loader.data, loader.device)
        for layer in range(num_layers):
            rows = _run_layer(model, layer, rows, loader, graph, placement, bar)
    return rows.as_result()


def check_inference_loader(loader: NeighborLoader) -> None:
    """Check that a loader iterates over all nodes in order, with all neighbors of one hop, and its own batches."""
    fanouts = loader.num_neighbors if loader._recipe is not None else loader.node_sampler.num_neighbors.values
    if list(fanouts) != [-1]:
        raise ArgumentError(f"data must be a loader with num_neighbors=[-1], got {fanouts}")
    nodes = loader.input_data.node
    if nodes.numel() != loader.data.num_nodes or bool((nodes.cpu() != torch.arange(nodes.numel(), device="cpu")).any()):
        raise ArgumentError("data must be a loader over all nodes in order; leave out input_nodes")
    if not isinstance(loader.sampler, torch.utils.data.SequentialSampler):
        raise ArgumentError("data must be a loader with shuffle=False")
    if not loader._is_own():
        raise ArgumentError("data must be a loader without a sampler, filter_fn or transform_sampler_output of the "
                            "program's, as no batch would pass them; give its Data, or call model.inference(loader)"
                            )  # fmt: skip


class _Rows:
    """Rows of all nodes in memory that the device reads and writes, or the CPU for a GPU that cannot.

    Args:
        block: Memory of the rows, if it is on the host.
    """

    def __init__(self, view: Tensor, block: Block | None) -> None:
        self.view, self._block = view, block

    @classmethod
    def of(cls, x: Tensor, placement: str, device: torch.device) -> _Rows:
        """Place features; features that do not fit the GPU move to unified memory, so that they are not held twice."""
        if x.device == device:
            return cls(x.contiguous(), None)
        where = _choose_place(x.numel() * x.element_size(), placement, device)
        view, _, block = place_array(x.contiguous(), where, device, "x")
        return cls(view, block)

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, placement: str, device: torch.device) -> _Rows:
        """Allocate rows to write."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        where = _choose_place(num_bytes, placement, device)
        if where in ("cuda", "cpu"):
            return cls(torch.empty(shape, dtype=dtype, device=device), None)
        block = allocate_or_fall_back(num_bytes, where, device)
        if block.placement == "cpu":
            return cls(block.view_on_cpu(dtype, shape), block)
        if block.placement == "unified" and num_bytes > 0:
            # The first touch by a GPU takes several times as long as by all cores.
            with show_wait("making room for rows", items=num_bytes // 64):
                block.view_on_cpu(torch.uint8, (num_bytes,)).zero_()
        return cls(block.view_on_gpu(dtype, shape, device), block)

    def read_all(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
        """Iterate over batches with the rows of their nodes.

        Rows on the host are read over the link while the current stream computes the previous batch.
        """
        if self._block is None or not self.view.is_cuda:
            for batch in batches:
                yield batch, self.read(batch.n_id)
            return
        reading = torch.cuda.Stream(self.view.device)
        most_blocks = self._count_blocks()
        before: tuple[Any, Tensor, torch.cuda.Event] | None = None
        for batch in batches:
            computing = torch.cuda.current_stream(self.view.device)
            # After the work queued so far, which does not include the previous batch yet.
            reading.wait_stream(computing)
            with torch.cuda.stream(reading):
                x = self.read(batch.n_id, most_blocks)
                done = reading.record_event()
            batch.n_id.record_stream(reading)
            x.record_stream(computing)
            if before is not None:
                yield self._hand_over(*before)
            before = batch, x, done
        if before is not None:
            yield self._hand_over(*before)

    def _hand_over(self, batch: Any, x: Tensor, done: torch.cuda.Event) -> tuple[Any, Tensor]:
        torch.cuda.current_stream(self.view.device).wait_event(done)
        return batch, x

    def _count_blocks(self) -> int | None:
        """Count the blocks that keep the link busy, in parallel with computation."""
        if self.view.numel() == 0:
            return None
        row_bytes = self.view[0].numel() * self.view.element_size()
        return blocks_for_rows(DEFAULT_BLOCKS, row_bytes, row_bytes)

    def read(self, ids: Tensor, most_blocks: int | None = None) -> Tensor:
        """Read rows of these ids, to the device of the ids."""
        if not self.view.is_cuda:
            return self.view.index_select(0, ids.to(self.view.device)).to(ids.device)
        return gather_rows(self.view, ids, max_blocks=most_blocks)

    def write(self, begin: int, rows: Tensor) -> None:
        """Write consecutive rows from `begin` on."""
        part = self.view[begin : begin + len(rows)]
        if self._block is None or not part.is_cuda:
            part.copy_(rows)
        else:
            # A kernel writes over the link at its rate; a copy to unified memory does not.
            torch.add(rows, 0, out=part)

    def as_result(self) -> Tensor:
        """Return the rows as a tensor on the device, or on the CPU if they lie on the host."""
        if self._block is None or not self.view.is_cuda:
            return self.view
        torch.cuda.current_stream(self.view.device).synchronize()
        return self._block.view_on_cpu(self.view.dtype, self.view.shape)


def _choose_place(num_bytes: int, placement: str, device: torch.device) -> str:
    if placement != "auto":
        return placement
    if device.type == "cpu":
        return "cpu"
    # The previous layer's rows are there too, and a batch's messages.
    return "cuda" if num_bytes <= budget_of(free_bytes(device.index)) // 2 else "unified"


def _run_layer(model: Any, layer: int, rows: _Rows, loader: NeighborLoader, graph: Graph, placement: str, bar: Bar
               ) -> _Rows:  # fmt: skip
    def run(batch: Any, x: Tensor) -> Tensor:
        return model.inference_per_layer(layer, x, edges_of(batch), batch.batch_size)  # type: ignore[no-any-return]

    # A batch of all nodes has the whole graph.
    reach = Reach(run) if len(loader) <= 1 else find_reach(model, layer, graph, rows.read)
    if reach.convolve is None:
        made = _run_on_all(model, layer, rows, graph, placement)
        bar.update(len(loader))
        return made
    found: _Rows | None = None
    begin, is_by_row = 0, reach.is_by_row
    for batch, x in rows.read_all(loader):
        out = reach.convolve(batch, x)
        if reach.finish is not None:
            is_by_row = is_by_row or (found is None and gives_each_row(reach.finish, out))
            out = reach.finish(out) if is_by_row else out
        if found is None:
            shape = (int(loader.data.num_nodes), *out.shape[1:])
            found = _Rows.empty(shape, out.dtype, placement, loader.device)
        found.write(begin, out)
        begin += batch.batch_size
        bar.update(1)
    if found is None:
        width = model.out_channels if layer == model.num_layers - 1 else model.hidden_channels
        return _Rows.empty((0, width), rows.view.dtype, placement, loader.device)
    if reach.finish is not None and not is_by_row:
        with _at_once(model, layer, graph):
            found = _Rows.of(reach.finish(found.view), placement, loader.device)
    return found


def _run_on_all(model: Any, layer: int, rows: _Rows, graph: Graph, placement: str) -> _Rows:
    """Compute the rows of a layer that depends on more than neighbors."""
    with _at_once(model, layer, graph):
        x = rows.view.to(graph.device)
        out = model.inference_per_layer(layer, x, graph.place(), graph.num_nodes)
        return _Rows.of(out, placement, graph.device)


@contextlib.contextmanager
def _at_once(model: Any, layer: int, graph: Graph) -> Iterator[None]:
    """Convert running out of memory to an error that names the layer."""
    try:
        yield
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        name = type(model.convs[layer]).__name__ if hasattr(model, "convs") else type(model).__name__
        raise MemoryLimitError(
            f"layer {layer} of the model ({name}, or the norm behind it) looks at more than neighbors, so that it is "
            f"computed for all {graph.num_nodes} nodes at once, which does not fit; give device='cpu', or layers that "
            "look at neighbors only, such as those of GraphSAGE, GAT, GIN or GCN") from error  # fmt: skip
