"""Several ranks in one process: a thread each, and an exchange over a barrier instead of a network."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor


class Meeting:
    def __init__(self, size):
        self.size, self.barrier, self.box = size, threading.Barrier(size, timeout=60), {}


class ThreadCommunicator:
    """What `Communicator` offers to those who exchange, between threads."""

    def __init__(self, meeting, rank):
        self._meeting, self.rank, self.size, self.sent = meeting, rank, meeting.size, Counter()
        self.num_exchanges = 0

    def _swap(self, values):
        self._meeting.box[self.rank] = values
        self._meeting.barrier.wait()
        found = [self._meeting.box[rank][self.rank] for rank in range(self.size)]
        self._meeting.barrier.wait()
        return found

    def agree(self, value):
        return self._swap([value] * self.size)

    def exchange(self, parts, what):
        self.num_exchanges += 1
        self.sent[what] += sum(part.numel() for rank, part in enumerate(parts) if rank != self.rank)
        return self._swap(list(parts))

    def run(self, fn, *args):
        return fn(*args)


def run_threads(fn, size):
    """What `fn(communicator)` returns on each rank."""
    meeting = Meeting(size)

    def run(rank):
        try:
            return fn(ThreadCommunicator(meeting, rank))
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
