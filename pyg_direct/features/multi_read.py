"""Features of all types of a batch that lie whole in memory of the device, read in one launch.

`TypedRows` reads the types of a batch; `ReadTyped` is the launch for types whose rows have one form. `ReadTogether`
reads features of short rows by the same ids, such as labels and masks, in one launch instead of one each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.features.feature import Feature
from pyg_direct.features.memory_rows import MemoryRows
from pyg_direct.ops.rows.gather_rows import MOST_TABLES, NarrowReader, TypedReader, fits_typed, is_narrow, list_layout
from pyg_direct.ops.rows.upload import upload
from pyg_direct.runtime.host.tensor_views import LazyDict

# One Python step for all features, in every batch.
_READ_SERVED, _READ_TIER, _READS_ALL = attrgetter("served"), attrgetter("tier"), attrgetter("reads_all")


def _list_rows(features: Mapping[Any, Feature]) -> tuple[list[MemoryRows], list[Tensor], Tensor | None]:
    """Return (rows of features that lie whole in memory of the device, tables, word for bad ids on a GPU)."""
    rows = [feature.stored for feature in features.values() if isinstance(feature.stored, MemoryRows)]
    return rows, [own.tier.table for own in rows], None if rows[0].errors is None else rows[0].errors.word


class ReadTyped:
    """Features of several types that are read together, by the ids of one batch or of several.

    Args:
        features: By (type or relation, key); of one dtype and row, for which `fits_typed` holds.
        types: The types, or relations, in the order of the ids of a batch.
    """

    def __init__(self, features: Mapping[tuple[Any, str], Feature], types: Sequence[Any], num_batches: int) -> None:
        self.names = list(features)
        self.rows, tables, errors = _list_rows(features)
        self.reader = TypedReader(tables * num_batches, errors)
        order = {kind: number for number, kind in enumerate(types)}
        # List of ids that each table is read by.
        self.lists = tuple(len(types) * batch + order[kind] for batch in range(num_batches) for kind, _ in self.names)
        self.reads_all = self.lists == tuple(range(len(types) * num_batches))
        # Takes the items of these lists, at least two.
        self.take: Callable[[Sequence[int]], tuple[int, ...]] = itemgetter(*self.lists)

    def read(self, ids: Tensor, layout: Tensor, num_rows: int) -> Tensor:
        """Return the rows of all features, batch after batch, by ids that a sampler made; see `TypedReader.read`."""
        self.rows[0].raise_earlier_error()
        return self.reader.read(ids, layout, num_rows)

    def count(self, ids: Sequence[Tensor]) -> None:
        """Count the reads by the ids of each type, if counting was requested."""
        for number, which in enumerate(self.lists):
            rows = self.rows[number % len(self.rows)]
            if rows.served is not None:
                rows.count(ids[which])


class TypedRows:
    """All features that can be read by the packed ids of a batch, or of several.

    Args:
        types: The types, or relations, in the order of those ids.
    """

    def __init__(self, features: Mapping[tuple[Any, str], Feature], types: Sequence[Any]) -> None:
        forms: dict[object, dict[tuple[Any, str], Feature]] = {}
        for name, feature in features.items():
            table = feature.whole
            if table is not None and fits_typed(table):
                forms.setdefault((table.dtype, table.shape[1:]), {})[name] = feature
        self._forms = [group for group in forms.values() if len(group) > 1]
        self._types = list(types)
        # By the number of batches: the last group of an epoch is shorter.
        self._groups: dict[int, list[ReadTyped]] = {}
        # Rows of all features, and the tables that they lie in.
        self._rows: list[MemoryRows] = []
        self._tiers: list[Any] = []
        self.names = {name for group in self._forms for name in group}

    def read(self, ids: Tensor, sizes: Sequence[int], starts: Tensor | None = None
             ) -> tuple[list[LazyDict[tuple[Any, str], Tensor]], list[Tensor]]:  # fmt: skip
        """Return (rows of each batch by name, which are viewed at the first use; the tensors whose memory they share).

        Args:
            ids: Ids within their types, batch after batch and type after type, int64 on the device; more may follow.
            starts: First position of each batch and type, the end of the last, and a zero for each, int64 on the
                device; None if they are not there.
        """
        num_batches = len(sizes) // max(1, len(self._types))
        if not self._forms or not num_batches:
            return [LazyDict(dict) for _ in range(num_batches)], []
        if not all(map(is_, map(_READ_TIER, self._rows), self._tiers)):
            # Rows have moved since.
            self._groups.clear()
        groups = self._groups.get(num_batches)
        if groups is None:
            groups = [ReadTyped(group, self._types, num_batches) for group in self._forms]
            self._groups[num_batches] = groups
            self._rows = [rows for group in groups for rows in group.rows]
            self._tiers = [rows.tier for rows in self._rows]
        if starts is not None and starts.shape[0] == 2 * len(sizes) + 1 and all(map(_READS_ALL, groups)):
            layouts = [(sizes, starts)] * len(groups)
        else:
            layouts = self._upload_layouts(groups, sizes, ids.device)
        memory, parts, is_counting = [], [], any(map(_READ_SERVED, self._rows))
        for group, (counts, words) in zip(groups, layouts, strict=True):
            whole = group.read(ids, words, sum(counts))
            memory.append(whole)
            parts.append((group.names, whole, counts))
            if is_counting:
                group.count(ids[: sum(sizes)].split(list(sizes)))
        return [LazyDict(partial(_view_rows, parts, number)) for number in range(num_batches)], memory

    @staticmethod
    def _upload_layouts(groups: Sequence[ReadTyped], sizes: Sequence[int], device: torch.device
                        ) -> list[tuple[Sequence[int], Tensor]]:  # fmt: skip
        """Return (ids of each list, layout on the device) for each group of types; all layouts travel together."""
        # Groups of the same types have one layout. Lists: a call of NumPy takes as long as one of them.
        by_lists, begins = {group.lists: group.take for group in groups}, list(accumulate(sizes, initial=0))
        counts = {lists: take(sizes) for lists, take in by_lists.items()}
        layouts = [list_layout(take(begins), counts[lists]) for lists, take in by_lists.items()]
        words = upload(np.array([*chain.from_iterable(layouts)], np.int64), device)
        parted = torch.unsafe_split_with_sizes(words, list(map(len, layouts))) if len(layouts) > 1 else (words,)
        of_lists = dict(zip(counts, parted, strict=True))
        return [(counts[group.lists], of_lists[group.lists]) for group in groups]


def _view_rows(parts: Sequence[tuple[Sequence[tuple[Any, str]], Tensor, Sequence[int]]], number: int
               ) -> dict[tuple[Any, str], Tensor]:  # fmt: skip
    """View the rows of a batch of several: parts of (names of a batch, rows of all batches, their counts)."""
    found: dict[tuple[Any, str], Tensor] = {}
    for names, whole, counts in parts:
        size = len(names)
        own = list(counts[number * size : (number + 1) * size])
        begin, count = sum(counts[: number * size]), sum(own)
        rows = whole if count == whole.shape[0] else whole.narrow(0, begin, count)
        found.update(zip(names, torch.unsafe_split_with_sizes(rows, own), strict=True))
    return found


class ReadTogether:
    """Features whose rows `read` returns by name.

    Args:
        features: Two to `MOST_TABLES` features, as `group_narrow` groups them.
    """

    def __init__(self, features: Mapping[str, Feature]) -> None:
        self.names = list(features)
        self._rows, tables, errors = _list_rows(features)
        assert errors is not None
        self._reader = NarrowReader(tables, errors)

    def read(self, ids: Tensor, memory: list[Tensor] | None = None) -> dict[str, Tensor]:
        """Read rows of ids that a sampler made, by name, equal to `Feature.read` of each.

        Args:
            ids: int64 `[n]`, contiguous and on the device of the features.
            memory: Receives the tensors that own the memory of all rows.
        """
        self._rows[0].raise_earlier_error()
        if self._rows[0].served is not None:
            for rows in self._rows:
                rows.count(ids)
        return dict(zip(self.names, self._reader.read(ids, memory), strict=True))


def group_narrow(features: Mapping[str, Feature]) -> list[ReadTogether]:
    """Group the features that can be read together: short rows, all in GPU memory, equally many."""
    fitting: dict[int, list[str]] = {}
    for name, feature in features.items():
        table = feature.whole
        if table is not None and feature.device.type != "cpu" and is_narrow(table):
            fitting.setdefault(len(table), []).append(name)
    groups = [names[i : i + MOST_TABLES] for names in fitting.values() for i in range(0, len(names), MOST_TABLES)]
    return [ReadTogether({name: features[name] for name in group}) for group in groups if len(group) > 1]
