"""Rows of nodes and edges by id, wherever they are: own ones, copies kept here, and the rest in one exchange."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.distributed.communicator import Communicator
from pyg_direct.distributed.message import Unpacker, pack
from pyg_direct.distributed.part import GraphPart, Table
from pyg_direct.errors import ArgumentError
from pyg_direct.features.feature import Feature

# Times of nodes, which are fetched by this name, but are no attribute of batches.
TIME = ":time"


class Wanted(NamedTuple):
    """Rows that are wanted.

    Attributes:
        kind: Node type or relation.
        ids: int64 `[n]`, on the device of the part.
        owners: Their parts, int64 `[n]`.
        names: Which attributes; None for all.
    """

    kind: Any
    ids: Tensor
    owners: Tensor
    names: Sequence[str] | None = None


class RowExchange:
    """Fetches rows from their owners. Its calls are collective.

    Args:
        part: This process's part.
        communicator: The way to the owners of the other parts; None to answer only.
        features: Where the part's own rows lie, by kind and attribute; by default where the part has them.

    Attributes:
        features: Where the part's own rows lie, by kind and attribute.
        num_remote, num_kept: Distinct rows fetched from others so far, and rows of others that were kept here.
    """

    def __init__(self, part: GraphPart, communicator: Communicator | None,
                 features: Mapping[Any, Mapping[str, Feature]] | None = None) -> None:  # fmt: skip
        self._part, self._communicator = part, communicator
        given = features or {
            kind: {name: Feature(device=part.device).from_cpu_tensor(rows) for name, rows in table.rows.items()}
            for kind, table in part.tables.items()
        }
        self.features = {kind: dict(own) for kind, own in given.items()}
        for kind, times in part.times.items():
            self.features[kind][TIME] = Feature(device=part.device).from_cpu_tensor(times)
        self._kept: dict[Any, Table] = {}
        self.num_remote = self.num_kept = 0

    def names(self, kind: Any) -> list[str]:
        """Attributes of a kind."""
        return [name for name in self.features.get(kind, ()) if name != TIME]

    def describe(self) -> dict[str, Feature]:
        """Where the part's own rows lie, by kind and attribute."""
        return {name if self._part.manifest.is_homogeneous else f"{kind}.{name}": feature
                for kind, features in self.features.items() for name, feature in features.items()
                if name != TIME}  # fmt: skip

    def fetch(self, wanted: Sequence[Wanted]) -> list[dict[str, Tensor]]:
        """The rows by attribute, in the order of the ids; one exchange for all that is wanted.

        Raises:
            IdError: an id that its owner does not hold.
        """
        own_rank, size = self._part.part, self._part.num_parts
        # Others of this call, distinct and by owner: what is asked, and where its rows belong.
        asked: list[list[Tensor]] = [[] for _ in range(size)]
        gaps: list[tuple[Tensor, Tensor]] = []
        out = [self._read_here(one, asked, gaps) for one in wanted]
        counts = [torch.tensor([ids.numel() for ids in own], dtype=torch.int64, device=self._part.device)
                  for own in asked]  # fmt: skip
        none = torch.empty(0, dtype=torch.uint8, device=self._part.device)
        messages = [none if rank == own_rank or not int(counts[rank].sum()) else pack([counts[rank], *asked[rank]])
                    for rank in range(size)]  # fmt: skip
        received = self._swap(messages, wanted)
        unpackers = [Unpacker(message) for message in received]
        for number, one in enumerate(wanted):
            places, order = gaps[number]
            for name in self._names(one):
                feature = self.features[one.kind][name]
                shape = feature.shape[1:]
                parts = [unpackers[rank].take(feature.dtype, asked[rank][number].numel(), *shape)
                         for rank in range(size) if rank != own_rank]  # fmt: skip
                if places.numel():
                    out[number][name][places] = torch.cat(parts)[order]
        return out

    def _swap(self, messages: list[Tensor], wanted: Sequence[Wanted]) -> list[Tensor]:
        """What the owners answer; others are answered meanwhile."""
        assert self._communicator is not None
        requests = self._communicator.exchange(messages, "ids")
        kinds = [(one.kind, self._names(one)) for one in wanted]
        return self._communicator.exchange([self.answer(message, kinds) for message in requests], "rows")

    def _names(self, one: Wanted) -> list[str]:
        return self.names(one.kind) if one.names is None else list(one.names)

    def _read_here(self, one: Wanted, asked: list[list[Tensor]], gaps: list[tuple[Tensor, Tensor]]
                   ) -> dict[str, Tensor]:  # fmt: skip
        """Rows of own and kept ids; the ids of others are noted for their owners."""
        own_rank, names = self._part.part, self._names(one)
        is_own = one.owners == own_rank
        here = is_own.nonzero().view(-1)
        places = self._part.tables[one.kind].locate(one.ids[here]) if names else here[:0]
        out = {}
        for name in names:
            feature = self.features[one.kind][name]
            out[name] = torch.empty((one.ids.numel(), *feature.shape[1:]), dtype=feature.dtype, device=one.ids.device)
            out[name][here] = feature.read(places)
        there = (~is_own).nonzero().view(-1) if names else here[:0]
        there = self._read_kept(one, there, out)
        distinct, order = one.ids[there].unique(return_inverse=True)
        owners = one.owners.new_empty(distinct.numel())
        owners[order] = one.owners[there]
        by_owner = owners.argsort(stable=True)
        bounds = torch.searchsorted(owners[by_owner], torch.arange(len(asked) + 1, device=owners.device)).tolist()
        for rank, (low, high) in enumerate(itertools.pairwise(bounds)):
            asked[rank].append(distinct[by_owner[low:high]])
        gaps.append((there, by_owner.argsort()[order]))
        self.num_remote += distinct.numel()
        return out

    def _read_kept(self, one: Wanted, there: Tensor, out: dict[str, Tensor]) -> Tensor:
        """Fill in rows of which a copy is kept; the places that are left."""
        kept = self._kept.get(one.kind)
        if kept is None or not kept.ids.numel() or not there.numel():
            return there
        ids = one.ids[there]
        at = torch.searchsorted(kept.ids, ids).clamp_(max=kept.ids.numel() - 1)
        is_kept = kept.ids[at] == ids
        found = there[is_kept]
        for name in out:
            out[name][found] = kept.rows[name][at[is_kept]]
        self.num_kept += found.numel()
        return there[~is_kept]

    def answer(self, message: Tensor, kinds: Sequence[tuple[Any, Sequence[str]]]) -> Tensor:
        """The rows that another process asks for, as bytes.

        Args:
            message: Numbers of ids and ids, kind after kind; empty where nothing is asked for.
            kinds: What it asks for: node types or relations, and names of attributes.
        """
        if not message.numel():
            return message
        unpacker, rows = Unpacker(message), []
        for (kind, names), count in zip(kinds, unpacker.take(torch.int64, len(kinds)).tolist(), strict=True):
            places = self._part.tables[kind].locate(unpacker.take(torch.int64, count)) if count else None
            rows += [] if places is None else [self.features[kind][name].read(places) for name in names]
        return pack(rows)

    def keep(self, ids: Mapping[Any, Tensor]) -> None:
        """Keep copies of rows of other parts, by kind; replaces those kept before.

        Collective; ids of this part are ignored.
        """
        wanted = []
        for kind in self._part.tables:
            own = ids.get(kind, torch.empty(0, dtype=torch.int64)).to(self._part.device).long().unique()
            owners = self._part.owners(kind, own) if isinstance(kind, str) else own.new_full(own.shape, -1)
            if own.numel() and not isinstance(kind, str):
                raise ArgumentError(f"ids must be of node types, got {kind}")
            is_remote = owners != self._part.part
            wanted.append(Wanted(kind, own[is_remote], owners[is_remote], list(self.features[kind])))
        self._kept = {}
        rows = self.fetch(wanted)
        self.num_remote = 0
        self._kept = {one.kind: Table(one.ids, own) for one, own in zip(wanted, rows, strict=True)}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies that are kept."""
        return sum(t.numel() * t.element_size() for table in self._kept.values() for t in table.rows.values())
