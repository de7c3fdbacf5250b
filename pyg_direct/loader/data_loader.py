"""`DataLoader`: batches of many small graphs, cut out of one collated store, after PyG's loader of that name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.loader.collate.graph_batches import GraphCollection
from pyg_direct.loader.collate.graph_sources import Source
from pyg_direct.loader.graph_loader import GraphLoader
from pyg_direct.typing import Device


class DataLoader(GraphLoader, PygDataLoader):  # type: ignore[misc]
    """Batches of small graphs, after PyG's `DataLoader`: the same `Batch`, cut out of one collated store on `device`.

    A list of `Data` or `HeteroData` is collated once, and anew before an epoch if graphs were changed. The joined
    tensors of an `InMemoryDataset` are used as they are, by its subsets and index selections too. Any other data set,
    and one with a `transform`, gives its graphs one by one to PyG's own collation, which is logged once.

    If graphs are written to while an epoch runs, as to put pseudo labels there, one warning says so, and from then on
    PyG's own code joins the graphs of each batch as they are when it is asked for. Of a list, two graphs of each batch
    are looked at for that. Writes through NumPy or `.data` are not counted by torch. They are found when an epoch
    begins, in the joined tensors of an `InMemoryDataset`, and of a list in 32 of its graphs; assign a tensor anew
    (`graph.x = graph.x.clone()`) to be sure.

    Without a `seed` graphs are shuffled exactly as by PyG's loader under the same `torch.manual_seed`.

    Args:
        dataset: A list of `Data` or `HeteroData`, an `InMemoryDataset`, or a `torch.utils.data.Subset` of one; or
            anything that has items and a length.
        batch_size: Graphs of a batch.
        shuffle: Whether each epoch has another order.
        follow_batch: Attributes whose rows batches say the graphs of, by `NAME_batch` and `NAME_ptr`.
        exclude_keys: Attributes that batches do not have.
        device: Where batches are; None is the current GPU if there is one, else the CPU.
        placement: Memory of the store: `cuda`, or `unified` or `pinned` for host memory, from which batches are copied;
            `auto` is GPU memory if it has room; `cpu` on a CPU.
        seed: Seed of shuffling; with it, batches are a function of seed, epoch and number. None follows torch's
            generator.
        prefetch: Batches made ahead; None is 1 on a GPU, and 0 on a CPU, where a batch is made sooner than a thread
            hands it over.
        ranks, uneven: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `sampler`, `batch_sampler`, `drop_last` and
            `generator`. Options of workers are absorbed, unless graphs are made one by one.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value, and the number of a graph that misses an
            attribute of others, or has another width or dtype.
        DeviceError: `device` is a GPU that is not there.
        NotImplementedError: `dataset` has no length, or `batch_size` is None.
    """

    def __init__(self, dataset: Any, batch_size: int = 1, shuffle: bool = False,
                 follow_batch: list[str] | None = None, exclude_keys: list[str] | None = None, *,
                 device: Device = None, placement: str = "auto", seed: int | None = None,
                 prefetch: int | None = None, ranks: tuple[int, int] | str | None = None, uneven: str = "pad",
                 **kwargs: Any) -> None:  # fmt: skip
        self._keys = _check_keys(follow_batch=follow_batch, exclude_keys=exclude_keys)
        options = self._open(dataset, batch_size, shuffle, device, placement, seed, prefetch, ranks, uneven, kwargs)
        PygDataLoader.__init__(self, dataset, follow_batch=follow_batch, exclude_keys=exclude_keys, **options)

    def _join(self, source: Source) -> GraphCollection:
        return GraphCollection(source, *self._keys)


def _check_keys(**keys: Any) -> list[Any]:
    """Lists of names of attributes.

    Raises:
        ArgumentTypeError: named argument, rule and value.
    """
    for name, listed in keys.items():
        is_listed = listed is None or (isinstance(listed, Collection) and not isinstance(listed, str))
        if not is_listed or not all(isinstance(key, str) for key in listed or ()):
            raise ArgumentTypeError(f"{name} must be a list of names of attributes or None, got {listed!r}")
    return list(keys.values())
