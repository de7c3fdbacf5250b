"""Features that several processes of a host read: no copy for each, whole whichever ends, and without leftovers."""

import contextlib
import copy
import os
import pickle
import signal
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from pyg_direct import CSRTopo, Feature
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.features.process_sharing import Handle, list_hot_ids
from pyg_direct.ops.rows.gather_rows import Directory
from pyg_direct.runtime.host.shared_memory import find_shared
from tests.processes import quick_starts, run_ranks

IDS = [6, 0, 9, 9, 3]


def make_rows(dtype=torch.float32, num_rows=10, width=3):
    return torch.arange(num_rows * width).view(num_rows, width).to(dtype)


def make_feature(dtype=torch.float32, **options):
    return Feature(device="cpu", **options).from_cpu_tensor(make_rows(dtype))


def read(rank, feature, queue):
    queue.put((feature[torch.tensor(IDS)].tolist(), list(feature.shape), str(feature.dtype), feature.device.type))


def read_pid(rank, feature, queue):
    assert feature[torch.tensor(IDS)].shape[0] == len(IDS)
    queue.put(os.getpid())


def ask_children(feature, count=2, what=read):
    with quick_starts():
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(what, args=(feature, queue), nprocs=count)
    return [queue.get() for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "options"), [
    (torch.float32, {"store_dtype": torch.float8_e4m3fn}),
    (torch.bfloat16, {"cache_policy": "p2p_clique_replicate", "device_cache_size": "20%"}),
])  # fmt: skip
def test_spawned_processes_read_the_same_rows(dtype, options):
    feature = make_feature(dtype, **options)

    got = ask_children(feature)

    expected = Feature(device="cpu", **options).from_cpu_tensor(make_rows(dtype))[torch.tensor(IDS)].tolist()
    assert got == [(expected, [10, 3], str(dtype), "cpu")] * 2
    assert feature[torch.tensor(IDS)].tolist() == expected


@pytest.mark.slow
def test_rows_are_sent_by_the_names_they_were_given():
    feature = make_feature()
    feature.set_local_order(torch.arange(9, -1, -1))

    ((got, *_),) = ask_children(feature, 1)

    assert got == make_rows().flip(0)[IDS].tolist()


def see_writing(rank, feature):
    feature[torch.tensor([0])]
    feature.stored.tier.table[rank] = 100 + rank


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_there_is_one_copy_of_the_rows():
    rows = make_rows()
    feature = Feature(device="cpu", device_list="group").from_cpu_tensor(rows)

    mp.spawn(see_writing, args=(feature,), nprocs=2)

    assert rows[:2].tolist() == [[100.0] * 3, [101.0] * 3]


def test_a_handle_is_small_and_made_once():
    feature = Feature(device="cpu").from_cpu_tensor(torch.zeros(1000, 1000))

    handle = feature.share_ipc()

    assert isinstance(handle, Handle)
    assert feature.share_ipc() is handle
    assert len(pickle.dumps(handle)) < 3000
    assert find_shared(feature.stored.tier.table) is handle.host


def test_handles_open_in_this_process_too():
    handle = make_feature().share_ipc()

    for feature in (Feature.lazy_from_ipc_handle(handle), Feature.new_from_ipc_handle(0, handle)):
        assert feature[torch.tensor(IDS)].tolist() == make_rows()[IDS].tolist()
        assert list(feature.shape) == [10, 3]


class OwnFeature(Feature):
    """A program's."""


def test_a_class_derived_from_it_is_sent_by_a_handle_too():
    feature = OwnFeature(device="cpu").from_cpu_tensor(make_rows())

    got = ForkingPickler.loads(ForkingPickler.dumps(feature))

    assert type(got) is OwnFeature
    assert got[torch.tensor(IDS)].tolist() == make_rows()[IDS].tolist()
    feature.share_ipc().rows[6] = -7
    assert got[[6]].tolist() == [[-7.0] * 3]


def test_a_handle_that_is_not_opened_tells_what_it_holds():
    feature = Feature.lazy_from_ipc_handle(make_feature().share_ipc())
    feature.count_served()

    before = feature.tell()
    feature[torch.tensor(IDS)]

    assert [tier[:3] for tier in before.tiers] == [("host memory (cpu)", 10, 0)]
    assert [tier[:3] for tier in feature.tell().tiers] == [("host memory (cpu)", 10, 5)]
    assert feature.hit_rate == 0


