"""After each fault of a rank the others know which it was, and a new group in the same program loads its batches."""

import itertools
import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pyg_direct import NeighborLoader
from pyg_direct.distributed.dist_loader import DistNeighborLoader
from pyg_direct.distributed.row_exchange import RowExchange
from pyg_direct.errors import ArgumentError, RankError
from tests.distributed.ranks import as_dict, assert_equal, assert_in_turn, make_data, open_graph, write_data
from tests.processes import LostError, begin_until_joined, join_group, ranks_started, run_ranks

# Long enough that no rank reaches it, so that a test which waits for it fails.
LIMIT = 3600
OPTIONS = {"batch_size": 15, "seed": 1}


def load(graph, **options):
    return DistNeighborLoader(graph, [3, 2], **OPTIONS, **options)


def hear(fn, *args):
    """Return the result of `fn`, or its error in words."""
    try:
        return fn(*args)
    except (ArgumentError, RankError, ArithmeticError, MemoryError, KeyboardInterrupt, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def fail_at(what, error, monkeypatch):
    """Make a method fail at its third call."""
    calls, method = [], getattr(RowExchange, what)

    def fail(*args):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return method(*args)

    monkeypatch.setattr(RowExchange, what, fail)


def make_function():
    """Make a transform that fails at its third call."""
    calls = itertools.count(1)

    def run(value):
        if next(calls) == 3:
            raise ZeroDivisionError("on purpose")
        return value

    return run


def make_fault(name, folder, is_faulty):
    """Do what ranks do where one of them has a fault; returns the number of batches."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "network" and is_faulty:
            patch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
        with open_graph(folder, timeout=LIMIT) as graph:
            function = make_function() if is_faulty else (lambda out: out)
            if name == "options":
                DistNeighborLoader(graph, [3, 2], batch_size=7 + is_faulty, seed=1)
            if name == "memory" and is_faulty:
                fail_at("answer", MemoryError("no room"), patch)
            options = {"transform": {"transform": function}, "sample": {"transform_sampler_output": function},
                       "ahead": {"ahead": 4}}.get(name, {})  # fmt: skip
            if name == "ahead" and is_faulty:
                fail_at("fetch", MemoryError("no room"), patch)
            count = 0
            for count, _ in enumerate(load(graph, **options), 1):
                if is_faulty and count == 2 and name == "left":
                    break
                if is_faulty and count == 2 and name == "interrupt":
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    signal.raise_signal(signal.SIGINT)
            return count


def load_in_new_group(rank, count, folder, place):
    """Batches of a new group of as many ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        join_group(rank, count, f"file://{place}", timeout=timedelta(minutes=2))
    except LostError:
        # Others may wait for this rank.
        place.with_name("lost").touch()
        raise
    with open_graph(folder / str(count)) as graph:
        return [as_dict(batch) for batch in load(graph)]


FAULTS = {
    "sample": ("ZeroDivisionError: on purpose", "RankError: rank 1 failed: ZeroDivisionError: on purpose"),
    "memory": ("MemoryError: no room", "RankError: rank 1 failed: MemoryError: no room"),
    "ahead": ("MemoryError: no room", "RankError: rank 1 failed: MemoryError: no room"),
    "options": ("ArgumentError: seeds, and seed, batch_size", "ArgumentError: seeds, and seed, batch_size"),
    "network": ("ArgumentError: GLOO_SOCKET_IFNAME must name", "RankError: rank 1 failed: ArgumentError: GLOO_SOCKET"),
    # These errors are the program's: the rank still takes part in the batches of the others.
    "transform": ("ZeroDivisionError: on purpose", 10),
    "interrupt": ("KeyboardInterrupt: ", 10),
    "left": (2, 10),
}


def have_faults(rank, folder, places):
    """What a rank hears of each fault, which rank 1 has, and its batches in the group after it."""
    found = {}
    for name in FAULTS:
        heard = hear(make_fault, name, folder / "2", rank == 1)
        found[name] = heard, load_in_new_group(rank, 2, folder, places / name)
    return found


@pytest.mark.timeout(300)
def test_a_group_after_each_fault_of_a_rank(tmp_path):
    data = make_data()
    write_data(tmp_path / "2", data, 2)

    first, second = run_ranks(have_faults, 2, tmp_path, tmp_path)

    alone = list(NeighborLoader(data, [3, 2], device="cpu", **OPTIONS))
    for name, words in FAULTS.items():
        for said, expected in zip((second[name][0], first[name][0]), words, strict=True):
            assert said == expected if isinstance(expected, int) else said.startswith(expected), (name, said)
        assert_in_turn([first[name][1], second[name][1]], alone)


# Faults of the last rank, after which it is gone.
ENDS = ("before", "within", "between", "error", "interrupt", "frozen")


def end(how):
    if how == "error":
        raise ZeroDivisionError("on purpose")
    if how == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGSTOP if how == "frozen" else signal.SIGKILL)


def lose_rank(how, folder, is_last):
    """What ranks do while the last one ends."""
    graph = open_graph(folder, timeout=LIMIT, silence=8)
    loader = load(graph)
    if how == "before" and is_last:
        end(how)
    for epoch in range(2):
        for number, _ in enumerate(loader):
            if is_last and number == 1 and epoch == 0 and how != "between":
                end(how)
        if is_last and how == "between":
            end(how)
    return "nothing"


def lose_ranks(rank, folder, places):
    """What a rank hears of ranks that are lost one after the other, and the batches of those that are left."""
    found = []
    for place, how in enumerate(ENDS):
        count = len(ENDS) + 2 - place
        heard = hear(lose_rank, how, folder / str(count), False) if rank < count - 1 else lose_rank(
            how, folder / str(count), True)  # fmt: skip
        found.append((heard, load_in_new_group(rank, count - 1, folder, places / how)))
    torch.save(found, places / f"found-{rank}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_of_those_that_are_left(tmp_path):
    data = make_data()
    for count in range(2, len(ENDS) + 3):
        write_data(tmp_path / str(count), data, count)

    def start():
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        with ranks_started(lose_ranks, len(ENDS) + 2, tmp_path, place) as context:
            # Others end with an error, or not at all.
            left = context.processes[:2]
            while [process.exitcode for process in left] != [0, 0]:
                if (place / "lost").exists():
                    raise LostError
                assert not any(process.exitcode for process in left)
                next(process for process in left if process.exitcode is None).join(0.1)
        return [torch.load(place / f"found-{rank}", weights_only=False) for rank in range(2)]

    found = begin_until_joined(start)
    alone = list(NeighborLoader(data, [3, 2], device="cpu", **OPTIONS))
    for place, how in enumerate(ENDS):
        lost = len(ENDS) + 1 - place
        for rank, own in enumerate(found):
            heard, batches = own[place]
            assert heard.startswith(f"RankError: rank {lost} is gone: "), (how, heard)
            for number, batch in enumerate(batches):
                assert_equal(batch, as_dict(alone[(rank + number * lost) % len(alone)]))
