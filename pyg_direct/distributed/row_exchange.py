"""Rows of nodes and edges by id: own rows, local copies, and all others in one exchange (`RowExchange`).

`PeerRows` are rows of other parts in memory that the processes of one host share; they are read in place. `Parcel` is
the layout in bytes of rows of several kinds and attributes. `pack` and `Unpacker` put arrays of several dtypes into one
message and back.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pyg_direct.distributed.captured_rows import CapturedRows
from pyg_direct.distributed.graph_part import GraphPart, Table
from pyg_direct.distributed.segment_rows import RowsOfKind, SegmentRows
from pyg_direct.errors import ArgumentError
from pyg_direct.features.feature import Feature
from pyg_direct.graph.hetero_topo import tell_apart
from pyg_direct.ops.rows.gather_rows import gather_rows, scatter_rows
from pyg_direct.ops.sampling.join_remote_edges import group_keys, make_keys
from pyg_direct.runtime.comm.communicator import Communicator, gather_json
from pyg_direct.runtime.comm.host_group import identify_host
from pyg_direct.runtime.host.shared_memory import SharedMemory, open_shared, share
from pyg_direct.runtime.host.tensor_views import ALIGNMENT, align, as_bytes


class _Array(NamedTuple):
    """Rows of one attribute: number of the kind, name, dtype, shape and bytes of a row."""

    number: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bytes: int


class Parcel(NamedTuple):
    """Layout of the rows of a request, known to both sides. A single attribute is sent without a copy.

    Attributes:
        kinds: (kind, names of attributes) of the request.
    """

    kinds: list[tuple[Any, list[str]]]
    arrays: list[_Array]

    @classmethod
    def of(cls, kinds: Sequence[tuple[Any, Sequence[str]]], features: Mapping[Any, Mapping[str, Any]]) -> Parcel:
        """Make the parcel of some attributes.

        Args:
            features: By kind and name, an object with the dtype and shape of the rows.
        """
        arrays = []
        for number, (kind, names) in enumerate(kinds):
            for name in names:
                feature = features[kind][name]
                shape = tuple(feature.shape[1:])
                arrays.append(_Array(number, name, feature.dtype, shape, math.prod(shape) * feature.dtype.itemsize))
        return cls([(kind, list(names)) for kind, names in kinds], arrays)

    @property
    def num_kinds(self) -> int:
        """Number of kinds K."""
        return len(self.kinds)

    @property
    def is_single(self) -> bool:
        """True for one array of one kind."""
        return len(self.arrays) == 1 and self.num_kinds == 1

    def sizes(self, counts: np.ndarray) -> list[int]:
        """Return bytes for each receiver, given rows by receiver and kind `[S, K]`."""
        found: list[int] = self._sizes(counts).sum(1).tolist()
        return found

    def _sizes(self, counts: np.ndarray) -> np.ndarray:
        """Return bytes of each array for each receiver, int64 `[S, A]`."""
        sizes = counts[:, [array.number for array in self.arrays]] * np.array(
            [array.row_bytes for array in self.arrays], np.int64)  # fmt: skip
        return sizes if self.is_single else align(sizes)

    def pack(self, rows: Sequence[Tensor], counts: np.ndarray) -> Tensor:
        """Pack rows of all arrays, by receiver."""
        if self.is_single:
            return as_bytes(rows[0])
        if not rows:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        pieces = []
        splits = [as_bytes(array).split((counts[:, about.number] * about.row_bytes).tolist())
                  for array, about in zip(rows, self.arrays, strict=True)]  # fmt: skip
        padding = rows[0].new_zeros(ALIGNMENT, dtype=torch.uint8)
        for receiver in range(len(counts)):
            for parts in splits:
                pieces.append(parts[receiver])
                if pad := -parts[receiver].numel() % ALIGNMENT:
                    pieces.append(padding[:pad])
        return torch.cat(pieces) if pieces else padding[:0]

    def open(self, messages: Sequence[Tensor], counts: np.ndarray) -> dict[tuple[int, str], list[Tensor]]:
        """Return rows by number of kind and name, by sender, from one message for all senders or one for each.

        Args:
            messages: uint8.
            counts: Rows by sender and kind, int64 `[S, K]`.
        """
        if self.is_single and len(messages) == 1:
            array = self.arrays[0]
            return {(0, array.name): [_view(messages[0], array, int(counts.sum()))]}
        sizes = self._sizes(counts)
        found: dict[tuple[int, str], list[Tensor]] = {(array.number, array.name): [] for array in self.arrays}
        parts = messages[0].split(sizes.sum(1).tolist()) if len(messages) == 1 else messages
        for sender, message in enumerate(parts):
            at = 0
            for array, size in zip(self.arrays, sizes[sender].tolist(), strict=True):
                own = message[at : at + size]
                found[array.number, array.name].append(_view(own, array, int(counts[sender, array.number])))
                at += size
        return found


def _view(message: Tensor, array: _Array, count: int) -> Tensor:
    if count * array.row_bytes == 0:
        return torch.empty((count, *array.shape), dtype=array.dtype, device=message.device)
    return message[: count * array.row_bytes].view(array.dtype).view(count, *array.shape)


class PeerRows:
    """Tables of the parts of other processes on this host. The constructor is collective.

    Args:
        communicator: Communicator of all processes, in whose turn this is.
        features: The rows of the part, by kind and attribute; they are moved to shared memory.

    Attributes:
        is_complete: True if every process reads the rows of all others in place.
    """

    def __init__(self, part: GraphPart, communicator: Communicator,
                 features: Mapping[Any, Mapping[str, Feature]]) -> None:  # fmt: skip
        # Kept alive until the other processes have opened it.
        given, words = [], []
        for kind, table in part.tables.items():
            ids, own = share(table.ids.clone()), [feature.share_ipc().host for feature in features[kind].values()]
            given += [ids, *own]
            words.append([len(table.ids), *(memory.descriptor for memory in (ids, *own))])
        told = gather_json(communicator, [identify_host(), os.getpid(), words])
        self._tables: dict[int, dict[Any, Table]] = {}
        for rank, (host, process, theirs) in enumerate(told):
            if rank == communicator.rank or host != identify_host():
                continue
            # If the system does not allow shared memory, rows are exchanged.
            with contextlib.suppress(OSError):
                self._tables[rank] = _open_tables(process, theirs, part, features)
        self.parts = sorted(self._tables)
        self.is_complete = min(communicator.agree(int(len(self.parts) == communicator.size - 1))) > 0
        del given

    def find(self, kind: Any, ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Mapping[str, Tensor]]]:
        """Find (positions in `ids`, positions in the table, rows by attribute) for each part that holds some.

        Args:
            ids: Ids that parts of `parts` own, or others, which are not found.
        """
        for tables in self._tables.values():
            places = tables[kind].find(ids)
            here = (places >= 0).nonzero().view(-1)
            if here.numel():
                yield here, places[here], tables[kind].rows


def _open_tables(process: int, words: list[list[int]], part: GraphPart, features: Mapping[Any, Mapping[str, Feature]]
                 ) -> dict[Any, Table]:  # fmt: skip
    """Open the tables of a process, which have the attributes of this process's tables."""
    tables = {}
    for kind, (count, ids, *rows) in zip(part.tables, words, strict=True):
        shared = {name: _open_rows(process, one, feature.dtype, (count, *feature.shape[1:]))
                  for (name, feature), one in zip(features[kind].items(), rows, strict=True)}  # fmt: skip
        tables[kind] = Table(_open_rows(process, ids, torch.int64, (count,)), shared)
    return tables


