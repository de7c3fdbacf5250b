"""Rows that no process has all of: each of a group holds a range of them, and they exchange what they read.

Process r of W holds the rows from r * N // W on. A read is one exchange of ids and one of rows, all to all, over NCCL
or Gloo; all processes take part, those that read nothing too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.ops.rows.scatter import scatter_rows
from pyg_direct.ops.sampling.split_by_owner import find_buckets, group_keys, make_keys
from pyg_direct.runtime.cuda.launch import current_stream
from pyg_direct.runtime.host.tensor_views import as_bytes

# The way to the other processes that the features of this process have in common.
_EXCHANGES: list[Any] = []


def open_exchange(device: torch.device) -> Any:
    """The `Communicator` of all features that are shared out, which keeps their reads in one order; called by all.

    Args:
        device: Of the rows.
    """
    # Only where there are process groups: torch has them on some systems only.
    from pyg_direct.runtime.comm.communicator import Communicator

    _EXCHANGES[:] = [known for known in _EXCHANGES if known.is_open]
    for known in _EXCHANGES:
        if known.device == device:
            return known
    _EXCHANGES.append(Communicator(device=device))
    return _EXCHANGES[-1]


class ShardedRows:
    """Rows over the processes of a group. Its reads are collective.

    Args:
        num_rows: N.
        own: Those of this process, from `range_of(rank, size, N)[0]` on: a `Feature`.
        exchange: The way to the others; see `open_exchange`.
        locate: Ids `[n]` on the device -> places among the hot rows, int64 `[n]`; -1 for the others.
        hot: The hot rows, of which each process has a copy: a `Feature`; None where there are none.

    Attributes:
        placement, refusal: `sharded`, and why they cannot be written.
        exchange: As given.
        num_read, num_missed, num_remote: Rows read so far, those of them that were not hot, and those that other
            processes sent.
    """

    placement, refusal = "sharded", "several processes hold them"

    def __init__(self, num_rows: int, own: Any, exchange: Any, locate: Callable[[Tensor], Tensor] | None = None,
                 hot: Any = None) -> None:  # fmt: skip
        self.exchange, self._own, self._locate, self._hot = exchange, own, locate, hot
        self._num_rows, self._first = num_rows, range_of(exchange.rank, exchange.size, num_rows)[0]
        self._word = torch.int32 if num_rows < 2**31 else torch.int64
        self._row_bytes = own.shape[1:].numel() * own.dtype.itemsize
        firsts = [range_of(rank, exchange.size, num_rows)[0] for rank in range(1, exchange.size)]
        self._bounds = torch.tensor(firsts, dtype=torch.int64, device=own.device)
        self.forget_counts()

    def forget_counts(self) -> None:
        """Count from zero."""
        self.num_read = self.num_missed = self.num_remote = 0

    def list_tiers(self, num_held: int) -> list[tuple[str, int, int, bool]]:
        """As `SpilledRows` has it. A hot row counts as one of the process that holds it, too."""
        num_own = int(self._own.shape[0])
        return [(f"host memory ({self._own.placement})", num_own, self.num_missed - self.num_remote, True),
                ("other processes", self._num_rows - num_own, self.num_remote, False)]  # fmt: skip

    def read(self, ids: Tensor) -> Tensor:
        """Rows of ids on the device, `[n, ...]`; every process calls it, with ids of its own or none.

        A row of another process is sent as often as its id comes.

        Raises:
            IdError: an id is outside [0, N); the other processes get a `RankError`.
            RankError: another process failed or is gone.
        """
        rows: Tensor = self.exchange.run(self._read, ids)
        if rows.is_cuda:
            # They were made on the stream of the exchange.
            rows.record_stream(current_stream(rows.device.index))
        return rows

    def read_nothing(self) -> None:
        """Take part in a read of the others."""
        self.read(torch.empty(0, dtype=torch.int64, device=self._own.device))

    def _read(self, ids: Tensor) -> Tensor:
        comm, ids = self.exchange, ids.long()
        is_bad = ((ids < 0) | (ids >= self._num_rows)).any()
        places = None if self._locate is None or not len(ids) else self._locate(ids)
        order, bounds = self._group(ids, places)
        words = comm.make_rows(ids.device)
        words[: comm.size, 0], words[: comm.size, 1] = -is_bad.long(), bounds.diff()[: comm.size]
        sent, found = comm.meet(words)
        asked, theirs = sent[:, 1].tolist(), found[:-1, 1].tolist()
        others, here, hot = order.split([sum(asked[:-1]), asked[-1], len(ids) - sum(asked)])
        answer = self._answer(ids[others], asked[:-1], theirs)
        # Told before rows are waited for, should a process have failed.
        comm.meet(comm.make_rows(ids.device))
        received = comm.swap(answer, self._sizes(theirs), self._sizes(asked[:-1]), "sharded rows")
        rows = torch.empty((len(ids), *self._own.shape[1:]), dtype=self._own.dtype, device=ids.device)
        scatter_rows(rows, others, self._view(received, len(others)), is_unique=True)
        scatter_rows(rows, here, self._own.read(ids[here] - self._first), is_unique=True)
        if places is not None:
            scatter_rows(rows, hot, self._hot.read(places[hot]), is_unique=True)
        self.num_read += len(ids)
        self.num_missed += len(others) + len(here)
        self.num_remote += len(others)
        return rows

    def _group(self, ids: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """(which ids go to each partner, are of this process, and are hot; where each of these begins, and the end)."""
        size = self.exchange.size
        keys = make_keys(len(ids), size + 1, ids.device)
        find_buckets(ids, size, self._bounds, ids[:0].to(torch.uint8), self.exchange.rank, 1, 0, keys)
        if places is not None:
            keys.masked_fill_(places >= 0, size)
        return group_keys(keys, size + 1)

    def _answer(self, ids: Tensor, asked: Sequence[int], theirs: Sequence[int]) -> Tensor:
        """Bytes of the rows that partners ask for, while they are asked for theirs."""
        width = self._word.itemsize
        sizes, sizes_back = ([*(count * width for count in counts), 0] for counts in (asked, theirs))
        words = self.exchange.swap(as_bytes(ids.to(self._word)), sizes, sizes_back, "sharded ids")
        return as_bytes(self._own.read(words.view(self._word).long() - self._first).contiguous())

    def _sizes(self, counts: Sequence[int]) -> list[int]:
        """Bytes of rows for each partner, and none for this process."""
        return [*(count * self._row_bytes for count in counts), 0]

    def _view(self, received: Tensor, count: int) -> Tensor:
        shape = count, *self._own.shape[1:]
        if received.numel() == 0:
            return torch.empty(shape, dtype=self._own.dtype, device=received.device)
        return received.view(self._own.dtype).view(shape)


def range_of(rank: int, size: int, num_rows: int) -> tuple[int, int]:
    """The first row that a process holds, and the one after its last."""
    return rank * num_rows // size, (rank + 1) * num_rows // size
