"""`PeerRows`: rows of other parts that are read where they lie, in memory that processes of one host share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_direct.distributed.part import GraphPart, Table
from pyg_direct.distributed.together import tell
from pyg_direct.features.feature import Feature
from pyg_direct.runtime.communicator import Communicator
from pyg_direct.runtime.group import identify_host
from pyg_direct.runtime.shared import SharedMemory, open_shared, share


class PeerRows:
    """The tables of the parts of other processes of this host. Making it is collective.

    Args:
        part: This process's part, on the CPU.
        communicator: The way to the others, in whose turn this is.
        features: The rows of the part, by kind and attribute, which are moved to memory that others see.

    Attributes:
        parts: Whose rows are read in place.
        is_complete: Whether all processes read the rows of all others in place.
    """

    def __init__(self, part: GraphPart, communicator: Communicator,
                 features: Mapping[Any, Mapping[str, Feature]]) -> None:  # fmt: skip
        # Kept until the others have opened it.
        given, words = [], []
        for kind, table in part.tables.items():
            ids, own = share(table.ids.clone()), [feature.share_ipc().host for feature in features[kind].values()]
            given += [ids, *own]
            words.append([len(table.ids), *(memory.descriptor for memory in (ids, *own))])
        told = tell(communicator, [identify_host(), os.getpid(), words])
        self._tables: dict[int, dict[Any, Table]] = {}
        for rank, (host, process, theirs) in enumerate(told):
            if rank == communicator.rank or host != identify_host():
                continue
            # Where the system keeps them apart, rows are exchanged.
            with contextlib.suppress(OSError):
                self._tables[rank] = _open_tables(process, theirs, part, features)
        self.parts = sorted(self._tables)
        self.is_complete = min(communicator.agree(int(len(self.parts) == communicator.size - 1))) > 0
        del given

    def find(self, kind: Any, ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Mapping[str, Tensor]]]:
        """(which of the ids, places of these, rows by attribute) of each part that has some.

        Args:
            kind: Node type or relation.
            ids: Ids that parts of `parts` own, or others, which are in none.
        """
        for tables in self._tables.values():
            places = tables[kind].find(ids)
            here = (places >= 0).nonzero().view(-1)
            if here.numel():
                yield here, places[here], tables[kind].rows


def _open_tables(process: int, words: list[list[int]], part: GraphPart, features: Mapping[Any, Mapping[str, Feature]]
                 ) -> dict[Any, Table]:  # fmt: skip
    """The tables of a process, whose attributes are those of this one."""
    tables = {}
    for kind, (count, ids, *rows) in zip(part.tables, words, strict=True):
        shared = {name: _view(process, one, feature.dtype, (count, *feature.shape[1:]))
                  for (name, feature), one in zip(features[kind].items(), rows, strict=True)}  # fmt: skip
        tables[kind] = Table(_view(process, ids, torch.int64, (count,)), shared)
    return tables


def _view(process: int, descriptor: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    memory: SharedMemory = open_shared(process, descriptor, torch.Size(shape).numel() * dtype.itemsize)
    return memory.view(dtype, shape)
