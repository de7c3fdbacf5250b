"""Layer-wise inference: each layer of a model over all nodes and all their neighbors, then the next.

Rows between layers lie in memory (`_InMemory`), or in files (`_InFiles`) that are written and read piece by piece. Rows
of a file that fit the GPU are read once, in order (`WholeTable`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, TensorAttr
from typing_extensions import Unpack

from pyg_direct.cache_folder import sync_folder
from pyg_direct.errors import (
    ArgumentError,
    ArgumentTypeError,
    FileError,
    MemoryLimitError,
    PlacementWarning,
    warn,
    warn_unused,
)
from pyg_direct.features.feature import Feature
from pyg_direct.features.feature_store import FeatureStore
from pyg_direct.features.row_files import RowFile, check_format, save_pieces
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.features.tiers.disk import file_of
from pyg_direct.graph.placed_topology import place_array
from pyg_direct.graph.pyg_edges import find_edges
from pyg_direct.loader.arguments import InferenceLoaderOptions, InferOptions
from pyg_direct.loader.base_loader import EpochLoader
from pyg_direct.loader.batch_report import ending
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.loader.receptive_field import Graph, Reach, edges_of, find_reach, gives_each_row
from pyg_direct.loader.whole_table import WholeTable, fits_device
from pyg_direct.ops.rows.gather_rows import DEFAULT_BLOCKS, blocks_for_rows, gather_rows
from pyg_direct.profiling import show_bytes
from pyg_direct.progress import Bar, show_wait
from pyg_direct.runtime.cuda.device import budget_of, free_bytes, resolve_device
from pyg_direct.runtime.cuda.memory import Block, allocate_or_fall_back
from pyg_direct.runtime.host.host_memory import available_bytes
from pyg_direct.sampler.graph_reader import describe_other, read_topology
from pyg_direct.sampler.graph_store import GraphStore
from pyg_direct.sampler.keyed_sampler import device_for, is_own

# Average edges and most nodes per batch: enough to fill a GPU, few enough for the memory of their messages.
_BATCH_EDGES = {"cuda": 1 << 21, "cpu": 1 << 17}
_MOST_NODES = 1 << 16

_LOGGER = logging.getLogger(__name__)


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
    return NeighborLoader(bare, [-1], batch_size=_choose_size(data, options) if batch_size is None else batch_size,
                          **options)  # fmt: skip


def _choose_size(data: Data, options: Mapping[str, Any]) -> int:
    """Choose how many nodes a batch has: so many that their edges fill the device."""
    device = resolve_device(device_for(options.get("device"), options.get("neighbor_sampler")))
    mean = max(1.0, data.num_edges / max(1, int(data.num_nodes)))
    return min(_MOST_NODES, max(256, int(_BATCH_EDGES[device.type] / mean)))


@torch.no_grad()
def infer(model: torch.nn.Module, data: Data | tuple[FeatureStore, Data] | NeighborLoader, *,
          x: Tensor | Feature | None = None, batch_size: int | None = None, placement: str = "auto",
          progress_bar: bool = False, out: str | os.PathLike[str] | None = None, ahead: int | str | None = None,
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

    Nor must rows fit host memory. Features may be rows of a file (`Feature.from_file`). If they fit half of the GPU
    memory that is not left to the model (`PYG_DIRECT_AHEAD_GPU`), the file is read once, in order. With `out`, the rows
    of each layer are written to a file, batch by batch, unless they fit there too. The next layer reads it like
    features in a file: for many batches at once, in the order of the file. Edges stay in memory. The result is the
    same, bit for bit, for the same batches.

    Args:
        model: A model of PyG's `BasicGNN`, in evaluation mode, on the device of batches.
        data: A `Data` with `x`, our `FeatureStore` with `x` and a `Data`, or a loader over all nodes in order with
            `num_neighbors=[-1]`.
        x: Features of the nodes, floats `[N, F]`, instead of the features in `data`; also a `Feature`.
        batch_size: Nodes per batch; see `inference_loader`.
        placement: Memory of rows between layers: `auto`, `cuda`, `unified`, `pinned` or `cpu`. Unused with `out`.
        progress_bar: Show a progress bar.
        out: File for the result, `.npy` or `.safetensors`. It appears whole or not at all. Files of two layers at a
            time lie beside it, in the folder `out.partial`, which the end or an error removes. If a run was killed, the
            next one removes them.
        ahead: Memory for rows of files, such as `"8G"`, or batches that are planned together; see `NeighborLoader`. If
            it holds the rows of a layer, each page of their file is read once.
        **options: Arguments of `NeighborLoader`, such as `device` and `topology_placement`.

    Returns:
        Float `[N, C]` on the GPU, or on the CPU if it does not fit the GPU. With `out`, a tensor over the mapped file.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
        DeviceError: `device` is a GPU that this machine lacks.
        FileError: a file changed or cannot be read; `out` cannot be written, the disk is full, or another run writes
            `out`.
        MemoryLimitError: a layer that needs all nodes at once does not fit.

    Example:
        >>> from torch_geometric.nn import GraphSAGE
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> model = GraphSAGE(4, 8, num_layers=2, out_channels=3).eval()
        >>> out = infer(model, ring, device="cpu")
        >>> torch.allclose(out, model(ring.x, ring.edge_index), atol=1e-5)
        True
    """
    _check_model(model)
    if isinstance(data, NeighborLoader):
        if options:
            raise ArgumentError(f"{', '.join(options)} belong to the loader, where data is one: make it with them")
        check_inference_loader(data)
        batch_size = data.batch_size if batch_size is None else batch_size
        ahead = data.ahead if ahead is None and isinstance(data.data, tuple) else ahead
        options = {"device": data.device, "topology_placement": data.topology_placement,
                   "topology_cache": data.node_sampler.topology_cache, "prefetch": data.prefetch}  # fmt: skip
        data = data.data
    # All neighbors in order: the program's random numbers do not move on for a seed.
    options = {"seed": 0, **options}
    graph, x = _split(data, x)
    if find_edges(graph) is None:
        raise ArgumentError(f"data must have edge_index or adj_t, got {graph}")
    if ahead is not None and out is None and _file_of(x) is None:
        warn_unused({"ahead": ahead}, "it needs rows in files: x=Feature().from_file(...), or out=")
    num_nodes, num_layers = int(graph.num_nodes), int(model.num_layers)  # type: ignore[arg-type]
    if not isinstance(x, (Tensor, Feature)) or x.shape[0] != num_nodes:
        raise ArgumentError(f"x must have a row for each of the {num_nodes} nodes, got "
                            f"{tuple(x.shape) if isinstance(x, (Tensor, Feature)) else type(x).__name__}")  # fmt: skip
    path = None if out is None else _check_out(out, model, x)
    with contextlib.ExitStack() as stack:
        device = resolve_device(device_for(options.get("device"), options.get("neighbor_sampler")))
        # It is read while the graph is prepared.
        table = WholeTable.open(x, device)
        if table is not None:
            stack.callback(table.close)
        store: Any = None
        if out is None and (table is not None or not isinstance(x, Feature)):
            loader = inference_loader(graph, batch_size, **options)
        else:
            store = FeatureStore(device=device)
            loader = _open_stored(store, graph, batch_size, ahead, device, options)
        memory = _InMemory(num_nodes, placement, loader.device)
        kept: Any = memory
        if path is not None:
            kept = stack.enter_context(_InFiles(path, store, num_nodes, num_layers, loader.device))
        rows: Any
        if table is not None:
            rows, table = _WholeRows(table), None
        else:
            rows = _StoredRows(x, store) if isinstance(x, Feature) else _Rows.of(x, placement, loader.device)
        bar = stack.enter_context(Bar(num_layers * len(loader), "inference", "batches", is_shown=progress_bar))
        edges = Graph(loader.data if store is None else graph, loader.device)
        for layer in range(num_layers):
            # Rows in memory need no plan.
            loader.ahead = ahead if isinstance(rows, _StoredRows) and rows.file is not None else 0
            rows = _run_layer(model, layer, rows, loader, edges, memory, kept, bar)
        return rows.as_result() if out is None else kept.publish()  # type: ignore[no-any-return]


