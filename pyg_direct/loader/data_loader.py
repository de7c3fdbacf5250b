"""`DataLoader`, `DenseDataLoader` and `DataListLoader`: PyG's loaders of many small graphs, cut out of one store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.data.data import BaseData
from torch_geometric.loader import (
    DataListLoader as PygDataListLoader,
    DataLoader as PygDataLoader,
    DenseDataLoader as PygDenseDataLoader,
)
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader.arguments import WorkerOptions
from pyg_direct.loader.collate.dense_batches import DenseCollection, StaticCollection
from pyg_direct.loader.collate.graph_batches import GraphCollection
from pyg_direct.loader.collate.graph_sources import Source, read_source
from pyg_direct.loader.graph_loader import GraphLoader
from pyg_direct.nn.sorted_edges import register_graphs
from pyg_direct.ops.argument_checks import check_flag
from pyg_direct.typing import Device


class DataLoader(GraphLoader, PygDataLoader):  # type: ignore[misc]
    """Batches of small graphs, after PyG's `DataLoader`: the same `Batch`, cut out of one collated store on `device`.

    A list of `Data` or `HeteroData` is collated once, and again before an epoch if graphs changed. The joined tensors
    of an `InMemoryDataset` are used directly, also through its subsets, index selections and lists of its graphs. If
    its `transform` is one of PyG's that draw nothing, such as `OneHotDegree`, graphs are transformed once. Any other
    data set, and one with another `transform`, passes its graphs one by one to PyG's own collation, which is logged
    once.

    If graphs are written to while an epoch runs, for example pseudo labels, one warning reports it. From then on PyG's
    own code joins the current graphs of each batch on request. In a list, two graphs per batch are checked for such
    writes. torch does not count writes through NumPy or `.data`. They are detected at the start of an epoch, in the
    joined tensors of an `InMemoryDataset`, or in 32 graphs of a list. To be sure, assign a new tensor (`graph.x =
    graph.x.clone()`).

    Without a `seed`, graphs are shuffled exactly as by PyG's loader under the same `torch.manual_seed`.

    With `static_graph=True` all graphs have one structure, such as a mesh, a road network or a grid of the earth, with
    other signals. A batch is then a `Data` with this one `edge_index`, with attributes of nodes `[B, N, ...]` and of
    graphs `[B, ...]`; `batch_size` is B. Attributes of edges that are equal in all graphs are kept once, others are
    `[B, E, ...]`. PyG's convolutions take such rows, and accelerated ones sum them in one pass over the edges.

    Args:
        dataset: A list of `Data` or `HeteroData`, an `InMemoryDataset`, or a `torch.utils.data.Subset` of one; or any
            object with items and a length.
        batch_size: Graphs per batch.
        shuffle: Use another order in each epoch.
        follow_batch: Attributes for whose rows batches have the graph, by `NAME_batch` and `NAME_ptr`.
        exclude_keys: Attributes that batches do not have.
        static_graph: Keep one structure for the signals of all graphs.
        device: Device of the batches; None is the current GPU if there is one, otherwise the CPU.
        placement: Memory of the store: `cuda`, or `unified` or `pinned` for host memory, from which batches are copied;
            `auto` is GPU memory if it has room; `cpu` on a CPU.
        seed: Seed of shuffling; with it, batches are a function of seed, epoch and number. None takes a seed from
            torch's generator.
        prefetch: Batches prepared ahead; None is 1 on a GPU, and 0 on a CPU: there, making a batch takes less time than
            a thread's hand-over. If a GPU holds the store, up to 16 batches are made together by one launch. Together
            they take at most 32 MiB and a 16th of the free memory, and each has memory of its own. With samplers of the
            program, or attributes that no kernel joins, each batch is made alone.
        ranks, uneven: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `sampler`, `batch_sampler`, `drop_last` and
            `generator`. Options of workers are absorbed, unless graphs are made one by one.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value; for a graph with a missing attribute, another
            width or dtype, its number.
        DeviceError: `device` is a GPU that does not exist.
        NotImplementedError: `dataset` has no length, or `batch_size` is None.

    Example:
        >>> graphs = [Data(x=torch.ones(n, 1), edge_index=torch.tensor([[0], [1]])) for n in (2, 3)]
        >>> (batch,) = DataLoader(graphs, batch_size=2, device="cpu")
        >>> batch.edge_index.tolist(), batch.batch.tolist()
        ([[0, 2], [1, 3]], [0, 0, 1, 1, 1])
    """

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Batch]: ...

    def __init__(self, dataset: Dataset[Any] | Sequence[BaseData], batch_size: int = 1, shuffle: bool = False,
                 follow_batch: list[str] | None = None, exclude_keys: list[str] | None = None, *,
                 static_graph: bool = False, device: Device = None, placement: str = "auto", seed: int | None = None,
                 prefetch: int | None = None, ranks: tuple[int, int] | str | None = None, uneven: str = "pad",
                 **kwargs: Unpack[WorkerOptions]) -> None:  # fmt: skip
        self._keys = _check_keys(follow_batch=follow_batch, exclude_keys=exclude_keys)
        self._is_static = check_flag("static_graph", static_graph)
        if static_graph and follow_batch:
            raise ArgumentError(f"follow_batch must be None with static_graph=True, whose graphs stay apart, got "
                                f"{follow_batch!r}")  # fmt: skip
        options = self._open(dataset, batch_size, shuffle, device, placement, seed, prefetch, ranks, uneven, kwargs)
        PygDataLoader.__init__(self, dataset, follow_batch=follow_batch, exclude_keys=exclude_keys, **options)
        if static_graph:
            self.collate_fn = self._join_now

    def _finish_batch(self, batch: Any) -> Any:
        # By it, calls of a model are known that replay may serve.
        mapping = batch._store._mapping if isinstance(batch, Data) else {}
        if type(mapping.get("batch")) is Tensor and type(mapping.get("ptr")) is Tensor:
            register_graphs(mapping["batch"], mapping["ptr"])
        return super()._finish_batch(batch)

    def _join(self, source: Source) -> GraphCollection | StaticCollection:
        if self._is_static:
            return StaticCollection(source, frozenset(self._keys[1] or ()))
        return GraphCollection(source, *self._keys)

    def _join_now(self, graphs: Sequence[Any]) -> Any:
        """Build the batch of graphs that were made for it."""
        joined = self._join(read_source(list(graphs), None))
        joined.place(self.device)
        return joined.collate(torch.arange(len(graphs), device="cpu"))


def _check_keys(**keys: Any) -> list[Any]:
    """Check lists of names of attributes."""
    for name, listed in keys.items():
        is_listed = listed is None or (isinstance(listed, Collection) and not isinstance(listed, str))
        if not is_listed or not all(isinstance(key, str) for key in listed or ()):
            raise ArgumentTypeError(f"{name} must be a list of names of attributes or None, got {listed!r}")
    return list(keys.values())


class DenseDataLoader(GraphLoader, PygDenseDataLoader):  # type: ignore[misc]
    """Batches that stack graphs of equal shapes, after PyG's `DenseDataLoader`, gathered out of one store on `device`.

    Each attribute of a batch has an additional first dimension, as dense layers such as `DenseGCNConv` expect. A list
    of `Data` is stacked once, and again before an epoch if graphs changed. The joined tensors of an `InMemoryDataset`
    are used directly. Any other data set, and one with a `transform` that may draw, passes its graphs one by one to
    PyG's own collation. This is logged once.

    Without a `seed`, graphs are shuffled exactly as by PyG's loader under the same `torch.manual_seed`.

    Args:
        dataset: A list of `Data`, an `InMemoryDataset`, or a `torch.utils.data.Subset` of one; or any object with items
            and a length.
        batch_size: Graphs per batch.
        shuffle: Use another order in each epoch.
        device: Device of the batches; None is the current GPU if there is one, otherwise the CPU.
        placement, seed, prefetch: See `DataLoader`.
        ranks, uneven: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `sampler`, `batch_sampler`, `drop_last` and
            `generator`. Options of workers are absorbed, unless graphs are made one by one.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value; for a graph with a missing attribute, another
            shape or dtype, its number.
        DeviceError: `device` is a GPU that does not exist.
        NotImplementedError: `dataset` has no length, or `batch_size` is None.

    Example:
        >>> graphs = [Data(x=torch.ones(3, 1), adj=torch.eye(3)) for _ in range(2)]
        >>> (batch,) = DenseDataLoader(graphs, batch_size=2, device="cpu")
        >>> batch.x.shape, batch.adj.shape
        (torch.Size([2, 3, 1]), torch.Size([2, 3, 3]))
    """

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Data]: ...

    def __init__(self, dataset: Dataset[Any] | Sequence[BaseData], batch_size: int = 1, shuffle: bool = False, *,
                 device: Device = None, placement: str = "auto", seed: int | None = None, prefetch: int | None = None,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", **kwargs: Unpack[WorkerOptions]
                 ) -> None:  # fmt: skip
        options = self._open(dataset, batch_size, shuffle, device, placement, seed, prefetch, ranks, uneven, kwargs)
        PygDenseDataLoader.__init__(self, dataset, **options)

    def _join(self, source: Source) -> DenseCollection:
        return DenseCollection(source)


class DataListLoader(GraphLoader, PygDataListLoader):  # type: ignore[misc]
    """Lists of the graphs of a data set, after PyG's `DataListLoader`, for `torch_geometric.nn.DataParallel`.

    Graphs are neither copied nor moved: `DataParallel` joins its share of a list on each GPU.

    Without a `seed`, graphs are shuffled exactly as by PyG's loader under the same `torch.manual_seed`.

    Args:
        dataset: Any object with items and a length, such as a list of `Data` or `HeteroData`.
        batch_size: Graphs per list.
        shuffle: Use another order in each epoch.
        seed: Seed of shuffling; with it, lists are a function of seed, epoch and number. None takes a seed from torch's
            generator.
        ranks, uneven: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `sampler`, `batch_sampler`, `drop_last` and
            `generator`. Options of workers are absorbed if the graphs are in memory.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
        NotImplementedError: `dataset` has no length, or `batch_size` is None.

    Example:
        >>> graphs = [Data(x=torch.ones(n, 1), edge_index=torch.tensor([[0], [1]])) for n in (2, 3, 4)]
        >>> [[graph.num_nodes for graph in batch] for batch in DataListLoader(graphs, batch_size=2)]
        [[2, 3], [4]]
    """

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[list[BaseData]]: ...

    def __init__(self, dataset: Dataset[Any] | Sequence[BaseData], batch_size: int = 1, shuffle: bool = False, *,
                 seed: int | None = None, ranks: tuple[int, int] | str | None = None, uneven: str = "pad",
                 **kwargs: Unpack[WorkerOptions]) -> None:  # fmt: skip
        options = self._open(dataset, batch_size, shuffle, "cpu", "cpu", seed, 0, ranks, uneven, kwargs)
        PygDataListLoader.__init__(self, dataset, **options)

    def _read(self, dataset: Any) -> None:
        """Do nothing: no graphs are joined."""

    def _needs_workers(self, dataset: Any) -> bool:
        while type(dataset) is Subset:
            dataset = dataset.dataset
        is_in_memory = isinstance(dataset, InMemoryDataset) and dataset.transform is None
        return not is_in_memory and not isinstance(dataset, (list, tuple))

    def _list_options(self) -> Iterator[str]:
        return iter(())

    def _list_places(self) -> tuple[list[str], dict[str, Any]]:
        return [f"graphs: {len(self.dataset)}, as they are"], {}
