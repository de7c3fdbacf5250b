"""After each fault of a rank that exchanges by NCCL the other hears which it was, and a new group loads its batches."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pyg_direct import NeighborLoader
from pyg_direct.distributed import exchange_plan
from pyg_direct.distributed.dist_loader import DistNeighborLoader
from pyg_direct.distributed.exchange_plan import ExchangePlan
from pyg_direct.ops.sampling.draw_random import derive_key
from pyg_direct.runtime.comm.nccl_segments import NcclSegments
from tests.distributed.dist_loader.test_new_group import FAULTS, LIMIT, OPTIONS, end, hear, load, make_function
from tests.distributed.ranks import as_dict, assert_equal, assert_in_turn, make_data, open_graph, write_data
from tests.processes import join_group, ranks_started, run_ranks, wait_for_end

pytestmark = [pytest.mark.gpu, pytest.mark.gpus]

HEARD = {
    **{name: FAULTS[name] for name in ("sample", "options", "transform", "interrupt", "left")},
    "memory": ("MemoryLimitError: a plan for", "RankError: rank 1 failed: MemoryLimitError: a plan for"),
    "nccl": ("DeviceError: NCCL must connect", "RankError: rank 1 failed: DeviceError: NCCL must connect"),
}
# Ends of rank 1: before it loads, while a graph of rank 0 waits for it in NCCL, after an epoch; and a rank that hangs.
ENDS = ("before", "within", "between", "frozen")


def open_on_gpu(rank, folder, **options):
    return open_graph(folder, device=f"cuda:{rank}", timeout=LIMIT, silence=3, **options)


def fail(error):
    """Make a function that fails."""

    def run(*args, **options):
        raise error

    return run


def make_fault(name, folder, rank):
    """Do what ranks do where rank 1 has a fault; returns the number of batches."""
    is_faulty = rank == 1
    with pytest.MonkeyPatch.context() as patch:
        if name == "nccl" and is_faulty:
            patch.setattr(NcclSegments, "open", fail(RuntimeError("no such interface")))
        if name == "memory" and is_faulty:
            patch.setattr(ExchangePlan, "_allocate_slot", fail(torch.OutOfMemoryError("no room")))
        with open_on_gpu(rank, folder) as graph:
            function = make_function() if is_faulty else (lambda out: out)
            if name == "options":
                DistNeighborLoader(graph, [3, 2], batch_size=7 + is_faulty, seed=1)
            options = {"transform": {"transform": function}, "sample": {"transform_sampler_output": function}}
            count = 0
            for count, _ in enumerate(load(graph, **options.get(name, {})), 1):
                if is_faulty and count == 2 and name == "left":
                    break
                if is_faulty and count == 2 and name == "interrupt":
                    end(name)
            return count


def load_in_new_group(rank, count, folder, place):
    """Batches of a new group of as many ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    join_group(rank, count, f"file://{place}", timeout=timedelta(minutes=2))
    with open_on_gpu(rank, folder / str(count)) as graph:
        return [as_dict(batch.cpu()) for batch in load(graph)]


def have_faults(rank, folder):
    """What a rank hears of each fault, and its batches in the group after it."""
    torch.cuda.set_device(rank)
    found = {}
    for name in HEARD:
        heard = hear(make_fault, name, folder / "2", rank)
        found[name] = heard, load_in_new_group(rank, 2, folder, folder / name)
    return found


@pytest.mark.timeout(600)
def test_a_group_after_each_fault_of_a_rank(tmp_path):
    data = make_data()
    write_data(tmp_path / "2", data, 2)

    first, second = run_ranks(have_faults, 2, tmp_path)

    alone = list(NeighborLoader(data, [3, 2], device="cpu", **OPTIONS))
    for name, words in HEARD.items():
        for said, expected in zip((second[name][0], first[name][0]), words, strict=True):
            assert said == expected if isinstance(expected, int) else said.startswith(expected), (name, said)
        assert_in_turn([first[name][1], second[name][1]], alone)


def lose_rank(rank, folder, how):
    """What rank 0 hears of rank 1, which ends, and its batches afterwards."""
    torch.cuda.set_device(rank)
    is_last, calls, submit = rank == 1, itertools.count(1), ExchangePlan._submit

    def end_at_fifth(plan, pending):
        if next(calls) == 5:
            end(how)
        return submit(plan, pending)

    if is_last and how in ("within", "frozen"):
        # Rank 0 submits the same batch, whose graph waits for this rank.
        ExchangePlan._submit = end_at_fifth

    def load_twice():
        graph = open_on_gpu(rank, folder / "2")
        if is_last and how == "before":
            end(how)
        for _ in range(2):
            for _ in load(graph):
                pass
            if is_last:
                end(how)

    heard = hear(load_twice)
    torch.save((heard, load_in_new_group(0, 1, folder, folder / "alone")), folder / "found")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_or_hangs_is_named(tmp_path, how):
    data = make_data()
    for count in (1, 2):
        write_data(tmp_path / str(count), data, count)

    with ranks_started(lose_rank, 2, tmp_path, how, store="tcp") as context:
        wait_for_end(context, 0)

    heard, batches = torch.load(tmp_path / "found", weights_only=False)
    assert heard.startswith("RankError: rank 1 is gone: "), heard
    for got, expected in zip(batches, NeighborLoader(data, [3, 2], device="cpu", **OPTIONS), strict=True):
        assert_equal(got, as_dict(expected))


def load_unevenly(rank, folder):
    """Batches of one seed on rank 0, and of as many on rank 1 that only its messages are too short; and their room."""
    torch.cuda.set_device(rank)
    exchange_plan._FIRST_NODES = exchange_plan._FIRST_EDGES = 16
    with open_on_gpu(rank, folder) as graph:
        loader = DistNeighborLoader(graph, [3, 2], torch.arange(10 if rank == 0 else 150), ranks="own", seed=1,
                                    batch_size=1 if rank == 0 else 15)  # fmt: skip
        found = [as_dict(batch.cpu()) for batch in loader]
        return found, loader._sampler.open_plan()._find_captured().room


def test_both_ranks_sample_again_what_one_has_no_room_for(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    ranks = run_ranks(load_unevenly, 2, tmp_path / "p")

    (_, room), (_, other) = ranks
    assert room == other
    assert max(room.edges) > 16
    for rank, (found, _) in enumerate(ranks):
        seeds, size = (torch.arange(10), 1) if rank == 0 else (torch.arange(150), 15)
        alone = NeighborLoader(data, [3, 2], seeds, batch_size=size, seed=int(derive_key(1, rank, 0)), device="cpu")
        for got, expected in zip(found, alone, strict=True):
            assert_equal(got, as_dict(expected))