def _check_model(model: Any) -> None:
    if not hasattr(model, "inference_per_layer"):
        raise ArgumentTypeError(f"model must be a BasicGNN of PyG, got {type(model).__name__}: for one with an "
                                "inference(loader) of its own, call model.inference(inference_loader(data))"
                                )  # fmt: skip
    if model.training:
        raise ArgumentError("model must be in evaluation mode; call model.eval() first")
    if model.jk_mode not in (None, "last"):
        raise ArgumentError(f"model must have jk=None or 'last', got {model.jk_mode!r}")


def _split(data: Any, x: Any = None) -> tuple[Data, Any]:
    """Split a graph into edges and features of nodes; `x` replaces the features."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Data):
        features, data = data
        if x is None and not isinstance(features, FeatureStore):
            raise ArgumentTypeError("data must have its features in a pyg_direct.FeatureStore, if it is a pair of "
                                    f"stores, got {type(features).__name__}")  # fmt: skip
        return data, features.find(TensorAttr(None, "x")) if x is None else x
    if not isinstance(data, Data):
        raise ArgumentTypeError("data must be a Data, or a pair of a pyg_direct.FeatureStore and a Data with the edges "
                                f"in memory, got {describe_other(data)}")  # fmt: skip
    return data, data.x if x is None else x


def _file_of(x: Any) -> RowFile | None:
    """Return the file in which features lie; None for features in memory."""
    return file_of(x.stored.tier) if isinstance(x, Feature) and isinstance(x.stored, SpilledRows) else None


def _check_out(out: Any, model: torch.nn.Module, x: Tensor | Feature) -> Path:
    """Check that the result can be written to a file, before hours of work."""
    if not isinstance(out, (str, os.PathLike)):
        raise ArgumentTypeError(f"out must be the name of a file, got {out!r}")
    path = Path(out)
    if path.is_dir():
        raise ArgumentError(f"out must be the name of a file, got the folder {str(path)!r}")
    check_format(path, next((weight.dtype for weight in model.parameters()), x.dtype), "out")
    file = _file_of(x)
    if file is not None and path.exists() and path.samefile(file.path):
        raise ArgumentError(f"out must be another file than x, got {str(path)!r} for both")
    return path


def _open_stored(store: FeatureStore, graph: Data, batch_size: int | None, ahead: int | str | None,
                 device: torch.device, options: Mapping[str, Any]) -> NeighborLoader:  # fmt: skip
    """Make a loader with the batches of `inference_loader`, which have the rows that are in a store meanwhile."""
    if graph.get("adj_t") is not None:
        raise ArgumentError("data must have edge_index where rows lie in files, got adj_t")
    # A GPU sorts edges in less time than the host.
    edges = GraphStore(read_topology(Data(edge_index=find_edges(graph), num_nodes=graph.num_nodes), device))
    return NeighborLoader((store, edges), [-1], torch.arange(int(graph.num_nodes), device="cpu"), ahead=ahead,
                          batch_size=_choose_size(graph, options) if batch_size is None else batch_size,
                          **options)  # fmt: skip


def check_inference_loader(loader: NeighborLoader) -> None:
    """Check that a loader makes its own batches of all nodes in order, with all neighbors of one hop."""
    in_stores = isinstance(loader.data, tuple) and is_own(loader.node_sampler) and EpochLoader._is_own(loader)
    if not in_stores and not loader._is_own():
        raise ArgumentError("data must be a loader without a sampler, filter_fn or transform_sampler_output of the "
                            "program's, as no batch would pass them; give its Data, or call model.inference(loader)"
                            )  # fmt: skip
    fanouts = loader.node_sampler.num_neighbors.values
    if fanouts != [-1]:
        raise ArgumentError(f"data must be a loader with num_neighbors=[-1], got {fanouts}")
    nodes, count = loader.input_data.node, _split(loader.data, True)[0].num_nodes
    if nodes.numel() != count or bool((nodes.cpu() != torch.arange(nodes.numel(), device="cpu")).any()):
        raise ArgumentError("data must be a loader over all nodes in order; leave out input_nodes")
    if not isinstance(loader.sampler, torch.utils.data.SequentialSampler):
        raise ArgumentError("data must be a loader with shuffle=False")


class _Rows:
    """Rows of all nodes in memory that the device reads and writes, or the CPU for a GPU that cannot.

    Args:
        block: Memory of the rows, if it is on the host.
    """

    def __init__(self, view: Tensor, block: Block | None) -> None:
        self._view, self._block = view, block

    @property
    def view(self) -> Tensor:
        """All rows, as the device reads and writes them."""
        return self._view

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
        if where == "cpu" and num_bytes > available_bytes():
            warn(f"rows of a layer take {show_bytes(num_bytes)}, but only {show_bytes(available_bytes())} of "
                 "host memory are free: give out=, for rows in files", PlacementWarning)  # fmt: skip
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

    def write_all(self, pieces: Iterator[Tensor]) -> None:
        """Write all rows, which come piece by piece, in order."""
        begin = 0
        for piece in pieces:
            self.write(begin, piece)
            begin += len(piece)

    def read_whole(self) -> Tensor:
        """Return all rows, on the device or where the device reads them."""
        return self.view

    def as_result(self) -> Tensor:
        """Return the rows as a tensor on the device, or on the CPU if they lie on the host."""
        if self._block is None or not self.view.is_cuda:
            return self.view
        torch.cuda.current_stream(self.view.device).synchronize()
        return self._block.view_on_cpu(self.view.dtype, self.view.shape)


class _WholeRows(_Rows):
    """Rows of a file that are on their way to the GPU; the first read waits for all of them."""

    def __init__(self, table: WholeTable) -> None:
        self._table, self._block = table, None

    @property
    def view(self) -> Tensor:
        """All rows, on the device."""
        return self._table.wait()


class _InMemory:
    """Keeper of the rows of layers in memory."""

    def __init__(self, num_nodes: int, placement: str, device: torch.device) -> None:
        self._num_nodes, self._placement, self._device = num_nodes, placement, device

    def keep(self, pieces: Iterator[Tensor]) -> _Rows:
        """Keep rows that come piece by piece, in order."""
        first = next(pieces)
        made = _Rows.empty((self._num_nodes, *first.shape[1:]), first.dtype, self._placement, self._device)
        made.write_all(itertools.chain([first], pieces))
        return made

    def keep_whole(self, rows: Tensor) -> _Rows:
        """Keep rows that come at once."""
        return _Rows.of(rows, self._placement, self._device)


class _StoredRows:
    """Rows of all nodes in a `Feature`, which a loader reads for its batches as long as they are in its store.

    Attributes:
        file: The file in which they lie; None for rows in memory.
    """

    def __init__(self, feature: Feature, store: FeatureStore) -> None:
        self._feature, self._store, self.file = feature, store, _file_of(feature)

    def read_all(self, loader: NeighborLoader) -> Iterator[tuple[Any, Tensor]]:
        """Iterate over batches with the rows of their nodes."""
        self._store[None, "x", None] = self._feature
        batches = iter(loader)
        try:
            with ending(batches):
                for batch in batches:
                    yield batch, batch.x
            for _, window in loader._row_windows or ():
                _LOGGER.info("read for a layer: %s", window.tell(measures_disk=False))
        finally:
            self._store.remove_tensor(group_name=None, attr_name="x", index=None)

    def read(self, ids: Tensor) -> Tensor:
        """Read rows of these ids, to the device of the ids."""
        return self._feature[ids].to(ids.device)  # type: ignore[no-any-return]

    def read_whole(self) -> Tensor:
        """Return all rows, on the device."""
        return self._feature[torch.arange(self._feature.shape[0], device="cpu")]


class _InFiles:
    """Keeper of the rows of layers in files, in a locked folder beside the result; in GPU memory, if they fit there.

    Args:
        out: File of the result.
        store: Store of the loader that reads the files.
        num_nodes: Rows of each layer.
        num_layers: The last of the layers is the result.
        device: Device of batches.
    """

    def __init__(self, out: Path, store: FeatureStore, num_nodes: int, num_layers: int, device: torch.device
                 ) -> None:  # fmt: skip
        self._out, self._store, self._num_nodes, self._num_left = out, store, num_nodes, num_layers
        self._folder = out.with_name(f"{out.name}.partial")
        self._device = device
        self._path: Path | None = None

    def __enter__(self) -> _InFiles:
        from filelock import FileLock, Timeout

        self._lock = FileLock(self._folder / "lock", timeout=0)
        try:
            self._folder.mkdir(exist_ok=True)
            self._lock.acquire()
        except Timeout as error:
            raise FileError(f"out={str(self._out)!r} must be written by one run at a time: another one has locked "
                            f"{self._folder}") from error  # fmt: skip
        except OSError as error:
            raise FileError(f"out={str(self._out)!r} could not be written: {error.strerror}") from error
        # A run that was killed has left them.
        self._remove("*layer*")
        return self

    def __exit__(self, *error: object) -> None:
        self._remove("*layer*")
        self._remove("lock")
        self._lock.release()
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _remove(self, pattern: str) -> None:
        for path in self._folder.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()

    def keep(self, pieces: Iterator[Tensor]) -> _Rows | _StoredRows | None:
        """Write rows that come piece by piece, in order; returns None for the result."""
        first = next(pieces)
        self._num_left -= 1
        made = self._allocate(first) if self._num_left else None
        if made is not None:
            made.write_all(itertools.chain([first], pieces))
            self._remove("*layer*")
            self._path = None
            return made
        path = self._folder / f"layer{self._num_left}{'.safetensors' if self._num_left else self._out.suffix}"
        rows = torch.empty((self._num_nodes, *first.shape[1:]), dtype=first.dtype, device="meta")
        on_host = (piece.detach().cpu().contiguous() for piece in itertools.chain([first], pieces))
        save_pieces(path, rows, on_host, "out", is_shown=False)
        if self._path is not None:
            self._remove(self._path.name)
        self._path = path
        return _StoredRows(Feature(device=self._device).from_file(path), self._store) if self._num_left else None

    def _allocate(self, first: Tensor) -> _Rows | None:
        """Allocate rows of the device for a layer, of which these are the first; None if they do not fit there."""
        num_bytes = self._num_nodes * first[0].numel() * first.element_size() if len(first) else 0
        if fits_device(num_bytes, self._device):
            with contextlib.suppress(torch.OutOfMemoryError):
                # Free memory of the GPU may lie in pieces.
                shape = self._num_nodes, *first.shape[1:]
                return _Rows.empty(shape, first.dtype, self._device.type, self._device)
        return None

    def keep_whole(self, rows: Tensor) -> _Rows | _StoredRows | None:
        """Write rows that come at once; returns None for the result."""
        return self.keep(iter([rows]))

    def publish(self) -> Tensor:
        """Put the result into place, and return its rows in the mapped file."""
        assert self._path is not None
        try:
            os.replace(self._path, self._out)
        except OSError as error:
            raise FileError(f"out={str(self._out)!r} could not be written: {error.strerror}") from error
        sync_folder(self._out.parent)
        return RowFile(self._out).rows


def _choose_place(num_bytes: int, placement: str, device: torch.device) -> str:
    if placement != "auto":
        return placement
    if device.type == "cpu":
        return "cpu"
    # The previous layer's rows are there too, and a batch's messages.
    return "cuda" if num_bytes <= budget_of(free_bytes(device.index)) // 2 else "unified"


def _run_layer(model: Any, layer: int, rows: Any, loader: NeighborLoader, graph: Graph, memory: _InMemory, kept: Any,
               bar: Bar) -> Any:  # fmt: skip
    """Compute the rows of a layer, and let `kept` keep them; `memory` keeps rows that are needed at once."""

    def run(batch: Any, x: Tensor) -> Tensor:
        return model.inference_per_layer(layer, x, edges_of(batch), batch.batch_size)  # type: ignore[no-any-return]

    if graph.num_nodes == 0:
        width = model.out_channels if layer == model.num_layers - 1 else model.hidden_channels
        return kept.keep_whole(rows.read_whole().new_empty(0, width))
    # A batch of all nodes has the whole graph.
    reach = Reach(run) if len(loader) <= 1 else find_reach(model, layer, graph, rows.read)
    if reach.convolve is None:
        with _at_once(model, layer, graph):
            x = rows.read_whole().to(graph.device)
            made = kept.keep_whole(model.inference_per_layer(layer, x, graph.place(), graph.num_nodes))
        bar.update(len(loader))
        return made
    made = _convolve(reach.convolve, rows, loader, bar)
    with ending(made):
        if reach.finish is None:
            return kept.keep(made)
        first = next(made)
        pieces = itertools.chain([first], made)
        if reach.is_by_row or gives_each_row(reach.finish, first):
            return kept.keep(map(reach.finish, pieces))
        found = memory.keep(pieces)
        with _at_once(model, layer, graph):
            return kept.keep_whole(reach.finish(found.view))


def _convolve(convolve: Callable[[Any, Tensor], Tensor], rows: Any, loader: NeighborLoader, bar: Bar
              ) -> Iterator[Tensor]:  # fmt: skip
    for batch, x in rows.read_all(loader):
        yield convolve(batch, x)
        bar.update(1)


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
