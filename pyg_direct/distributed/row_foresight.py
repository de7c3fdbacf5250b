"""Foresight in a graph in parts: rows of other parts that several of the next batches read travel once (`ahead`).

A batch is a function of (seed, epoch, number). So `StepsAhead` samples batches before their rows are requested, on all
ranks in one order, and the ids that the next batches read are known. `PlannedRows` keeps the rows that these batches
read again. If memory is short, it keeps the rows that are read soonest. For the batches that are known, no other choice
fetches fewer rows (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.distributed.graph_part import Table
from pyg_direct.distributed.row_exchange import RowExchange, Wanted
from pyg_direct.loader.batch_report import Stages
from pyg_direct.loader.prefetch.batch_groups import Work
from pyg_direct.ops.local_ids.relabel_nodes import unite
from pyg_direct.ops.rows.gather_rows import gather_rows, scatter_rows
from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.sampler.keyed_sampler import Drawn

# Batches of foresight at most: a byte of each node counts the batches that read it.
MOST_AHEAD = 128
# Batches known ahead, over the batches made so far: the first batch does not wait for all.
_RAMP = 2


class RowsAhead(NamedTuple):
    """Numbers of foresight, for reports.

    Attributes:
        num_read: Rows of other parts that planned batches read, each once a batch.
    """

    num_read: int = 0
    num_fetched: int = 0

    def plus(self, other: RowsAhead) -> RowsAhead:
        """Return the sums of both."""
        return RowsAhead(self.num_read + other.num_read, self.num_fetched + other.num_fetched)

    def __str__(self) -> str:
        share = self.num_fetched / max(1, self.num_read)
        return f"rows of other parts for planned batches: {self.num_fetched:,} fetched of {self.num_read:,} read, " \
               f"{share:.1%}"  # fmt: skip


class KeptRows:
    """Rows of one node type that later batches read, in slots that are used again.

    Args:
        shapes: By attribute, an object with the dtype and shape of the rows.

    Attributes:
        uses: Planned batches that read each node of another part, uint8 `[N]`.
        row_bytes: Bytes of the rows of a node.
        rows: By attribute and slot, `[S, ...]`.
    """

    def __init__(self, num_nodes: int, shapes: Mapping[str, Any], device: torch.device) -> None:
        self.num_nodes = num_nodes
        self.uses = torch.zeros(num_nodes, dtype=torch.uint8, device=device)
        self.row_bytes = sum(own.shape[1:].numel() * own.dtype.itemsize for own in shapes.values())
        self.rows = {name: torch.empty((0, *own.shape[1:]), dtype=own.dtype, device=device)
                     for name, own in shapes.items()}  # fmt: skip
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._table, self._slots, self._free = Table(none, {}), none, none
        self._next_use: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """The nodes whose rows are here, ascending, int64 `[n]`."""
        return self._table.ids

    def find(self, ids: Tensor) -> Tensor:
        """Find the slots of the rows of these ids, int64; -1 for an id that is not here."""
        places = self._table.find(ids)
        if not self._slots.numel():
            return places
        return torch.where(places >= 0, self._slots[places.clamp(min=0)], -1)

    def note_next_uses(self, planned: Sequence[Tensor]) -> Tensor:
        """Return the number of the next batch that reads each node, uint8 `[N]`; only for nodes that one reads.

        Args:
            planned: The rows of other parts that each of the next batches reads.
        """
        if self._next_use is None:
            self._next_use = torch.zeros_like(self.uses)
        for number in reversed(range(len(planned))):
            self._next_use[planned[number]] = number
        return self._next_use

    def replace(self, is_kept: Tensor, new: Tensor, fetched: Mapping[str, Tensor], places: Tensor) -> None:
        """Drop some rows, and keep new ones.

        Args:
            is_kept: For each of `ids`, bool `[n]`.
            new: Other nodes, ascending, int64 `[m]`.
            fetched: Rows by attribute, in which the new ones lie at `places`, int64 `[m]`.
        """
        if not new.numel() and bool(is_kept.all()):
            return
        self._free = torch.cat([self._free, self._slots[~is_kept]])
        ids, slots = self.ids[is_kept], self._slots[is_kept]
        if new.numel() > self._free.numel():
            self._grow(new.numel() - self._free.numel())
        taken, self._free = self._free[: new.numel()], self._free[new.numel() :]
        for name, rows in self.rows.items():
            if new.numel():
                scatter_rows(rows, taken, gather_rows(fetched[name], places), is_unique=True)
        union = unite([ids, new], self.num_nodes)
        self._table, self._slots = Table(union.ids, {}), torch.empty_like(union.ids)
        self._slots[union.find(ids)], self._slots[union.find(new)] = slots, taken

    def _grow(self, count: int) -> None:
        """Add at least so many slots, a half of all at a time."""
        before = next((rows.shape[0] for rows in self.rows.values()), 0)
        added = max(count, before // 2)
        for name, rows in self.rows.items():
            self.rows[name] = torch.cat([rows, rows.new_empty((added, *rows.shape[1:]))])
        self._free = torch.cat([self._free, torch.arange(before, before + added, device=self._free.device)])


class PlannedRows:
    """Fetch of the rows of an epoch's batches; a row of another part travels once for the batches that are known.

    Args:
        exchange: Rows by id; its calls are collective.
        sizes: Nodes of each type in the whole graph; batches request rows in this order.
        room: Bytes for the rows that are kept.
    """

    def __init__(self, exchange: RowExchange, sizes: Mapping[str, int], room: int, device: torch.device) -> None:
        self._exchange, self._kinds, self._room, self._device = exchange, list(sizes), room, device
        self._kept = [KeptRows(size, {name: exchange.features[kind][name] for name in exchange.names(kind)}, device)
                      for kind, size in sizes.items()]  # fmt: skip
        # Of each batch whose rows are not fetched yet, the nodes of other parts by type.
        self._planned: deque[list[Tensor]] = deque()
        self.counts = RowsAhead()

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that are kept now."""
        return sum(kept.ids.numel() * kept.row_bytes for kept in self._kept)

    def plan(self, wanted: Sequence[Wanted]) -> None:
        """Plan the next batch. `wanted`: Its requests by node type; further ones, of rows of edges, are not planned."""
        planned, num_read = [], 0
        for kept, one in zip(self._kept, wanted, strict=False):
            ids = one.ids if one.is_distinct else one.ids.unique()
            ids = ids if kept.rows else ids[:0]
            own = ids[self._exchange.find_fetched(Wanted(one.kind, ids))] if ids.numel() else ids
            kept.uses[own] += 1
            num_read += own.numel()
            planned.append(own)
        self._planned.append(planned)
        self.counts = self.counts._replace(num_read=self.counts.num_read + num_read)

    def drop(self) -> None:
        """Forget the planned batches, which are not made."""
        while self._planned:
            self._forget_first()

    def _forget_first(self) -> None:
        for kept, own in zip(self._kept, self._planned.popleft(), strict=True):
            kept.uses[own] -= 1

    def fetch(self, batches: Sequence[Sequence[Wanted]], others: Sequence[Wanted] = ()
              ) -> tuple[list[list[dict[str, Tensor]]], list[dict[str, Tensor]]]:  # fmt: skip
        """Fetch the rows of the next planned batches by one exchange: (rows of each by node type, rows of `others`).

        Args:
            batches: Requests of each batch, as in `plan`; without one, this rank only answers the others.
        """
        asked, unions = [], []
        for number, (kind, kept) in enumerate(zip(self._kinds, self._kept, strict=True)):
            lists = [own[number] for own in batches]
            union, ids = None, torch.empty(0, dtype=torch.int64, device=self._device)
            if len(lists) == 1 and (lists[0].is_distinct or not kept.rows):
                ids = lists[0].ids
            elif lists:
                union = unite([one.ids for one in lists], kept.num_nodes)
                ids = union.ids
            asked.append(Wanted(kind, ids, is_distinct=True, known=kept if kept.ids.numel() else None))
            unions.append(union)
        new = [self._exchange.find_fetched(one) if kept.rows else one.ids[:0]
               for kept, one in zip(self._kept, asked, strict=True)]  # fmt: skip
        found = self._exchange.fetch([*asked, *others])
        self.counts = self.counts._replace(
            num_fetched=self.counts.num_fetched + sum(places.numel() for places in new))  # fmt: skip
        for _ in batches:
            self._forget_first()
        self._keep(asked, found, new)
        rows = [[own if union is None else {name: gather_rows(value, union.find(batch[number].ids))
                                            for name, value in own.items()}
                 for number, (own, union) in enumerate(zip(found, unions, strict=False))]
                for batch in batches]  # fmt: skip
        return rows, found[len(asked) :]

    def _keep(self, asked: Sequence[Wanted], found: Sequence[Mapping[str, Tensor]], new: Sequence[Tensor]) -> None:
        """Keep the rows that planned batches read, of those that are here and of those that were fetched.

        Args:
            new: Positions of the fetched rows, by node type.
        """
        held = [kept.uses[kept.ids] > 0 for kept in self._kept]
        new = [places[kept.uses[one.ids[places]] > 0]
               for kept, one, places in zip(self._kept, asked, new, strict=True)]  # fmt: skip
        size = sum(kept.row_bytes * (int(flags.sum()) + places.numel())
                   for kept, flags, places in zip(self._kept, held, new, strict=True))  # fmt: skip
        if size > self._room:
            held, new = self._choose(asked, held, new)
        for kept, one, rows, flags, places in zip(self._kept, asked, found, held, new, strict=False):
            kept.replace(flags, one.ids[places], rows, places)

    def _choose(self, asked: Sequence[Wanted], held: Sequence[Tensor], new: Sequence[Tensor]
                ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Choose the rows that are read soonest, as many as there is room for; arguments as in `_keep`."""
        sizes, uses = torch.zeros(256, dtype=torch.int64, device=self._device), []
        for number, (kept, one) in enumerate(zip(self._kept, asked, strict=True)):
            next_use = kept.note_next_uses([own[number] for own in self._planned])
            # Of rows that no batch reads, the word is stale.
            of_held = next_use[kept.ids].long().masked_fill_(~held[number], 255)
            of_new = next_use[one.ids[new[number]]].long()
            uses.append((of_held, of_new))
            counts = torch.bincount(of_held[held[number]], minlength=256) + torch.bincount(of_new, minlength=256)
            sizes += counts * kept.row_bytes
        fitting = sizes.cumsum(0) <= self._room
        limit = int(fitting.sum())
        left = self._room - int(sizes[:limit].sum())
        chosen: list[list[Tensor]] = []
        for kept, pair in zip(self._kept, uses, strict=True):
            chosen.append([])
            for use in pair:
                is_kept = use < limit
                some = (use == limit).nonzero().view(-1)[: left // max(1, kept.row_bytes)]
                is_kept[some] = True
                left -= some.numel() * kept.row_bytes
                chosen[-1].append(is_kept)
        return [flags for flags, _ in chosen], [places[flags] for places, (_, flags) in zip(new, chosen, strict=True)]


class StepsAhead:
    """Maker of the batches of steps, which are sampled up to `ahead` batches before their rows are fetched.

    All ranks sample equally many batches in a step, which they agree on. A rank that has fewer takes part without
    seeds, and so does a rank that has left its loop.

    Args:
        ahead: Batches whose rows are known.
        stages: Stages of groups of batches; `fetch` reads rows by `planned`.
        plan: Plans the rows of a batch, given its sample.
        sample_nothing, read_nothing: Take part in the sampling, and in the exchange of rows, of the other ranks.
    """

    def __init__(self, communicator: Communicator, ahead: int, size: int, stages: Stages,
                 plan: Callable[[Drawn], object], drop: Callable[[], object], sample_nothing: Callable[[], object],
                 read_nothing: Callable[[], object]) -> None:  # fmt: skip
        self._communicator, self._ahead, self._size, self._stages = communicator, ahead, size, stages
        self._plan, self._drop = plan, drop
        self._sample_nothing, self._read_nothing = sample_nothing, read_nothing
        # Work of batches that are not sampled yet, from the caller's thread, and samples without rows.
        self._queue: deque[Work] = deque()
        self._sampled: deque[Drawn] = deque()
        # Batches of all steps so far, and batches that were sampled for them and for later ones; equal on all ranks.
        self._num_made = self._num_sampled = 0

    def follow(self, work: Iterator[Work]) -> Iterator[Work]:
        """Iterate over the same work items; as many as `ahead` are read before they are due."""
        pulled: deque[Work] = deque()
        failure: Exception | None = None
        while True:
            while len(pulled) <= self._ahead and failure is None:
                try:
                    item = next(work)
                except StopIteration:
                    break
                except Exception as error:
                    # Raised at its turn.
                    failure = error
                else:
                    pulled.append(item)
                    self._queue.append(item)
            if not pulled:
                if failure is not None:
                    raise failure
                return
            yield pulled.popleft()

    def make(self, work: list[Work], most: int) -> list[Any]:
        """Make the batches of a step: (its work, most batches of any rank) -> batches."""
        self._sample(most)
        samples = [self._sampled.popleft() for _ in work]
        made: list[Any] = self._stages.fetch(samples, work[0][0], work)
        return made

    def take_part(self, most: int) -> None:
        """Take part in a step of other ranks, of so many batches, without own ones."""
        self._queue.clear()
        self._sampled.clear()
        self._drop()
        self._sample(most)
        self._read_nothing()

    def _sample(self, most: int) -> None:
        """Sample the batches of a step that are not sampled yet, and those that are known ahead of it."""
        self._num_made += most
        due = self._num_made + min(self._ahead, _RAMP * self._num_made) - self._num_sampled
        own = [self._queue.popleft() for _ in range(min(due, len(self._queue)))]
        count = max(self._communicator.agree(len(own)))
        self._num_sampled += count
        for first in range(0, count, self._size):
            work = own[first : first + self._size]
            if not work:
                self._sample_nothing()
                continue
            number = work[0][0]
            for sample in self._stages.finish(self._stages.submit(number, work), number):
                self._plan(sample)
                self._sampled.append(sample)
