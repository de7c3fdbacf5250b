"""Rows distributed over a group of processes: each holds a range of rows, and they exchange the rows that they read.

Process r of W holds the rows from r * N // W on. A read is one exchange of ids and one of rows, all to all, over NCCL
or Gloo. All processes take part, even if they read no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.features.memory_rows import MemoryRows
from pyg_direct.features.tier_report import TierReport
from pyg_direct.features.tiers.base import HeldRows, Tier
from pyg_direct.ops.rows.gather_rows import scatter_rows
from pyg_direct.ops.sampling.join_remote_edges import find_buckets, group_keys, make_keys
from pyg_direct.runtime.cuda.launch import current_stream
from pyg_direct.runtime.host.tensor_views import as_bytes

# Communicator that all features of this process share.
_EXCHANGES: list[Any] = []


def open_exchange(device: torch.device) -> Any:
    """Open the `Communicator` of all distributed features, which keeps their reads in one order; called by all
    processes.
    """
    # torch has process groups on some systems only.
    from pyg_direct.runtime.comm.communicator import Communicator

    _EXCHANGES[:] = [known for known in _EXCHANGES if known.is_open]
    for known in _EXCHANGES:
        if known.device == device:
            return known
    _EXCHANGES.append(Communicator(device=device))
    return _EXCHANGES[-1]


class ShardedTier(Tier):
    """Rows over the processes of a group. Its reads are collective.

    Args:
        num_rows: N.
        own: Rows of this process, from `range_of(rank, size, N)[0]` on.

    Attributes:
        num_remote: Rows read so far that other processes sent.
    """

    title, refusal, is_collective = "other processes", "several processes hold them", True

    def __init__(self, num_rows: int, own: MemoryRows, exchange: Any) -> None:
        super().__init__("sharded", torch.Size((num_rows, *own.shape[1:])), own.dtype, own.device)
        self.exchange, self.num_remote, self._own = exchange, 0, own
        self._first = range_of(exchange.rank, exchange.size, num_rows)[0]
        self._word = torch.int32 if num_rows < 2**31 else torch.int64
        self._row_bytes = own.shape[1:].numel() * own.dtype.itemsize
        firsts = [range_of(rank, exchange.size, num_rows)[0] for rank in range(1, exchange.size)]
        self._bounds = torch.tensor(firsts, dtype=torch.int64, device=own.device)

    def take(self, ids: Tensor) -> Tensor:
        """Read rows of ids on the device, `[n, ...]`; every process calls it, with its own ids or none.

        A row of another process is sent as often as its id comes.

        Raises:
            IdError: an id is outside [0, N); the other processes get a `RankError`.
            RankError: another process failed or is gone.
        """
        return self._take(ids)[0]

    def take_beside(self, ids: Tensor, locate: Callable[[Tensor], Tensor], held: HeldRows) -> tuple[Tensor, int]:
        """Read as `Tier.take_beside` does. The pass that groups ids by process also finds rows in memory; it is
        collective.
        """
        return self._take(ids, locate, held)

    def take_nothing(self) -> None:
        """Take part in a read of the others."""
        self.take(torch.empty(0, dtype=torch.int64, device=self.device))

    def count_served(self, on: bool) -> None:
        """Count from zero."""
        self.num_remote = 0

    def describe(self, num_rows: int, num_read: int | None, link: str | None) -> list[TierReport]:
        """Return a line for the rows of this process, and one for rows of others. A hot row also counts for the process
        that holds it.
        """
        num_own, num_remote = int(self._own.shape[0]), None if num_read is None else self.num_remote
        own_read = None if num_read is None else num_read - self.num_remote
        return [TierReport(f"host memory ({self._own.placement})", num_own, own_read, link),
                TierReport(self.title, self.shape[0] - num_own, num_remote)]  # fmt: skip

    def check_sending(self) -> None:
        """Refuse to send the tier: the other processes have rows of their own."""
        raise ArgumentError("a Feature whose rows are shared out over processes cannot be sent to others")

    def _read(self, ids: Tensor, out: Tensor) -> None:
        out.copy_(self.take(ids))

    def _take(self, ids: Tensor, locate: Callable[[Tensor], Tensor] | None = None, held: HeldRows | None = None
              ) -> tuple[Tensor, int]:  # fmt: skip
        rows: Tensor
        rows, num_missed = self.exchange.run(self._swap, ids, locate, held)
        if rows.is_cuda:
            # They were made on the stream of the exchange.
            rows.record_stream(current_stream(rows.device.index))
        return rows, num_missed

    def _swap(self, ids: Tensor, locate: Callable[[Tensor], Tensor] | None, held: HeldRows | None
              ) -> tuple[Tensor, int]:  # fmt: skip
        comm, ids = self.exchange, ids.long()
        is_bad = ((ids < 0) | (ids >= self.shape[0])).any()
        places = None if locate is None or not len(ids) else locate(ids)
        order, bounds = self._group(ids, places)
        words = comm.make_rows(ids.device)
        words[: comm.size, 0], words[: comm.size, 1] = -is_bad.long(), bounds.diff()[: comm.size]
        sent, found = comm.meet(words)
        asked, theirs = sent[:, 1].tolist(), found[:-1, 1].tolist()
        others, here, hot = order.split([sum(asked[:-1]), asked[-1], len(ids) - sum(asked)])
        answer = self._answer(ids[others], asked[:-1], theirs)
        # Raised before rows are waited for, because a process may have failed.
        comm.meet(comm.make_rows(ids.device))
        received = comm.swap(answer, self._sizes(theirs), self._sizes(asked[:-1]), "sharded rows")
        rows = torch.empty((len(ids), *self._own.shape[1:]), dtype=self._own.dtype, device=ids.device)
        scatter_rows(rows, others, self._view(received, len(others)), is_unique=True)
        scatter_rows(rows, here, self._own.read(ids[here] - self._first), is_unique=True)
        if places is not None and held is not None:
            scatter_rows(rows, hot, held.read(places[hot]), is_unique=True)
        self.num_remote += len(others)
        return rows, len(others) + len(here)

    def _group(self, ids: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (ids for each partner, ids of this process, hot ids; first position of each group, and the end)."""
        size = self.exchange.size
        keys = make_keys(len(ids), size + 1, ids.device)
        find_buckets(ids, size, self._bounds, ids[:0].to(torch.uint8), self.exchange.rank, 1, 0, keys)
        if places is not None:
            keys.masked_fill_(places >= 0, size)
        return group_keys(keys, size + 1)

    def _answer(self, ids: Tensor, asked: Sequence[int], theirs: Sequence[int]) -> Tensor:
        """Return bytes of the rows that partners ask for, while they are asked for theirs."""
        width = self._word.itemsize
        sizes, sizes_back = ([*(count * width for count in counts), 0] for counts in (asked, theirs))
        words = self.exchange.swap(as_bytes(ids.to(self._word)), sizes, sizes_back, "sharded ids")
        return as_bytes(self._own.read(words.view(self._word).long() - self._first).contiguous())

    def _sizes(self, counts: Sequence[int]) -> list[int]:
        """Return bytes of rows for each partner, and none for this process."""
        return [*(count * self._row_bytes for count in counts), 0]

    def _view(self, received: Tensor, count: int) -> Tensor:
        shape = count, *self._own.shape[1:]
        if received.numel() == 0:
            return torch.empty(shape, dtype=self._own.dtype, device=received.device)
        return received.view(self._own.dtype).view(shape)


def range_of(rank: int, size: int, num_rows: int) -> tuple[int, int]:
    """Return the first row that a process holds, and the one after its last."""
    return rank * num_rows // size, (rank + 1) * num_rows // size
