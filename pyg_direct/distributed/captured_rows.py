"""`CapturedRows`: rows of the nodes of a batch, fetched from their owners in a captured graph after its hops.

Ids go to their owners after the last hop, and rows come back at the same places
(`kernels/sampling/row_segments.py`). Once the sizes of the batch are known, the rows of the own part are read beside
them. Then one read brings all into the order of the nodes. Rows of other parts that are copied here (`replicas`) are
written to their places at last. These reads may overlap the next batch. The host neither waits nor calls for rows
before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.distributed.graph_part import GraphPart, PartTopo, Table
from pyg_direct.distributed.partitioning.manifest import table_dtype
from pyg_direct.features.feature import Feature
from pyg_direct.features.memory_rows import MemoryRows
from pyg_direct.kernels.sampling import frontier_segments, row_segments
from pyg_direct.ops.rows.gather_rows import Directory, RowReader, gather_rows, scatter_rows, unread_errors
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import grid_for, run_gpu
from pyg_direct.runtime.cuda.launch import on_raw_stream
from pyg_direct.runtime.host.tensor_views import as_bytes
from pyg_direct.sampling.hetero_sample import GeneralSample

# Rows of a segment before batches show how many they need, and the number that later ones are a multiple of: own rows
# behind them are aligned then.
_FIRST_ROWS, _ALIGNED = (4, 1) if SIMULATED else (1024, 128)
# Nodes whose owners are listed at a time.
_NODES_AT_ONCE = 1 << 24


class RowRoom(NamedTuple):
    """Rows that there is room for, by node type.

    Attributes:
        others: In the segment of another part; equal on all ranks.
        own: Of the own part; equal on all ranks too, as they agree on all sizes at once.
    """

    others: tuple[int, ...] = ()
    own: tuple[int, ...] = ()

    def grow(self, needs: list[int]) -> RowRoom:
        """Return room for needs by type, first of others and then own, with head-room; a need of 0 is met."""
        grown = [max(own, -(-(need + need // 8) // _ALIGNED) * _ALIGNED)
                 for own, need in zip([*self.others, *self.own], needs, strict=True)]  # fmt: skip
        count = len(self.others)
        return RowRoom(tuple(grown[:count]), tuple(grown[count:]))


class RowSlot:
    """Buffers of the rows of a batch.

    Args:
        num_nodes: Nodes of a batch at most.
        num_needs: Words of the needs of a batch, which go with the ids.
    """

    def __init__(self, rows: CapturedRows, room: RowRoom, num_nodes: int, num_needs: int) -> None:
        device, parts, kinds, others = rows.device, rows.num_parts, len(room.others), rows.num_parts - 1
        self.starts, self.own_starts = (
            upload(np.concatenate([[0], np.cumsum(own)]).astype(np.int64), device) for own in room
        )
        self.first_need = kinds + sum(room.others)
        self.length = self.first_need + num_needs
        self.to_send, self.received = torch.zeros(2, parts * self.length, dtype=torch.int64, device=device).unbind()
        self.places = torch.zeros(others * sum(room.others), dtype=torch.int64, device=device)
        self.own_places = torch.zeros(sum(room.own), dtype=torch.int64, device=device)
        self.slots = torch.zeros(num_nodes, dtype=torch.int64, device=device)
        # Nodes with copied rows, by type: their number, places among the nodes, and positions among the copies.
        self.copy_counts = torch.zeros(kinds, dtype=torch.int64, device=device)
        self.copy_targets, self.copy_sources = torch.zeros(
            2, sum(room.own) if rows.has_copies else 0, dtype=torch.int64, device=device).unbind()  # fmt: skip
        self.copies_of = [list(own.split(list(room.own))) if rows.has_copies else []
                          for own in (self.copy_targets, self.copy_sources)]  # fmt: skip
        # Rows that other parts sent, and rows that are copied here by type.
        self.num_remote = torch.zeros(1 + kinds, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        self.remote_words: np.ndarray = self.num_remote.numpy()
        self.places_of = list(self.places.split([others * count for count in room.others]))
        self.own_places_of = list(self.own_places.split(list(room.own)))
        # By attribute: rows to send; and received rows with the own ones behind them.
        self.answers, self.rows = (
            [torch.empty((others * room.others[one.kind] + more * room.own[one.kind], *one.feature.shape[1:]),
                         dtype=one.feature.dtype, device=device) for one in rows.attributes]
            for more in (0, 1)
        )  # fmt: skip
        self.num_answer_bytes = sum(answers.nbytes for answers in self.answers)
        # Reads of own rows; opened once, as a slot goes when tables move.
        self.own_reads: list[Callable[[], None]] | None = None
        self.readers = [RowReader(own, None, None, unread_errors(device), None) if device.type == "cuda" else None
                        for own in self.rows]  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Bytes of GPU memory held."""
        own = [self.to_send, self.received, self.places, self.own_places, self.slots, self.copy_targets,
               self.copy_sources, *self.answers, *self.rows]  # fmt: skip
        return sum(tensor.numel() * tensor.element_size() for tensor in own)


