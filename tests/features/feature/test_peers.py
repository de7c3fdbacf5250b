"""Features over two GPUs: hot rows in the memories of a clique, which each reads as its own."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pyg_direct import CSRTopo, Feature, save_rows
from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.runtime.cuda.peer_memory import GRANULE, DeviceGroup, Spread, init_p2p, p2pCliqueTopo, read_link
from tests.processes import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.gpus]
NUM_ROWS, WIDTH = 100_000, 128


def make_rows():
    return torch.arange(NUM_ROWS * WIDTH).view(NUM_ROWS, WIDTH).float()


def make_topo():
    torch.manual_seed(0)
    # Nodes of low number are listed most.
    source = (torch.rand(400_000) ** 3 * NUM_ROWS).long()
    return CSRTopo(torch.stack([source, torch.randint(NUM_ROWS, (400_000,))]), num_nodes=NUM_ROWS)


def make_feature(**options):
    options = {"device_list": [0, 1], "device_cache_size": "20%", "cache_policy": "p2p_clique_replicate", **options}
    return Feature(csr_topo=make_topo(), **options).from_cpu_tensor(make_rows())


def make_ids(seed=0):
    return torch.randint(NUM_ROWS, (50_000,), generator=torch.Generator().manual_seed(seed))


def test_gpus_of_this_machine_are_a_clique():
    topo = p2pCliqueTopo([0, 1])

    assert topo.p2p_clique == {0: [0, 1]}
    assert (topo.get_clique_id(1), topo.info()) == (0, "clique 0: GPUs 0, 1")
    assert read_link(0, 1).is_nvlink
    with pytest.raises(ArgumentError, match="device_id must be one of"):
        topo.get_clique_id(7)


def test_kernels_read_tensors_of_a_peer():
    assert init_p2p([0, 1]) == [(0, 1), (1, 0)] == init_p2p([0, 1])


def test_a_spread_is_one_array_on_every_gpu():
    spread = Spread.allocate(7 * GRANULE - 8, GRANULE, [0, 1, 1, 0, 1, 0, 1])

    views = [spread.view(index).view(torch.int64) for index in (0, 1)]
    views[1].copy_(torch.arange(views[1].numel()))
    torch.cuda.synchronize(1)

    assert [view.device.index for view in views] == [0, 1]
    assert torch.equal(views[0].cpu(), torch.arange(views[0].numel()))
    assert (spread.bytes_on(0), spread.bytes_on(1)) == (3 * GRANULE, 4 * GRANULE)


def test_spreads_give_their_memory_back():
    torch.cuda.synchronize(1)
    Spread.allocate(GRANULE, GRANULE, [1]).view(0)
    before = torch.cuda.mem_get_info(1)[0]

    for _ in range(20):
        Spread.allocate(64 * GRANULE, 64 * GRANULE, [1]).view(0)

    assert torch.cuda.mem_get_info(1)[0] >= before - 64 * GRANULE


@pytest.mark.parametrize("policy", ["device_replicate", "p2p_clique_replicate"])
@pytest.mark.parametrize("cache", [0, "20%", "60%", "100%", 1 << 20])
@pytest.mark.parametrize("cold_policy", ["unified", "pinned"])
def test_rows_are_those_of_the_table(policy, cache, cold_policy):
    feature = make_feature(cache_policy=policy, device_cache_size=cache, cold_policy=cold_policy)

    got = feature[make_ids()]

    assert got.device == torch.device("cuda", 0)
    assert torch.equal(got.cpu(), make_rows()[make_ids()])
    feature.synchronize()


def test_one_process_reads_page_locked_rows_on_both():
    handle = make_feature(cold_policy="pinned").share_ipc()

    features = [Feature.new_from_ipc_handle(rank, handle) for rank in (0, 1)]
    got = [feature[make_ids()] for feature in features]

    assert [rows.device.index for rows in got] == [0, 1]
    assert all(torch.equal(rows.cpu(), make_rows()[make_ids()]) for rows in got)


@pytest.mark.parametrize("store_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_narrow_rows_are_read_from_peers(store_dtype):
    rows = make_rows() / NUM_ROWS
    options = {"store_dtype": store_dtype, "device_cache_size": "30%"}
    expected = Feature(device=0, **options).from_cpu_tensor(rows.clone())[make_ids()]

    got = Feature(device_list=[0, 1], cache_policy="p2p_clique_replicate", **options).from_cpu_tensor(rows)[make_ids()]

    assert torch.equal(got, expected)


def test_a_clique_caches_the_union():
    alone, together = (make_feature(cache_policy=policy) for policy in ("device_replicate", "p2p_clique_replicate"))

    for feature in (alone, together):
        feature[make_ids()]

    assert alone.num_hot_rows == NUM_ROWS // 5
    assert 1.6 * alone.num_hot_rows <= together.num_hot_rows <= 2 * alone.num_hot_rows
    spread = together.share_ipc().hot[0].spread
    assert 0 < spread.bytes_on(0) <= NUM_ROWS * WIDTH * 4 // 5
    assert 0 < spread.bytes_on(1) <= NUM_ROWS * WIDTH * 4 // 5


def test_groups_by_hand_each_have_a_copy():
    feature = make_feature(device_group_list=[DeviceGroup(0, [0]), DeviceGroup(1, [1])])

    got = feature[make_ids()]

    assert torch.equal(got.cpu(), make_rows()[make_ids()])
    assert [hot.devices for hot in feature.share_ipc().hot] == [[0], [1]]
    with pytest.raises(ArgumentError, match="device_group_list must name every GPU"):
        make_feature(device_group_list=[[0]])


def test_rows_of_a_file_are_read_over_hot_ones_of_both(tmp_path):
    feature = Feature(device_list=[0, 1], device_cache_size="10%", host_cache_size="30%")
    feature.from_file(save_rows(tmp_path / "rows.npy", make_rows()))

    got = feature[make_ids()]

    assert torch.equal(got.cpu(), make_rows()[make_ids()])


def test_bad_ids_are_found_in_the_kernel():
    feature = make_feature()

    got = feature[torch.tensor([3, NUM_ROWS], device="cuda:0")]

    assert got[1].abs().sum() == 0
    with pytest.raises(IdError, match="position 1"):
        feature.synchronize()


def read(rank, feature, queue):
    torch.cuda.set_device(rank)
    rows = feature[make_ids(rank)]
    again = feature.read(make_ids(rank).cuda())
    equal = torch.equal(rows.cpu(), make_rows()[make_ids(rank)]) and torch.equal(rows, again)
    queue.put((rank, equal, str(rows.device), feature.num_hot_rows))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["device_replicate", "p2p_clique_replicate"])
def test_spawned_processes_read_out_of_each_others_memory(policy):
    feature = make_feature(cache_policy=policy)
    queue = mp.get_context("spawn").SimpleQueue()

    mp.spawn(read, args=(feature, queue), nprocs=2)

    got = sorted(queue.get() for _ in range(2))
    assert [one[:3] for one in got] == [(0, True, "cuda:0"), (1, True, "cuda:1")]
    assert got[0][3] == got[1][3] >= NUM_ROWS // 5


def read_in_group(rank, policy):
    torch.cuda.set_device(rank)
    feature = Feature(device=rank, device_list="group", device_cache_size="20%", cache_policy=policy,
                      csr_topo=make_topo()).from_cpu_tensor(make_rows())  # fmt: skip
    ids = make_ids(rank)
    first = torch.equal(feature[ids].cpu(), make_rows()[ids])
    dist.barrier()
    spread = feature.share_ipc().hot[0].spread
    return first, feature.num_hot_rows, None if spread is None else [spread.bytes_on(i) for i in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["device_replicate", "p2p_clique_replicate"])
def test_processes_of_a_group_share_their_memories(policy):
    (first, hot, held), (second, other_hot, other_held) = run_ranks(read_in_group, 2, policy)

    assert first
    assert second
    assert hot == other_hot
    assert held == other_held
    if policy == "p2p_clique_replicate":
        assert min(held) > 0


def end_after_sending(connection):
    torch.cuda.set_device(0)
    connection.send(make_feature(device_cache_size="40%"))
    connection.recv()


@pytest.mark.slow
def test_memory_of_a_killed_owner_stays_whole():
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=end_after_sending, args=(theirs,))
    process.start()
    feature = mine.recv()
    before = feature[make_ids()]

    process.kill()
    process.join()

    assert torch.equal(feature[make_ids()], before)
    assert torch.equal(feature[make_ids(3)].cpu(), make_rows()[make_ids(3)])
