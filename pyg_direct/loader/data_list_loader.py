"""`DataListLoader`: lists of graphs without a copy, after PyG's loader of that name, for `DataParallel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, Subset
from torch_geometric.data import InMemoryDataset
from torch_geometric.data.data import BaseData
from torch_geometric.loader import DataListLoader as PygDataListLoader
from typing_extensions import Unpack

from pyg_direct.loader.graph_loader import GraphLoader
from pyg_direct.loader.option_types import WorkerOptions


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