def _open_rows(process: int, descriptor: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    memory: SharedMemory = open_shared(process, descriptor, torch.Size(shape).numel() * dtype.itemsize)
    return memory.view(dtype, shape)


# Times of nodes are fetched by this name; no attribute of batches has it.
TIME = ""


class Held(Protocol):
    """Rows of other parts that are here, such as a `Table`."""

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """Rows by attribute, `[n, ...]`."""

    def find(self, ids: Tensor) -> Tensor:
        """Find the positions of the rows of these ids, int64; -1 for an id that is not here."""


class Wanted(NamedTuple):
    """Requested rows of one kind.

    Attributes:
        ids: int64 `[n]`, on the device of the part.
        names: Names of attributes; None for all.
        owned: (node type, ids of it `[n]`): the nodes whose owners have the rows; None if the rows belong to the nodes.
        is_distinct: True if `ids` has no or few duplicates; duplicates are then sent again.
        known: Rows of other parts that the caller has already; None for none.
    """

    kind: Any
    ids: Tensor
    names: Sequence[str] | None = None
    owned: tuple[str, Tensor] | None = None
    is_distinct: bool = False
    known: Held | None = None


class Asked(NamedTuple):
    """Request to the owners of rows.

    Attributes:
        ids: Of all kinds, by kind, int64 `[n]`.
        order: Positions of the ids by owner, and by kind within each: other ranks first, then local copies.
        counts: Ids of each owner and kind, int64 `[P + 1, K]`; the last row counts local copies.
    """

    ids: Tensor
    order: Tensor
    counts: np.ndarray

    def places(self, owner: int, number: int) -> Tensor:
        """Return the positions of the ids of a kind that an owner has."""
        end = int(self.counts[:owner].sum() + self.counts[owner, : number + 1].sum())
        return self.order[end - int(self.counts[owner, number]) : end]


class RowExchange:
    """Exchange of rows between their owners. Its calls are collective.

    Args:
        communicator: Communicator of the owners of the other parts; None to answer only.
        features: The part's own rows, by kind and attribute; by default in the memory of the part.

    Attributes:
        features: The part's own rows, by kind and attribute.
        num_kept: Rows of other parts found here so far, in copies or in shared memory.
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
        self._peers: PeerRows | None = None
        self._segments: SegmentRows | None = None
        # Whether any rank has copies of rows of other parts.
        self._has_copies = False
        self.num_remote = self.num_kept = 0
        if communicator is not None:
            # The status of a process, the ids that it requests, and the ids with local copies, by kind.
            communicator.widen(1 + 2 * max(1, len(part.tables)))

    def read_peers(self) -> None:
        """Read rows of other processes on this host in place from now on; collective."""
        assert self._communicator is not None
        self._peers = PeerRows(self._part, self._communicator, self.features)

    def names(self, kind: Any) -> list[str]:
        """Return the attributes of a kind."""
        return [name for name in self.features.get(kind, ()) if name != TIME]

    def describe(self) -> dict[str, Feature]:
        """Return the part's own rows, by kind and attribute."""
        return name_features(self.features, self._part.manifest.is_homogeneous)

    def fetch(self, wanted: Sequence[Wanted]) -> list[dict[str, Tensor]]:
        """Fetch rows by attribute, in the order of the ids; one exchange for all requests."""
        inverses: list[Tensor | None] = []
        distinct = []
        for one in wanted:
            inverse = None
            if not self._names(one):
                one = one._replace(ids=one.ids[:0], owned=None, is_distinct=True)
            elif not one.is_distinct:
                one, inverse = _drop_repeated(one)
            distinct.append(one)
            inverses.append(inverse)
        segments = self._open_segments()
        if segments is not None:
            rows_of = self._fetch_in_segments(segments, distinct)
            return [rows if inverse is None else {name: value[inverse] for name, value in rows.items()}
                    for rows, inverse in zip(rows_of, inverses, strict=True)]  # fmt: skip
        parcel = Parcel.of([(one.kind, self._names(one)) for one in wanted], self.features)
        asked, received = self._exchange(distinct, parcel)
        num_others = self._num_others
        self.num_remote += int(asked.counts[:num_others].sum())
        self.num_kept += int(asked.counts[-1].sum())
        arrays = parcel.open(received, asked.counts[:num_others])
        found = []
        for number, (one, inverse) in enumerate(zip(distinct, inverses, strict=True)):
            rows = self._assemble(one, number, asked, arrays)
            found.append(rows if inverse is None else {name: value[inverse] for name, value in rows.items()})
        return found

    def find_fetched(self, one: Wanted) -> Tensor:
        """Find the positions in `one.ids` of rows that other parts must send, int64 `[r]`."""
        _, order, bounds = self._group([one])
        return order[: int(bounds[self._num_others])]

    def find_captured(self) -> dict[str, dict[str, Feature]] | None:
        """Return the part's own rows of nodes if captured batches can fetch them from all owners; otherwise None."""
        features = {entry.name: {name: self.features[entry.name][name] for name in self.names(entry.name)}
                    for entry in self._part.manifest.nodes}  # fmt: skip
        return features if self._peers is None and CapturedRows.serves(features) else None

    def open_captured(self, features: Mapping[str, Mapping[str, Feature]]) -> CapturedRows:
        """Open the stage of captured plans that fetches the rows of `find_captured`."""
        return CapturedRows(self._part, features, self._note_rows, self._kept)

    def _note_rows(self, remote: int, copied: int) -> None:
        """Count rows that other parts sent, and rows of other parts that were found here."""
        self.num_remote += remote
        self.num_kept += copied

    def _open_segments(self) -> SegmentRows | None:
        """Return the exchange in segments; None without NCCL, or if some rows are found on other ways."""
        comm = self._communicator
        if self._segments is None and comm is not None:
            transport = comm.open_segments()
            if transport is not None:
                self._segments = SegmentRows(self._part.part, self._part.num_parts, self._part.device, transport)
        return None if self._has_copies or self._peers is not None else self._segments

    def _fetch_in_segments(self, segments: SegmentRows, wanted: Sequence[Wanted]) -> list[dict[str, Tensor]]:
        """Fetch rows of distinct ids."""
        requests, placed = [], []
        for one in wanted:
            kind, nodes = (one.kind, one.ids) if one.owned is None else one.owned
            features = {name: self.features[one.kind][name] for name in self._names(one)}
            ids = one.ids
            # Rows of nodes alone are known.
            places = None if one.known is None or not features else one.known.find(ids)
            if places is not None:
                ids = nodes = ids[(places < 0).nonzero().view(-1)]
            placed.append(places)
            if features:
                requests.append(RowsOfKind(one.kind, ids.contiguous(), nodes.contiguous(), self._part.books[kind],
                                           self._part.tables[one.kind], features))  # fmt: skip
        found = iter(segments.fetch(requests))
        self.num_remote, segments.num_remote = self.num_remote + segments.num_remote, 0
        return [self._join_known(one, places, next(found)) if self._names(one) else {}
                for one, places in zip(wanted, placed, strict=True)]  # fmt: skip

    def _join_known(self, one: Wanted, places: Tensor | None, fetched: dict[str, Tensor]) -> dict[str, Tensor]:
        """Join known rows, at these positions, and fetched rows, in the order of the ids; -1 for a fetched row."""
        if one.known is None or places is None:
            return fetched
        here, there = (places >= 0).nonzero().view(-1), (places < 0).nonzero().view(-1)
        self.num_kept += here.numel()
        out = {}
        for name, own in fetched.items():
            out[name] = own.new_empty((one.ids.numel(), *own.shape[1:]))
            scatter_rows(out[name], there, own, is_unique=True)
            if here.numel():
                scatter_rows(out[name], here, gather_rows(one.known.rows[name], places[here]), is_unique=True)
        return out

    @property
    def _num_others(self) -> int:
        return self._part.num_parts - (self._part.part >= 0)

    def _names(self, one: Wanted) -> list[str]:
        return self.names(one.kind) if one.names is None else list(one.names)

    def _group(self, wanted: Sequence[Wanted]) -> tuple[Tensor, Tensor, Tensor]:
        """Group (ids of all kinds, their positions by owner and kind, bounds of each group), as in `Asked`."""
        num_parts, ids = self._part.num_parts, [one.ids for one in wanted]
        joined = ids[0] if len(ids) == 1 else torch.cat(ids)
        num_buckets = (num_parts + 1) * len(wanted)
        keys, at = make_keys(joined.numel(), num_buckets, joined.device), 0
        for number, one in enumerate(wanted):
            own = keys[at : at + one.ids.numel()]
            at += one.ids.numel()
            kind, nodes = (one.kind, one.ids) if one.owned is None else one.owned
            if one.ids.numel():
                self._part.books[kind].find_buckets(nodes, self._part.part, len(wanted), number, own)
            for peer in () if self._peers is None else self._peers.parts:
                partner = peer - (peer > self._part.part)
                own.masked_fill_(own == partner * len(wanted) + number, num_parts * len(wanted) + number)
            kept = self._kept.get(one.kind)
            if kept is not None and kept.ids.numel() and one.ids.numel():
                is_own = own == (num_parts - 1) * len(wanted) + number
                own.masked_fill_((kept.find(one.ids) >= 0) & ~is_own, num_parts * len(wanted) + number)
            if one.known is not None and one.ids.numel():
                own.masked_fill_(one.known.find(one.ids) >= 0, num_parts * len(wanted) + number)
        return joined, *group_keys(keys, num_buckets)

    def _exchange(self, wanted: Sequence[Wanted], parcel: Parcel) -> tuple[Asked, list[Tensor]]:
        """Exchange requests, answer the received ones, and return (own request, bytes of the owners' rows)."""
        assert self._communicator is not None
        comm, num_kinds = self._communicator, len(wanted)
        ids, order, bounds = self._group(wanted)
        counted = bounds.diff().view(comm.size + 1, num_kinds)
        if self._peers is not None and self._peers.is_complete:
            return Asked(ids, order, counted.numpy()), [ids.new_empty(0, dtype=torch.uint8)]
        rows = comm.make_rows(ids.device)
        rows[: comm.size, 1 : 1 + num_kinds] = counted[:-1]
        if self._kept or self._peers is not None or any(one.known is not None for one in wanted):
            rows[: comm.size, 1 + num_kinds : 1 + 2 * num_kinds] = counted[-1]
        sent, found = comm.meet(rows)
        own = slice(1, 1 + num_kinds)
        asked = Asked(ids, order, np.concatenate([sent[:, own], sent[:1, 1 + num_kinds : 1 + 2 * num_kinds]]))
        mine, theirs = sent[:-1, own], found[:-1, own]
        dtype = self._part.word_dtype
        message = (
            as_bytes(ids[order[: int(mine.sum())]].to(dtype)) if mine.any() else ids.new_empty(0, dtype=torch.uint8)
        )
        to_send, to_come = ([*(n.sum(1) * dtype.itemsize).tolist(), 0] for n in (mine, theirs))
        answer, status = self.answer(comm.swap(message, to_send, to_come, "ids").view(dtype).long(), theirs, parcel)
        rows = comm.make_rows(ids.device)
        rows[: comm.size, 0] = status
        comm.meet(rows)
        received = comm.swap(answer, [*parcel.sizes(theirs), 0], [*parcel.sizes(mine), 0], "rows")
        return asked, [received]

    def answer(self, ids: Tensor, counts: np.ndarray, parcel: Parcel) -> tuple[Tensor, Tensor]:
        """Answer requests: (the rows in bytes, int64 `[1]`, below 0 if an id is not held here).

        Args:
            ids: By requester, and by kind within each, int64.
            counts: Numbers of ids, int64 `[S, K]`.
        """
        rows, status = [], torch.zeros(1, dtype=torch.int64, device=ids.device)
        pieces = ids.split(counts.reshape(-1).tolist()) if parcel.num_kinds > 1 else [ids]
        for number, (kind, names) in enumerate(parcel.kinds):
            own = torch.cat(pieces[number :: parcel.num_kinds]) if parcel.num_kinds > 1 and len(counts) else ids
            places, found = self._part.tables[kind].locate(own if names else own[:0])
            status = torch.minimum(status, found)
            rows += [self.features[kind][name].read(places) for name in names]
        return parcel.pack(rows, counts), status

    def _assemble(self, one: Wanted, number: int, asked: Asked, arrays: Mapping[tuple[int, str], list[Tensor]]
                  ) -> dict[str, Tensor]:  # fmt: skip
        """Assemble rows of a kind in the order of its ids from own rows, copies, and received rows."""
        num_others, names = self._num_others, self._names(one)
        if not names:
            return {}
        first = int(asked.counts[:, :number].sum())
        there = [asked.places(owner, number) for owner in range(num_others)]
        theirs = _join(there) if asked.counts.shape[1] > 1 else asked.order[: int(asked.counts[:num_others].sum())]
        targets = theirs - first if first else theirs
        here = asked.places(num_others, number) if num_others < self._part.num_parts else theirs[:0]
        places = self._part.tables[one.kind].locate(asked.ids[here])[0]
        sources = self._find_copies(one, asked.ids, asked.places(len(asked.counts) - 1, number))
        out = {}
        for name in names:
            feature = self.features[one.kind][name]
            rows = torch.empty((one.ids.numel(), *feature.shape[1:]), dtype=feature.dtype, device=one.ids.device)
            at = 0
            # On a GPU joining costs less than a launch for each.
            for own in arrays[number, name] if rows.device.type == "cpu" else [_join(arrays[number, name])]:
                scatter_rows(rows, targets[at : at + len(own)], own, is_unique=True)
                at += len(own)
            scatter_rows(rows, here - first if first else here, feature.read(places), is_unique=True)
            for which, found, held in sources:
                scatter_rows(rows, which - first, gather_rows(held[name], found), is_unique=True)
            out[name] = rows
        return out

    def _find_copies(self, one: Wanted, ids: Tensor, copied: Tensor
                     ) -> list[tuple[Tensor, Tensor, Mapping[str, Tensor]]]:  # fmt: skip
        """Find the rows of the positions `copied`, which are local copies, known, or in memory of this host.

        Returns:
            (positions, positions in the table, rows by attribute) for each table that has some.
        """
        if not copied.numel():
            return []
        kept = self._kept.get(one.kind)
        tables: list[Held] = [held for held in (kept if kept is not None and kept.ids.numel() else None, one.known)
                              if held is not None]  # fmt: skip
        found: list[tuple[Tensor, Tensor, Mapping[str, Tensor]]] = []
        for held in tables:
            places = held.find(ids[copied])
            if len(tables) > 1 or self._peers is not None:
                here = places >= 0
                found.append((copied[here], places[here], held.rows))
                copied = copied[~here]
            else:
                # Without a wait for a GPU.
                found.append((copied, places, held.rows))
        if self._peers is not None:
            found += [(copied[which], places, rows) for which, places, rows in self._peers.find(one.kind, ids[copied])]
        return found

    def keep(self, ids: Mapping[Any, Tensor]) -> None:
        """Keep copies of rows of other parts, by kind; earlier copies are replaced.

        Collective; ids of this part are ignored.
        """
        wanted = []
        for kind in self._part.tables:
            own = ids.get(kind, torch.empty(0, dtype=torch.int64, device="cpu")).to(self._part.device).long().unique()
            if own.numel():
                if not isinstance(kind, str):
                    raise ArgumentError(f"ids must be of node types, got {kind}")
                own = own[self._part.owners(kind, own) != self._part.part]
            # Edges, which belong to owners of their nodes, are not copied.
            names = list(self.features[kind]) if isinstance(kind, str) else []
            wanted.append(Wanted(kind, own, names, is_distinct=True))
        assert self._communicator is not None
        self._kept, self._has_copies = {}, False
        rows = self.fetch(wanted)
        self.num_remote = 0
        self._kept = {one.kind: Table(one.ids, own) for one, own in zip(wanted, rows, strict=True)}
        self._has_copies = any(self._communicator.agree(sum(one.ids.numel() for one in wanted)))

    @property
    def kept_bytes(self) -> int:
        """Bytes of the local copies."""
        return sum(t.numel() * t.element_size() for table in self._kept.values() for t in table.rows.values())


def name_features(features: Mapping[Any, Mapping[str, Feature]], is_homogeneous: bool) -> dict[str, Feature]:
    """Name features by kind and attribute as reports show them."""
    own = {(kind, name): feature for kind, rows in features.items() for name, feature in rows.items() if name != TIME}
    names = tell_apart({(kind, name): name if is_homogeneous else f"{kind}.{name}" for kind, name in own})
    return {names[key]: feature for key, feature in own.items()}


def _join(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _drop_repeated(one: Wanted) -> tuple[Wanted, Tensor]:
    """Drop duplicates: (the request with each id once, the position of each original id)."""
    ids, inverse = one.ids.unique(return_inverse=True)
    if one.owned is None:
        return one._replace(ids=ids), inverse
    nodes = torch.empty_like(ids)
    nodes[inverse] = one.owned[1]
    return one._replace(ids=ids, owned=(one.owned[0], nodes)), inverse


def pack(arrays: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of contiguous arrays, uint8."""
    pieces = []
    for array in arrays:
        if array.numel():
            pieces.append(as_bytes(array.contiguous()))
            if pad := -pieces[-1].numel() % ALIGNMENT:
                pieces.append(array.new_zeros(pad, dtype=torch.uint8))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=arrays[0].device)


class Unpacker:
    """Reader of the arrays of a message, one after the other."""

    def __init__(self, message: Tensor) -> None:
        # A message within a larger buffer may not be aligned to words.
        self._message = message if message.storage_offset() % ALIGNMENT == 0 else message.clone()
        self._at = 0

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return the next array, of known dtype and shape."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        part = self._message[self._at : self._at + count]
        assert part.numel() == count, "a message is shorter than its sender and receiver agreed"
        self._at += align(count)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=part.device)
        return part.view(dtype).view(shape)
