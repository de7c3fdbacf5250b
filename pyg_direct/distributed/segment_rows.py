"""`SegmentRows`: rows by id from their owners in segments of fixed length, with one wait on the host.

Ids of a kind go to their owners in segments (`kernels/sampling/frontier_segments.py`), and rows come back at the same
places. If a segment is too small on one rank, all ranks learn it in the last exchange, and fetch again with more room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.distributed.graph_part import Table
from pyg_direct.distributed.partitioning.manifest import Book
from pyg_direct.errors import IdError
from pyg_direct.kernels.batch_counters import STATE
from pyg_direct.kernels.sampling import frontier_segments
from pyg_direct.ops.rows.gather_rows import gather_rows
from pyg_direct.ops.run_kernel import grid_for, run_gpu
from pyg_direct.runtime.comm.nccl_segments import Transport
from pyg_direct.runtime.cuda.launch import current_stream
from pyg_direct.runtime.host.tensor_views import as_bytes

# Rows of a segment before a batch shows how many it needs.
_FIRST_ROWS = 4 if SIMULATED else 1024
_ALIGNED = 16
# Words of a segment of ids before the ids: their number, and the key of a frontier.
_HEAD = 2


class RowsOfKind(NamedTuple):
    """Requested rows of one kind, which all ranks request together.

    Attributes:
        ids: int64 `[n]`, without duplicates.
        nodes: The nodes whose owners have the rows, int64 `[n]`.
        features: Its rows by attribute, equal names on all ranks.
    """

    kind: Any
    ids: Tensor
    nodes: Tensor
    book: Book
    table: Table
    features: Mapping[str, Any]


class _Sent(NamedTuple):
    """A request on its way: place of each id among the received rows, rows by attribute, ids by owner."""

    slots: Tensor
    rows: dict[str, Tensor]
    counts: Tensor


class SegmentRows:
    """Exchange of rows over a transport. Its calls are collective.

    Attributes:
        room: Ids that a segment has room for, by kind; equal on all ranks.
    """

    def __init__(self, part: int, num_parts: int, device: torch.device, transport: Transport) -> None:
        self._part, self._num_parts, self._device, self._transport = part, num_parts, device, transport
        self.num_remote = 0
        self.room: dict[Any, int] = {}
        self._zeros = torch.zeros(STATE, dtype=torch.int64, device=device)

    def fetch(self, wanted: Sequence[RowsOfKind]) -> list[dict[str, Tensor]]:
        """Fetch rows by attribute, in the order of the ids."""
        while True:
            needs = torch.zeros(len(wanted) + 2, dtype=torch.int64, device=self._device)
            sent = [self._send(one, needs, number) for number, one in enumerate(wanted)]
            words = self._agree(needs, [one.counts for one in sent])
            if words[len(wanted) + 1]:
                raise IdError("ids must be held by the part that owns them, got others on one of the ranks")
            if not any(words[: len(wanted)]):
                counts = words[len(needs) :]
                self.num_remote += sum(counts) - sum(counts[self._part :: self._num_parts])
                return [{name: _order(rows, one.slots) for name, rows in one.rows.items()} for one in sent]
            for one, need in zip(wanted, words, strict=False):
                if need:
                    self.room[one.kind] = need + need // 4

    def _send(self, one: RowsOfKind, needs: Tensor, number: int) -> _Sent:
        """Send ids to their owners, and receive their rows."""
        parts, room = self._num_parts, self.room.setdefault(one.kind, _FIRST_ROWS)
        length = -(-(_HEAD + room) // _ALIGNED) * _ALIGNED
        to_send, received = torch.empty(2, parts * length, dtype=torch.int64, device=self._device).unbind()
        counts = torch.zeros(parts, dtype=torch.int32, device=self._device)
        slots, none = torch.empty_like(one.ids), one.ids[:0]
        # Made there: a copy from the host would hold up the exchange.
        begins = torch.arange(2, device=self._device) * one.ids.numel()
        grid = grid_for(one.ids.numel(), slots)
        run_gpu(frontier_segments.count_owners_gpu, grid, begins, 0, 1, 1, one.nodes, self._zeros, parts,
                *one.book.find_arrays(self._device), counts, slots)  # fmt: skip
        run_gpu(frontier_segments.fill_segments_gpu, grid, begins, 0, 1, 1, one.ids, none, 0, none, self._zeros,
                self._zeros, parts, room, length, none, 0, none, counts, slots, to_send, needs, number)  # fmt: skip
        self._exchange(to_send, received)
        directory, num_ids = one.table.find_directory()
        # Places without an id read the first row.
        places = torch.zeros(parts * room, dtype=torch.int64, device=self._device)
        run_gpu(frontier_segments.locate_asked_gpu, grid_for(places.numel(), places), received, 1, parts, room, length,
                1, num_ids, *directory, needs, places, 0, none)  # fmt: skip
        rows = {}
        for name, feature in one.features.items():
            # No rank asks a part without rows, whose rows are not read.
            own = feature.read(places) if one.table.ids.numel() else torch.empty(
                (places.numel(), *feature.shape[1:]), dtype=feature.dtype, device=self._device)  # fmt: skip
            rows[name] = torch.empty_like(own)
            if own.numel():
                self._exchange(as_bytes(own), as_bytes(rows[name]))
        return _Sent(slots, rows, counts)

    def _agree(self, needs: Tensor, counts: Sequence[Tensor]) -> list[int]:
        """Return the largest needs of all ranks and this rank's `counts`, as soon as all rows are there."""
        to_send, received = torch.empty(2, self._num_parts * needs.numel(), dtype=torch.int64,
                                        device=self._device).unbind()  # fmt: skip
        agreed = torch.empty_like(needs)
        run_gpu(frontier_segments.send_needs_gpu, 1, needs, self._zeros, self._num_parts, needs.numel(), 0, to_send)
        self._exchange(to_send, received)
        run_gpu(frontier_segments.agree_needs_gpu, 1, received, self._num_parts, needs.numel(), 0, needs, agreed)
        words = torch.cat([agreed, *counts])
        if self._device.type == "cuda":
            on_host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            words = on_host.copy_(words, non_blocking=True)
            there = torch.cuda.Event()
            there.record()
            self._transport.wait(there)
        found: list[int] = words.tolist()
        return found

    def _exchange(self, to_send: Tensor, received: Tensor) -> None:
        stream = current_stream(self._device.index).cuda_stream if self._device.type == "cuda" else 0
        self._transport.exchange(to_send, received, stream)


def _order(rows: Tensor, slots: Tensor) -> Tensor:
    """Return received rows in the order of the ids."""
    return gather_rows(rows, slots) if rows.numel() else rows.new_empty((slots.numel(), *rows.shape[1:]))
