"""Rows that a training loop writes back: batches that were made ahead are given the rows as they are by then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_direct.errors import LoaderWarning, warn
from pyg_direct.features.feature import Feature
from pyg_direct.loader.pipeline import take_memory
from pyg_direct.runtime.stream import current_stream

# Of these batches have the sampler's.
_SAMPLED = ("adj_t", "batch", "edge_index", "num_nodes")
# Stands for a batch whose rows are read when it is handed out.
LATER = object()


class Marks:
    """The attributes of a graph when their rows were placed: which values they were, and how often each was written.

    Torch counts writes to a tensor, but none through NumPy or `.data`.

    Args:
        data: A `Data`, a `HeteroData`, a feature store, or a pair whose first that is.
    """

    def __init__(self, data: Any) -> None:
        data = data[0] if isinstance(data, (tuple, list)) else data
        if isinstance(data, Data):
            mappings = [data._store._mapping]
        elif isinstance(data, HeteroData):
            mappings = [store._mapping for store in data.stores]
        else:
            # One of ours; what other stores do is not known.
            mappings = [part for part in (getattr(data, "_features", None),) if isinstance(part, dict)]
        self._sizes = [(mapping, len(mapping)) for mapping in mappings]
        self._parts = [(mapping, key, value, _count_writes(value)) for mapping in mappings
                       for key, value in mapping.items() if key not in _SAMPLED]  # fmt: skip

    def are_current(self) -> bool:
        """Report whether nothing has been written, replaced or added since."""
        for mapping, key, value, writes in self._parts:
            if mapping.get(key) is not value or _count_writes(value) != writes:
                return False
        return all(len(mapping) == size for mapping, size in self._sizes)


def _count_writes(value: Any) -> int:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return value.num_writes if isinstance(value, Feature) else 0


class FreshRows:
    """Makes the batches of an epoch so that each has the rows that the graph holds when it is handed out.

    So has PyG's loader without workers. A batch that was made ahead of a write is read again; after that only sampling
    goes ahead, so that rows are read once.

    Args:
        loader: The loader, an `EpochLoader`.
        make: Samples a batch again: (number, seeds) -> sample.
        fetch: The stage of the loader, or of its groups: (sample, number, what it is made from) -> batch, or batches.
        is_ahead: Whether it is called before a batch is asked for.
    """

    def __init__(self, loader: Any, make: Callable[[int, Any], Any], fetch: Callable[..., Any], is_ahead: bool
                 ) -> None:  # fmt: skip
        self._loader, self._make, self._fetch, self._is_ahead = loader, make, fetch, is_ahead
        self._made: dict[int, tuple[Any, Any, Any]] = {}
        # A function of the user's is called from one thread at a time.
        self._lock = None if loader._is_own() else threading.Lock()

    def fetch(self, sample: Any, number: int, item: Any) -> Any:
        """The stage, with a note of the rows that were read."""
        loader = self._loader
        if not self._is_ahead:
            self._made[number] = sample, item, loader._current_rows()
            return self._fetch(sample, number, item)
        # Before they are read: a write meanwhile is found when the batch is handed out.
        self._made[number] = sample, item, loader._rows()
        if loader._reads_late:
            return [LATER] * len(item) if isinstance(item, list) else LATER
        if self._lock is None:
            return self._fetch(sample, number, item)
        with self._lock:
            return self._fetch(sample, number, item)

    def hand_out(self, number: int, made: Any) -> Iterator[Any]:
        """The batches that a call of `fetch` made, one or those of a group, each with the rows of the moment."""
        sample, item, rows = self._made.pop(number)
        is_group = isinstance(item, list)
        ready, samples = (made, list(sample)) if is_group else ([made], [sample])
        work: list[tuple[int, Any]] = list(item) if is_group else [(number, item)]
        del made, sample
        # A group's batches are forgotten one by one.
        while ready:
            own, seeds = work.pop(0)
            yield self._renew(ready.pop(0), samples.pop(0), own, seeds, rows)

    def _renew(self, batch: Any, sample: Any, number: int, seeds: Any, rows: Any) -> Any:
        loader, is_later = self._loader, batch is LATER
        if not is_later and are_current(rows):
            return batch
        if not is_later and self._is_ahead:
            tell_written(loader)
            loader._reads_late = True
        loader._current_rows()
        if not loader._is_own() and not is_later:
            # Functions of the user's may have changed the sample.
            sample = self._make(number, seeds)
        if loader.device.type == "cuda":
            sample.record_stream(current_stream(loader.device.index))
        if self._lock is None:
            batch = loader._fetch(sample, number, seeds)
        else:
            with self._lock:
                batch = loader._fetch(sample, number, seeds)
        # It is made on the stream that it is used on.
        take_memory(batch)
        return batch


def are_current(rows: Any) -> bool:
    """Report whether the graph still holds the rows that were placed; True where that is not known."""
    marks: Marks | None = getattr(rows, "marks", None)
    return marks is None or marks.are_current()


def tell_written(loader: Any) -> None:
    """Warn, once for a loader, that rows are written while an epoch runs."""
    if not loader._reads_late:
        saving = "prefetch=0" if loader.prefetch > 0 else "super_batch=1"
        warn(
            "rows of data were written while an epoch runs: batches made ahead are read again, and rows are read when "
            f"a batch is asked for from now on; {saving} saves the second read. Where rows are copies, on a GPU or in "
            "store_dtype, each batch after a write copies its attribute anew",
            LoaderWarning,
        )