def test_shared_rows_are_not_updated_and_a_deep_copy_shares_them():
    feature = make_feature()
    handle = feature.share_ipc()

    other = copy.deepcopy(feature)

    assert other.share_ipc() is handle
    for one in (feature, other):
        with pytest.raises(ArgumentError, match="rows that several processes share cannot be updated"):
            one.update_([1], torch.ones(1, 3))


def test_ids_are_checked_in_every_process():
    feature = Feature.lazy_from_ipc_handle(make_feature().share_ipc())

    with pytest.raises(IdError, match="node_idx"):
        feature[torch.tensor([10])]


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: Feature(device="cpu").share_ipc(), ArgumentError, "holds no rows yet"),
    (lambda: pickle.dumps(Feature(device="cpu")), ArgumentError, "without rows cannot be sent"),
    (lambda: Feature.lazy_from_ipc_handle(3), ArgumentTypeError, "ipc_handle must be what share_ipc returned, got int"),
    (lambda: Feature(cold_policy="warm"), ArgumentError, "one of auto, unified, pinned, shard, got 'warm'"),
    (lambda: Feature(cache_policy="p2p"), ArgumentError, "cache_policy must be one of"),
    (lambda: Feature(device_list="all"), ArgumentError, "device_list must hold GPU indices or be 'group', got 'all'"),
    (lambda: Feature(device_list=[0, 0]), ArgumentError, "device_list must hold every GPU once"),
    (lambda: Feature(device_group_list=[[0, 1], [1]]), ArgumentError, "device_group_list must hold every GPU once"),
])  # fmt: skip
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_feature_over_a_file_is_opened_by_each_process(tmp_path):
    import numpy as np

    np.save(tmp_path / "x.npy", make_rows().numpy())
    feature = Feature(device="cpu").from_file(tmp_path / "x.npy")

    with pytest.raises(ArgumentError, match="call from_file in each process"):
        feature.share_ipc()


@pytest.mark.parametrize("ids", [[], [0], [31, 32, 33, 69], list(range(70))])
def test_a_directory_lists_its_ids(ids):
    directory = Directory.of(torch.tensor(ids, dtype=torch.int64), 70)

    assert list_hot_ids(directory).tolist() == ids


def share_in_group(rank):
    # Every process has loaded the table; all see the first one's.
    rows = make_rows() if rank == 0 else make_rows() * 0
    topo = CSRTopo(torch.randint(10, (2, 50)), num_nodes=10)
    feature = Feature(device="cpu", device_list="group", csr_topo=topo, device_cache_size="50%").from_cpu_tensor(rows)
    first = feature[torch.tensor(IDS)].tolist()
    torch.distributed.barrier()
    rows[rank] = 100 + rank
    torch.distributed.barrier()
    return first, rows.tolist()


@pytest.mark.slow
def test_processes_of_a_group_share_the_rows_of_the_first():
    results = run_ranks(share_in_group, 2)

    expected = make_rows()
    for first, rows in results:
        assert first == expected[IDS].tolist()
        assert rows == [[100.0] * 3, [101.0] * 3, *expected[2:].tolist()]


def own(connection):
    connection.send(make_feature())
    connection.recv()


@pytest.mark.slow
def test_rows_of_a_killed_owner_stay_whole():
    mine, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=own, args=(theirs,))
    process.start()
    feature = mine.recv()

    os.kill(process.pid, signal.SIGKILL)
    process.join()

    assert feature[torch.tensor(IDS)].tolist() == make_rows()[IDS].tolist()


def list_processes():
    # This process and its children: none of them starts others.
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [str(os.getpid()), *(pid for pids in children for pid in pids)]


def find_memory():
    # Nameless memory that these processes have open or mapped, by its number.
    found = set()
    for pid in list_processes():
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found |= {path.stat().st_ino} if "memfd:pyg_direct" in os.readlink(path) else set()
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found |= {int(line.split()[4]) for line in lines if "memfd:pyg_direct" in line}
    return found


@pytest.mark.slow
def test_spawning_again_and_again_leaves_nothing():
    feature = Feature(device="cpu").from_cpu_tensor(torch.ones(1 << 22, 4))
    ask_children(feature, 1)
    names, descriptors, memory = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd")), find_memory()
    assert memory

    pids = [pid for _ in range(3) for pid in ask_children(feature, 1, what=read_pid)]

    assert len(set(pids)) == 3
    assert find_memory() == memory
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
    # Other programs of the machine make names too: torch's have the number of the process that made them.
    own = [f"_{pid}_" for pid in (*pids, os.getpid())]
    assert not [name for name in set(os.listdir("/dev/shm")) - names if any(mark in name for mark in own)]
