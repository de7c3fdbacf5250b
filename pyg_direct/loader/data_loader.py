"""`DataLoader`: batches of many small graphs, cut out of one collated store, after PyG's loader of that name."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning, warn
from pyg_direct.loader.arguments import settle_workers
from pyg_direct.loader.base_loader import ALONE, EpochLoader, make_batch
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.collate.graph_batches import GraphCollection
from pyg_direct.loader.collate.graph_columns import move_all
from pyg_direct.loader.collate.graph_sources import OneByOneError, Source, read_source
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.loader.profiler import EpochRecord
from pyg_direct.ops.argument_checks import check_flag
from pyg_direct.profiling import show_bytes
from pyg_direct.progress import announce
from pyg_direct.runtime.cuda.device import budget_of, free_bytes, resolve_device
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.typing import Device

# Graphs of a batch that are looked at for writes while an epoch runs.
_LOOKED_AT = 2


class DataLoader(EpochLoader, PygDataLoader):  # type: ignore[misc]
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

    transform = None
    transform_sampler_output = None
    _orders_as_torch = True
    _graphs: GraphCollection | None = None
    # Whether graphs were written while an epoch ran: then they are joined when a batch is asked for.
    _joins_late = False

    def __init__(self, dataset: Any, batch_size: int = 1, shuffle: bool = False,
                 follow_batch: list[str] | None = None, exclude_keys: list[str] | None = None, *,
                 device: Device = None, placement: str = "auto", seed: int | None = None,
                 prefetch: int | None = None, ranks: tuple[int, int] | str | None = None, uneven: str = "pad",
                 **kwargs: Any) -> None:  # fmt: skip
        if prefetch is None:
            prefetch = int(resolve_device(device).type == "cuda")
        self._settle(device, placement, None, None, 1, seed, prefetch, ranks, uneven)
        check_flag("shuffle", shuffle)
        if isinstance(dataset, IterableDataset) or (batch_size is None and kwargs.get("batch_sampler") is None):
            raise NotImplementedError("a data set without a length, or batch_size=None, has no batches to cut out: "
                                      "take torch_geometric.loader.DataLoader")  # fmt: skip
        for name, keys in (("follow_batch", follow_batch), ("exclude_keys", exclude_keys)):
            is_listed = keys is None or (isinstance(keys, Collection) and not isinstance(keys, str))
            if not is_listed or not all(isinstance(key, str) for key in keys or ()):
                raise ArgumentTypeError(f"{name} must be a list of names of attributes or None, got {keys!r}")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ArgumentTypeError(f"dataset must have items and a length, got {type(dataset).__name__}")
        self._keys = (follow_batch, exclude_keys)
        self._is_alone = batch_size == 1 and kwargs.get("batch_sampler") is None
        self._read(dataset)
        kwargs = settle_workers(type(self), kwargs, self.device, may_start=False, num_seeds=len(dataset),
                                needs_workers=self._graphs is None)  # fmt: skip
        PygDataLoader.__init__(self, dataset, batch_size, shuffle and len(dataset) > 0, follow_batch, exclude_keys,
                               **kwargs)  # fmt: skip

    def _read(self, dataset: Any) -> None:
        """Collate the data set if it is not collated, or was changed since."""
        if self._joins_late:
            self._graphs = None
            return
        known = None if self._graphs is None else self._graphs.source
        try:
            source = read_source(dataset, known)
            if source is not known:
                self._graphs = self._collate(source)
        except OneByOneError as reason:
            self._graphs = None
            announce(f"the data set of a DataLoader is not collated once, as {reason}: its graphs are made one by one "
                     "and joined by PyG's own code for each batch, which takes longer")  # fmt: skip

    def _collate(self, source: Source) -> GraphCollection:
        try:
            return GraphCollection(source, *self._keys)
        except (ArgumentError, ArgumentTypeError) as error:
            if not self._is_alone:
                raise
            # A batch of one graph has no other that it must be like.
            raise OneByOneError(str(error)) from error

    def _prepare(self) -> None:
        self._read(self.dataset)
        graphs = self._graphs
        if graphs is not None and graphs.device is None:
            graphs.place(self._choose_device(graphs))

    def _choose_device(self, graphs: GraphCollection) -> torch.device:
        """Where the store lies."""
        if self.device.type == "cpu" or self.placement in ("unified", "pinned"):
            return torch.device("cpu")
        has_room = self.placement == "cuda" or graphs.count_bytes() <= budget_of(free_bytes(self.device.index))
        return self.device if has_room else torch.device("cpu")

    def _input(self) -> Tensor:
        if self._graphs is None:
            return torch.arange(len(self.dataset), device="cpu")
        return self._graphs.source.numbers

    def _is_own(self) -> bool:
        return self._graphs is not None

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        return _Sample()

    def _fetch(self, sample: Any, number: int, seeds: Any, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        if isinstance(seeds, _Choice):
            batch = seeds.graphs.collate(seeds.numbers)
            return batch if seeds.graphs.device == self.device else _upload(batch, self.device)
        positions = seeds.positions.tolist()
        if hasattr(self.dataset, "__getitems__") and self.dataset.__getitems__:
            items = self.dataset.__getitems__(positions)
        else:
            items = [self.dataset[position] for position in positions]
        return move_all(self.collate_fn(items), self.device)

    def _work_here(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None = None
                   ) -> Iterator[Any]:  # fmt: skip
        graphs = self._graphs
        if graphs is None:
            return self._make_one_by_one(key, batches, record)
        if record is None and self.prefetch == 0 and self.device.type == "cpu":
            return (self._fetch(None, number, seeds) if self._is_written(graphs, seeds) else
                    graphs.collate(seeds.nodes) for number, seeds in batches)  # fmt: skip
        return self._work_ahead(graphs, key, batches, record)

    def _work_ahead(self, graphs: GraphCollection, key: EpochKey, batches: Iterator[tuple[int, Seeds]],
                    record: EpochRecord | None) -> Iterator[Any]:  # fmt: skip
        """Batches of a collated data set, made ahead; those of graphs that were written since are made again."""
        given: deque[tuple[int, Seeds]] = deque()

        def choose() -> Iterator[Any]:
            for number, seeds in batches:
                given.append((number, seeds))
                # Graphs that are changed before another epoch begins are not those of this one.
                yield number, _Choice(graphs, seeds.nodes)

        for batch in super()._work_here(key, choose(), record):
            number, seeds = given.popleft()
            yield self._fetch(None, number, seeds) if self._is_written(graphs, seeds) else batch

    def _is_written(self, graphs: GraphCollection, seeds: Seeds) -> bool:
        """Whether graphs were written while an epoch runs, which some of a batch tell; warns once."""
        if self._joins_late:
            return True
        step = -(-seeds.nodes.numel() // _LOOKED_AT) or 1
        if not graphs.source.were_written(seeds.nodes[::step].tolist()):
            return False
        self._joins_late = True
        warn("graphs of the data set were written while an epoch runs: from now on PyG's own code joins the graphs of "
             "each batch when it is asked for, which takes longer; write to them between epochs, and make a new loader",
             LoaderWarning)  # fmt: skip
        return True

    def _make_one_by_one(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None
                         ) -> Iterator[Any]:  # fmt: skip
        """Batches of PyG's collation, each made when it is asked for: functions of the program draw as there."""
        stages = self._stages(key, record)
        for number, seeds in batches:
            yield make_batch(stages, number, seeds)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or the rest of one that was resumed."""
        if self.num_workers > 0 and self.seed is None and self._ranks.ranks is None and self._drawn is None:
            return self._iterate_as_torch()
        return super().__iter__()

    def _iterate_as_torch(self) -> Iterator[Any]:
        """The batches that a program of PyG's has, with all that torch does for workers; they cannot be resumed."""
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        for number, batch in enumerate(PygDataLoader.__iter__(self), 1):
            self.__dict__["_standing"] = (epoch, number, None)
            yield move_all(batch, self.device)
        self.__dict__["_standing"] = (epoch + 1, 0, None)

    def _work_with_workers(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]]) -> Iterator[Any]:
        options = {name: getattr(self, name) for name in ("num_workers", "prefetch_factor", "pin_memory", "timeout",
                                                          "worker_init_fn", "multiprocessing_context")}  # fmt: skip
        positions = [seeds.positions.tolist() for _, seeds in batches]
        generator = torch.Generator().manual_seed(key.of_order() % 2**63)
        pool: Any = torch.utils.data.DataLoader(self.dataset, batch_sampler=positions, collate_fn=self.collate_fn,
                                                generator=generator, **options)  # fmt: skip
        for batch in pool:
            yield move_all(batch, self.device)

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        if self._graphs is None:
            return [f"graphs: {len(self.dataset)}, made one by one"], {}
        self._prepare()
        source, where = self._graphs.source, self._graphs.device
        return [f"graphs: {source.count}, {show_bytes(self._graphs.count_bytes())} on {where}"], {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.dataset)} graphs)"


class _Choice(NamedTuple):
    """The graphs of a batch.

    Attributes:
        graphs: All graphs.
        numbers: Those of the batch, int64 `[B]`.
    """

    graphs: GraphCollection
    numbers: Tensor


class _Sample:
    """What stands for a sample: the graphs of a batch are known as it begins."""

    def finish(self) -> _Sample:
        """Nothing is left to wait for."""
        return self

    def record_stream(self, stream: Any) -> None:
        """Nothing lies on a GPU."""


def _upload(batch: Any, device: torch.device) -> Any:
    """A batch of the CPU on a GPU, copied while the host goes on."""

    def copy(value: Any) -> Any:
        is_plain = isinstance(value, Tensor) and value.layout is torch.strided
        return (value.pin_memory() if is_plain else value).to(device, non_blocking=True)

    return batch.apply(copy)
