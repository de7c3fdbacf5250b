"""Several ranks in one process: a thread each, and an exchange over a barrier instead of a network."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch

from pyg_direct.runtime.comm.communicator import Communicator

CPU = torch.device("cpu")


class Meeting:
    def __init__(self, size):
        self.size, self.barrier, self.box = size, threading.Barrier(size), {}


class ThreadCommunicator(Communicator):
    """A `Communicator` between threads."""

    def __init__(self, meeting, rank, device):
        self._meeting, self.rank, self.size, self.sent = meeting, rank, meeting.size, Counter()
        self.device = self._wire = device
        self._ranks, self._broken, self._memory, self.width, self.num_exchanges = range(self.size), None, {}, 2, 0

    def meet(self, words):
        self.num_exchanges += 1
        return super().meet(words)

    def _all_to_all(self, sent, sizes, sizes_back, out=None, *, in_words=False):
        pieces = sent.clone().split(list(sizes))
        self._meeting.box[self.rank] = dict(zip(self._others(self.rank), pieces, strict=True))
        self._meeting.barrier.wait()
        found = torch.cat([self._meeting.box[rank][self.rank] for rank in self._others(self.rank)] or [sent[:0]])
        self._meeting.barrier.wait()
        assert len(found) == sum(sizes_back)
        return found if out is None else out.copy_(found)

    def _others(self, own):
        return [rank for rank in range(self.size) if rank != own]

    def run(self, fn, *args):
        return fn(*args)


def run_threads(fn, size, device=CPU):
    """What `fn(communicator)` returns on each rank."""
    meeting = Meeting(size)

    def run(rank):
        try:
            return fn(ThreadCommunicator(meeting, rank, device))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        jobs = [pool.submit(run, rank) for rank in range(size)]
    errors = [job.exception() for job in jobs if job.exception() is not None]
    if errors:
        # Not the barrier that broke because of it.
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [job.result() for job in jobs]
