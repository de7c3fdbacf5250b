"""`DenseDataLoader`: batches that stack graphs of equal shapes, after PyG's loader of that name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.data.data import BaseData
from torch_geometric.loader import DenseDataLoader as PygDenseDataLoader
from typing_extensions import Unpack

from pyg_direct.loader.collate.dense_batches import DenseCollection
from pyg_direct.loader.collate.graph_sources import Source
from pyg_direct.loader.graph_loader import GraphLoader
from pyg_direct.loader.option_types import WorkerOptions
from pyg_direct.typing import Device


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
