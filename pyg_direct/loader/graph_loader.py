"""Base of loaders of many small graphs: everything except the way a batch is joined.

`DataLoader` joins graphs into one, `DenseDataLoader` stacks them, `DataListLoader` lists them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch_geometric.loader import DynamicBatchSampler, ImbalancedSampler

from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning, warn
from pyg_direct.loader.arguments import check_batch_size, settle_workers
from pyg_direct.loader.base_loader import ALONE, EpochLoader, make_batch
from pyg_direct.loader.batch_report import EpochRecord, Stages
from pyg_direct.loader.batch_sampler import Seeds, can_share
from pyg_direct.loader.collate.graph_columns import move_all
from pyg_direct.loader.collate.graph_sources import OneByOneError, Source, read_source
from pyg_direct.loader.memory_placement import Placed
from pyg_direct.loader.prefetch.batch_groups import GraphGroups, Made, SharedRows
from pyg_direct.ops.argument_checks import check_flag
from pyg_direct.profiling import show_bytes
from pyg_direct.progress import announce
from pyg_direct.runtime.cuda.device import budget_of, free_bytes, resolve_device
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.typing import Device

# Graphs per batch that are checked for writes while an epoch runs.
_LOOKED_AT = 2
# Samplers that draw from torch's generator when an epoch begins, and later only from generators of their own.
_DRAW_AT_ONCE = (DistributedSampler, ImbalancedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler,
                 WeightedRandomSampler)  # fmt: skip


class Collection(Protocol):
    """All graphs of a data set, and batches of any of them.

    Attributes:
        device: Device of the joined values and of batches; None before they are placed.
    """

    source: Source
    device: torch.device | None

    def count_bytes(self) -> int:
        """Count the bytes of the joined values."""

    def place(self, device: torch.device) -> None:
        """Move the joined values, and later batches, to a device."""

    def collate(self, numbers: Tensor) -> Any:
        """Build the batch of these graphs, int64 `[B]` on the CPU."""


class GroupCollection(Collection, Protocol):
    """All graphs of a data set, of which a GPU may make several batches together.

    Attributes:
        makes_groups: True if it does now.
    """

    makes_groups: bool

    def collate_group(self, batches: Sequence[Tensor], most_bytes: int) -> list[Made]:
        """Make the first batches, as many as take `most_bytes` on the GPU, and at least one."""


class GraphLoader(EpochLoader):
    """Batches of the graphs of a data set, cut out of a store, or made one by one as by torch's loader.

    Subclasses implement the joining of graphs (`_join`), and call `_open` before torch's constructor.
    """

    dataset: Any
    collate_fn: Any
    transform = None
    transform_sampler_output = None
    _orders_as_torch = True
    _graphs: Collection | None = None
    _item = ("graph", None)
    # True after graphs were written while an epoch ran: they are then joined when a batch is requested.
    _joins_late = False

    def _open(self, dataset: Any, batch_size: int | None, shuffle: bool, device: Device, placement: str,
              seed: int | None, prefetch: int | None, ranks: Any, uneven: str, kwargs: Mapping[str, Any]
              ) -> dict[str, Any]:  # fmt: skip
        """Check the arguments and read the data set; returns the arguments of torch's loader."""
        if prefetch is None:
            prefetch = int(resolve_device(device).type == "cuda")
        self._settle(device, placement, None, None, 1, seed, prefetch, ranks, uneven)
        check_flag("shuffle", shuffle)
        check_batch_size(batch_size)
        if isinstance(dataset, IterableDataset) or (batch_size is None and kwargs.get("batch_sampler") is None):
            raise NotImplementedError("a data set without a length, or batch_size=None, has no batches to cut out: "
                                      f"take torch_geometric.loader.{type(self).__name__}")  # fmt: skip
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ArgumentTypeError(f"dataset must have items and a length, got {type(dataset).__name__}")
        self._is_alone = batch_size == 1 and kwargs.get("batch_sampler") is None
        self._read(dataset)
        kwargs = settle_workers(type(self), kwargs, self.device, may_start=False, num_seeds=len(dataset),
                                needs_workers=self._needs_workers(dataset))  # fmt: skip
        return {"batch_size": batch_size, "shuffle": shuffle and len(dataset) > 0, **kwargs}

    def _join(self, source: Source) -> Collection:
        """Join all graphs."""
        raise NotImplementedError

    def _needs_workers(self, dataset: Any) -> bool:
        """Check if Python makes graphs for each batch, which workers may do."""
        return self._graphs is None

    def _read(self, dataset: Any) -> None:
        """Collate the data set if it is not collated, or has changed since."""
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
            announce(f"the data set of a {type(self).__name__} is not collated once, as {reason}: its graphs are made "
                     "one by one and joined by PyG's own code for each batch, which takes longer")  # fmt: skip

    def _collate(self, source: Source) -> Collection:
        try:
            return self._join(source)
        except (ArgumentError, ArgumentTypeError) as error:
            if not self._is_alone:
                raise
            # A single graph needs no match with others.
            raise OneByOneError(str(error)) from error

    def _prepare(self) -> None:
        self._read(self.dataset)
        graphs = self._graphs
        if graphs is not None and graphs.device is None:
            graphs.place(self._choose_device(graphs))

    def _choose_device(self, graphs: Collection) -> torch.device:
        """Choose the device of the store."""
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
        try:
            batch = self.collate_fn(items)
        except Exception as error:
            self._name_graph(positions, items, error)
            raise
        return move_all(batch, self.device)

    def _name_graph(self, positions: list[int], items: list[Any], error: Exception) -> None:
        """Name the graph of a batch that the first one cannot be joined with, if there is one.

        Raises:
            ArgumentError, ArgumentTypeError: the number of the graph.
        """
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
        for position, item in zip(positions, items, strict=True):
            try:
                # The first graph with itself: if that fails too, the graphs need not differ.
                self.collate_fn([items[0], item])
            except Exception as reason:
                if item is items[0]:
                    return
                raise kind(f"dataset must hold graphs that can be joined, got graph {position}, which cannot be joined "
                           f"with graph {positions[0]}: {reason}") from error  # fmt: skip

    def _work_here(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None = None
                   ) -> Iterator[Any]:  # fmt: skip
        graphs = self._graphs
        if graphs is None:
            return self._make_one_by_one(key, batches, record)
        if record is None and self.prefetch == 0 and self.device.type == "cpu":
            return (self._fetch(None, number, seeds) if self._is_written(graphs, seeds) else
                    graphs.collate(seeds.nodes) for number, seeds in batches)  # fmt: skip
        if self.prefetch > 0 and getattr(graphs, "makes_groups", False) and self._draws_at_once():
            return self._work_in_groups(cast(GroupCollection, graphs), batches, record)
        return self._work_ahead(graphs, key, batches, record)

    def _draws_at_once(self) -> bool:
        """Check that a program cannot see how far ahead its sampler is drawn from."""
        if can_share(self):  # type: ignore[arg-type]
            return True
        batching, sampler = self.batch_sampler, self.sampler  # type: ignore[attr-defined]
        if type(batching) is DynamicBatchSampler:
            return batching.dataset is self.dataset
        is_known = type(batching) is BatchSampler and type(sampler) in _DRAW_AT_ONCE
        return is_known and getattr(sampler, "generator", None) is None

    def _work_in_groups(self, graphs: GroupCollection, batches: Iterator[tuple[int, Seeds]],
                        record: EpochRecord | None) -> Iterator[Any]:  # fmt: skip
        """Iterate over batches of a collated data set that a GPU makes in groups; see `_work_ahead`."""

        def make(sample: Any, number: int, work: Sequence[tuple[int, Seeds]], most_bytes: int) -> list[Made]:
            if self._joins_late:
                return [(None, [])] * len(work)
            return graphs.collate_group([seeds.nodes for _, seeds in work], most_bytes)

        fetch = make
        if record is not None:
            # The times of a group count for its first batch.
            fetch = record.around(Stages(self._submit, lambda pending, number: pending, make)).fetch
        groups = GraphGroups(batches, lambda work, most: fetch(None, work[0][0], work, most), self.device)
        for number, seeds, batch in groups:
            if self._is_written(graphs, seeds):
                yield self._fetch(None, number, seeds)
            else:
                yield batch
            del batch

    def _work_ahead(self, graphs: Collection, key: EpochKey, batches: Iterator[tuple[int, Seeds]],
                    record: EpochRecord | None) -> Iterator[Any]:  # fmt: skip
        """Iterate over batches of a collated data set, prefetched; batches with graphs written since are made again."""
        given: deque[tuple[int, Seeds]] = deque()

        def choose() -> Iterator[Any]:
            for number, seeds in batches:
                given.append((number, seeds))
                # Graphs that change before another epoch do not count for this one.
                yield number, _Choice(graphs, seeds.nodes)

        for batch in super()._work_here(key, choose(), record):
            number, seeds = given.popleft()
            yield self._fetch(None, number, seeds) if self._is_written(graphs, seeds) else batch

    def _is_written(self, graphs: Collection, seeds: Seeds) -> bool:
        """Check if graphs were written while an epoch runs, in a sample of the batch; warns once."""
        if self._joins_late:
            return True
        looked_at: Sequence[int] = ()
        if not graphs.source.is_checked_whole:
            looked_at = seeds.nodes[:: -(-seeds.nodes.numel() // _LOOKED_AT) or 1].tolist()
        if not graphs.source.were_written(looked_at):
            return False
        self._joins_late = True
        warn("graphs of the data set were written while an epoch runs: from now on PyG's own code joins the graphs of "
             "each batch when it is asked for, which takes longer; write to them between epochs, and make a new loader",
             LoaderWarning)  # fmt: skip
        return True

    def _make_one_by_one(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None
                         ) -> Iterator[Any]:  # fmt: skip
        """Iterate over batches of PyG's collation, each made on request, so that the program's functions draw in PyG's
        order.
        """
        stages = self._stages(key, record)
        for number, seeds in batches:
            yield make_batch(stages, number, seeds)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the next epoch, or the remaining batches of a resumed one."""
        if self.num_workers > 0 and self.seed is None and self._ranks.ranks is None and self._drawn is None:
            return self._iterate_as_torch()
        return super().__iter__()

    def _iterate_as_torch(self) -> Iterator[Any]:
        """Iterate as PyG's loader does, with all of torch's support for workers; without resuming."""
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        for number, batch in enumerate(DataLoader.__iter__(self), 1):  # type: ignore[arg-type]
            self.__dict__["_standing"] = (epoch, number, None)
            yield move_all(batch, self.device)
        self.__dict__["_standing"] = (epoch + 1, 0, None)

    def _work_with_workers(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]]) -> Iterator[Any]:
        options = {name: getattr(self, name) for name in ("num_workers", "prefetch_factor", "pin_memory", "timeout",
                                                          "worker_init_fn", "multiprocessing_context")}  # fmt: skip
        positions = [seeds.positions.tolist() for _, seeds in batches]
        generator = torch.Generator().manual_seed(key.of_order() % 2**63)
        pool: Any = DataLoader(self.dataset, batch_sampler=positions, collate_fn=self.collate_fn,
                                                generator=generator, **options)  # fmt: skip
        for batch in pool:
            yield move_all(batch, self.device)

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        if self._graphs is None:
            return [f"graphs: {len(self.dataset)}, made one by one"], {}
        self._prepare()
        source, where = self._graphs.source, self._graphs.device
        return [f"graphs: {source.count}, {show_bytes(self._graphs.count_bytes())} on {where}"], {}

    def _list_options(self) -> Iterator[str]:
        if self._graphs is None:
            yield "made one by one"

    def _summarise_places(self) -> Iterable[Placed] | None:
        graphs = self._graphs
        if graphs is None:
            return ()
        return None if graphs.device is None else [Placed("graphs", graphs.count_bytes(), str(graphs.device))]


class _Choice(NamedTuple):
    """The graphs of a batch.

    Attributes:
        numbers: Numbers of the batch's graphs, int64 `[B]`.
    """

    graphs: Collection
    numbers: Tensor


class _Sample:
    """Placeholder for a sample: the graphs of a batch are known from its start."""

    def finish(self) -> _Sample:
        """Return itself: there is no wait."""
        return self

    def record_stream(self, stream: Any) -> None:
        """Do nothing: no part lies on a GPU."""


def _upload(batch: Any, device: torch.device) -> Any:
    """Copy a batch from the CPU to a GPU, asynchronously."""

    def copy(value: Any) -> Any:
        is_plain = isinstance(value, Tensor) and value.layout is torch.strided
        return (value.pin_memory() if is_plain else value).to(device, non_blocking=True)

    return batch.apply(copy)
