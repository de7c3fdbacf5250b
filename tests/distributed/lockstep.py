"""Several ranks of exchange plans in one process, on one device: they run in turn, and copy segments between them."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch

from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.edge_queries import PairExchange
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.row_exchange import RowExchange
from pyg_direct.runtime.cuda.device import resolve_device


class BrokenTurnError(RuntimeError):
    """Another rank failed."""


class _Turns:
    """The one turn that all ranks share: a rank has it until it waits for the others."""

    def __init__(self, size):
        self.size, self.turn = size, threading.Condition()
        self.box, self.round, self.is_broken = {}, 0, False

    def give(self, rank, message):
        """Wait until all ranks have given; the last one moves all messages."""
        self.box[rank] = message
        if len(self.box) == self.size:
            self._move()
            self.box, self.round = {}, self.round + 1
            self.turn.notify_all()
            return
        own = self.round
        while self.round == own and not self.is_broken:
            self.turn.wait()
        if self.is_broken:
            raise BrokenTurnError

    def _move(self):
        sizes = {len(to_send) for to_send, _ in self.box.values()}
        assert len(sizes) == 1, f"ranks differ in what they exchange: {sizes}"
        for rank, (_, received) in self.box.items():
            for place, part in enumerate(received.chunk(self.size)):
                part.copy_(self.box[place][0].chunk(self.size)[rank])

    def end(self):
        self.is_broken = True
        self.turn.notify_all()


class LockstepTransport:
    """A `Transport` of one rank. On a GPU all ranks use one stream."""

    is_captured, beside = False, None

    def __init__(self, turns, rank):
        self._turns, self.rank, self.size, self.num_exchanges = turns, rank, turns.size, 0

    def exchange(self, to_send, received, stream):
        self.num_exchanges += 1
        self._turns.give(self.rank, (to_send, received))

    def exchange_with_others(self, to_send, received, stream):
        if self.size == 1:
            return
        # An empty row stands for this rank.
        own, rows = self.rank, to_send.view(self.size - 1, -1)
        whole = torch.cat([rows[:own], rows[:1], rows[own:]]).contiguous()
        found = torch.empty_like(whole)
        self.exchange(whole, found, stream)
        received.copy_(torch.cat([found[:own], found[own + 1 :]]).view(-1))

    def follow(self, event):
        pass

    def wait(self, event):
        event.synchronize()

    def hold(self, plan):
        pass


class LockstepCommunicator:
    """The part of a communicator that plans and rows ask if they exchange in segments."""

    captured = True

    def __init__(self, transport):
        self._transport, self.sent = transport, Counter()
        self.rank, self.size = transport.rank, transport.size

    def run(self, fn, *args):
        return fn(*args)

    def open_segments(self):
        return self._transport

    def widen(self, width):
        pass

    def exchange(self, parts, what):
        """Bytes of any length, in segments of the longest."""
        sizes = [self.agree(part.numel()) for part in parts]
        longest = max(max(own) for own in sizes)
        to_send = torch.zeros(len(parts), longest, dtype=torch.uint8, device=parts[0].device)
        for row, part in zip(to_send, parts, strict=True):
            row[: part.numel()] = part
        received = torch.empty_like(to_send)
        self._transport.exchange(to_send.view(-1), received.view(-1), 0)
        return [row[:size] for row, size in zip(received, sizes[self._transport.rank], strict=True)]

    def agree(self, value):
        numbers = torch.full((self._transport.size,), value)
        found = torch.empty_like(numbers)
        self._transport.exchange(numbers, found, 0)
        return found.tolist()


class LockstepGraph(DistGraph):
    """A graph in parts whose ranks run in turn; for samplers."""

    def __init__(self, folder, transport, device):
        # Not the base class's constructor, which forms a group of processes.
        self.device, self.communicator = resolve_device(device), LockstepCommunicator(transport)
        self.part = GraphPart(folder, transport.rank, device=self.device)
        self.pairs = PairExchange(self.part, self.communicator)
        self.rows = RowExchange(self.part, self.communicator)


def run_lockstep(fn, size):
    """What `fn(transport)` returns on each rank."""
    turns = _Turns(size)

    def run(rank):
        with turns.turn:
            try:
                return fn(LockstepTransport(turns, rank))
            except BaseException:
                turns.end()
                raise

    with ThreadPoolExecutor(size) as pool:
        jobs = [pool.submit(run, rank) for rank in range(size)]
    errors = [job.exception() for job in jobs if job.exception() is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, BrokenTurnError)), errors[0])
    return [job.result() for job in jobs]