class _Attribute(NamedTuple):
    """Rows of one attribute, of the node type with number `kind`."""

    kind: int
    name: str
    feature: Feature


class CapturedRows:
    """Stage of an `ExchangePlan` that fetches the rows of the nodes of its batches.

    Args:
        features: Its rows by node type and attribute; equal names on all ranks.
        note_rows: Called with the numbers of rows that other parts sent for a batch, and of those that are copied here.
        copies: Rows of other parts that are copied here, by node type; ranks may differ.

    Attributes:
        has_copies: True if rows of other parts are copied here.
    """

    def __init__(self, part: GraphPart, features: Mapping[str, Mapping[str, Feature]],
                 note_rows: Callable[[int, int], object] = lambda remote, copied: None,
                 copies: Mapping[str, Table] = MappingProxyType({})) -> None:  # fmt: skip
        self._part, self.device, self.num_parts = part, part.device, part.num_parts
        self._kinds = [entry.name for entry in part.manifest.nodes]
        self.attributes = [_Attribute(number, name, feature) for number, kind in enumerate(self._kinds)
                           for name, feature in features[kind].items()]  # fmt: skip
        self._first_nodes = upload(part.own_starts, self.device)
        self._directory, self._num_ids = part.find_directory()
        self._note_rows = note_rows
        tables = [copies.get(kind) for kind in self._kinds]
        self.has_copies = any(table is not None and table.ids.numel() > 0 for table in tables)
        self._copies = [{} if table is None else table.rows for table in tables]
        sizes = [0 if table is None else table.ids.numel() for table in tables]
        self._first_copies = upload(np.cumsum([0, *sizes]).astype(np.int64)[:-1], self.device)
        # Copied ids of all types, and the ranks that have a node's rows for this one; None as those that own the node.
        self._copied, self._num_copied = Directory.empty(self.device), 0
        self._holders: tuple[Tensor, Tensor] | None = None
        if self.has_copies:
            starts = PartTopo(part.manifest, False, False).type_starts.tolist()
            ids = torch.cat([table.ids + start for table, start in zip(tables, starts, strict=False)
                             if table is not None])  # fmt: skip
            self._num_copied = int(ids[-1]) + 1
            self._copied = Directory.of(ids, self._num_copied)
            self._holders = ids[:0], _list_holders(part, starts, ids)

    @staticmethod
    def serves(features: Mapping[str, Mapping[str, Feature]]) -> bool:
        """Report whether kernels alone read all these rows."""
        return all(isinstance(feature.stored, MemoryRows) and feature.stored.can_be_captured
                   for own in features.values() for feature in own.values())  # fmt: skip

    def first_room(self) -> RowRoom:
        """Return the room before batches show how much they need."""
        return RowRoom((_FIRST_ROWS,) * len(self._kinds), (_FIRST_ROWS,) * len(self._kinds))

    def count_bytes(self, room: RowRoom, num_nodes: int) -> int:
        """Count the bytes of a slot."""
        total = 8 * num_nodes + 24 * self.num_parts * sum(room.others) + (24 if self.has_copies else 8) * sum(room.own)
        for one in self.attributes:
            width = math.prod(one.feature.shape[1:]) * one.feature.dtype.itemsize
            total += width * (2 * (self.num_parts - 1) * room.others[one.kind] + room.own[one.kind])
        return total

    def find_tables(self) -> tuple[tuple[int, ...], ...]:
        """Return the places of all tables: a graph that reads them serves as long as they stay."""
        return tuple(one.feature.stored.find_tables() for one in self.attributes)  # type: ignore[union-attr]

    def enqueue(self, plan: Any, slot: Any, stream: int) -> None:
        """Enqueue the exchange of the ids and rows of a batch. `slot`: Its slot, whose `own_rows` is a `RowSlot`."""
        own: RowSlot = slot.own_rows
        topo: PartTopo = plan.topology.topo
        hops, kinds, parts = plan.num_hops, len(topo.node_types), self.num_parts
        grid = grid_for(slot.nodes.numel(), slot.state)
        run_gpu(frontier_segments.count_owners_gpu, grid, slot.begins, 0, hops + 1, kinds, slot.nodes, plan.id_starts,
                parts, *(self._holders or plan.owners), slot.owner_counts, slot.slots, stream=stream)  # fmt: skip
        found = self._first_nodes, self._num_ids, *self._directory
        run_gpu(row_segments.fill_row_segments_gpu, grid, slot.state, hops, kinds, slot.begins, slot.totals,
                slot.outputs, slot.nodes, plan.id_starts, slot.owner_counts, slot.slots, parts, self._part.part,
                own.length, own.starts, own.own_starts, *found, self._first_copies, self._num_copied, *self._copied,
                own.copy_counts, own.copy_targets, own.copy_sources, own.to_send, own.own_places, own.slots, slot.needs,
                2 * plan.num_requests, own.num_remote, stream=stream)  # fmt: skip
        plan.send_needs(slot, own.length, own.first_need, own.to_send, stream)
        plan.exchange(own.to_send, own.received, stream)
        run_gpu(row_segments.locate_row_ids_gpu, grid_for(own.places.numel(), slot.state), own.received, kinds, parts,
                self._part.part, own.length, own.starts, *found, slot.needs, slot.owner_counts, own.copy_counts,
                own.places, own.num_remote, stream=stream)  # fmt: skip
        plan.agree_needs(slot, own.length, own.first_need, own.received, stream)
        with on_raw_stream(stream, self.device) if self.device.type == "cuda" else nullcontext():
            for one, answers, rows in zip(self.attributes, own.answers, own.rows, strict=True):
                places = own.places_of[one.kind]
                _open_read(one, places, answers)()
                if answers.numel() > 0:
                    plan.exchange_with_others(as_bytes(answers), as_bytes(rows[: len(places)]), stream)

    def take(self, slot: RowSlot, sample: GeneralSample) -> list[dict[str, Tensor]]:
        """Return the rows of a batch by node type and attribute, in the order of its nodes."""
        sizes = [sample.node[kind].numel() if kind in sample.node else 0 for kind in self._kinds]
        slots = torch.unsafe_split_with_sizes(slot.slots[: sum(sizes)], sizes)
        found: list[dict[str, Tensor]] = [{} for _ in sizes]
        for number, one in enumerate(self.attributes):
            found[one.kind][one.name] = self._read(slot, number, slots[one.kind])
        self._note(slot)
        return found

    def take_plain(self, slot: RowSlot, num_nodes: int) -> dict[str, Tensor]:
        """Return the rows of a batch without types by attribute, in the order of its nodes."""
        own = slot.slots[:num_nodes]
        found = {one.name: self._read(slot, number, own) for number, one in enumerate(self.attributes)}
        self._note(slot)
        return found

    def _note(self, slot: RowSlot) -> None:
        """Count the rows of a batch that other parts sent, and those that are copied here."""
        if self.attributes:
            remote, *copied = slot.remote_words.tolist()
            self._note_rows(remote, sum(copied))

    def _read(self, slot: RowSlot, number: int, slots: Tensor) -> Tensor:
        """Read the rows of an attribute, which is counted."""
        one, rows, reader = self.attributes[number], slot.rows[number], slot.readers[number]
        stored = one.feature.stored
        if slot.own_reads is None:
            slot.own_reads = [_open_read(of, slot.own_places_of[of.kind], own[len(slot.places_of[of.kind]) :])
                              for of, own in zip(self.attributes, slot.rows, strict=True)]  # fmt: skip
        slot.own_reads[number]()
        if isinstance(stored, MemoryRows) and stored.served is not None:
            stored.count(slot.places_of[one.kind])
            stored.count(slot.own_places_of[one.kind])
        found = gather_rows(rows, slots) if reader is None else reader.read(slots)
        if count := int(slot.remote_words[1 + one.kind]):
            targets, sources = (own[one.kind][:count] for own in slot.copies_of)
            scatter_rows(found, targets, gather_rows(self._copies[one.kind][one.name], sources), is_unique=True)
        return found


def _list_holders(part: GraphPart, starts: Sequence[int], copied: Tensor) -> Tensor:
    """List the part that has a node's rows for this one, over all types: this part, also for copies, or the owner."""
    held = torch.empty(starts[-1], dtype=table_dtype(part.num_parts), device=part.device)
    for entry, start in zip(part.manifest.nodes, starts, strict=False):
        for first in range(0, entry.num_nodes, _NODES_AT_ONCE):
            ids = torch.arange(first, min(first + _NODES_AT_ONCE, entry.num_nodes), device=part.device)
            held[start + first : start + first + len(ids)] = part.owners(entry.name, ids).to(held.dtype)
    held[copied] = part.part
    return held


def _open_read(one: _Attribute, places: Tensor, out: Tensor) -> Callable[[], None]:
    """Return the read of rows of the own part at these positions, by kernels on torch's current stream."""
    stored: Any = one.feature.stored
    # No rank asks a part without rows, whose rows are not read.
    if stored.shape[0] == 0 or out.numel() == 0:
        return lambda: None
    return partial(stored.open_gather(out.data_ptr()), places, out)
