"""Several processes share the batches of an epoch: the batches are those of one process, whatever their number."""

import copy
import itertools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric.nn import SAGEConv

from pyg_direct import LinkNeighborLoader, NeighborLoader, NodeLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader import NeighborSampler as LayerLoader
from pyg_direct.sampler import NeighborSampler
from tests.batches import hash_batches, make_data
from tests.hetero_data import make_hetero
from tests.processes import run_ranks


def make_loader(device="cpu", num_seeds=70, **options):
    return NeighborLoader(make_data(), [3, 2], torch.arange(num_seeds), **{
        "batch_size": 16, "shuffle": True, "seed": 1, "device": device, **options})  # fmt: skip


def hashes(loader):
    return [hash_batches([batch]) for batch in loader]


def share_out(count, **options):
    return [hashes(make_loader(ranks=(rank, count), **options)) for rank in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_batches_are_those_of_one_process_in_turn(real_device, count):
    expected = hashes(make_loader(real_device))

    got = share_out(count, device=real_device, uneven="keep")

    assert [got[number % count][number // count] for number in range(5)] == expected
    assert sum(map(len, got)) == 5


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_padding_gives_every_process_as_many_batches_and_loses_none(count):
    expected = hashes(make_loader())

    got = share_out(count)

    assert {len(batches) for batches in got} == {-(-5 // count)}
    in_order = [got[number % count][number // count] for number in range(count * len(got[0]))]
    assert in_order[:5] == expected
    # The first seeds of the epoch again, with draws of their own.
    assert len(set(in_order)) == len(in_order)


def test_a_padded_batch_has_the_seeds_of_the_first_batches():
    padded = list(make_loader(ranks=(1, 2)))[-1]

    assert padded.input_id.tolist() == next(iter(make_loader())).input_id.tolist()


def test_dropping_leaves_the_last_round_out():
    expected = hashes(make_loader())

    first, second = share_out(2, uneven="drop")

    assert [first[0], second[0], first[1], second[1]] == expected[:4]
    assert len(first) == len(second) == 2


@pytest.mark.parametrize(("uneven", "lengths"), [("pad", [2, 2, 2]), ("drop", [1, 1, 1]), ("keep", [2, 2, 1])])
def test_length_is_the_number_of_batches_that_come(uneven, lengths):
    loaders = [make_loader(ranks=(rank, 3), uneven=uneven) for rank in range(3)]

    assert [len(loader) for loader in loaders] == lengths == [len(list(loader)) for loader in loaders]


@pytest.mark.parametrize("uneven", ["pad", "drop", "keep"])
@pytest.mark.parametrize("num_seeds", [0, 5])
def test_fewer_batches_than_processes(uneven, num_seeds):
    got = [len(list(make_loader(ranks=(rank, 3), uneven=uneven, num_seeds=num_seeds))) for rank in range(3)]

    assert got == ([0, 0, 0] if num_seeds == 0 or uneven == "drop" else [1, 1, 1] if uneven == "pad" else [1, 0, 0])


def test_drop_last_drops_before_batches_are_shared():
    assert [len(make_loader(ranks=(rank, 2), drop_last=True)) for rank in range(2)] == [2, 2]


def test_epochs_differ_and_stay_in_step():
    alone = make_loader()
    ranks = [make_loader(ranks=(rank, 2), uneven="keep") for rank in range(2)]

    for _ in range(3):
        expected = hashes(alone)
        got = [hashes(loader) for loader in ranks]
        assert [got[number % 2][number // 2] for number in range(5)] == expected


def test_an_epoch_is_resumed_by_another_number_of_processes():
    expected = hashes(make_loader())
    state = None
    for number, _ in enumerate(make_loader_kept := make_loader(ranks=(1, 2))):
        if number == 0:
            state = make_loader_kept.state_dict()
            break

    alone = make_loader(seed=9)
    alone.load_state_dict(state)

    assert state["batch"] == 2
    assert hashes(alone) == expected[2:]


def test_batches_read_together_are_those_of_the_process(real_device):
    options = {"device": real_device, "placement": "cpu" if real_device.type == "cpu" else "unified"}
    expected = share_out(2, **options)

    assert share_out(2, super_batch=2, **options) == expected


def make_others(rank, count):
    data, typed, common = make_data(), make_hetero(), {"batch_size": 16, "seed": 1, "device": "cpu",
                                                            "ranks": (rank, count), "uneven": "keep"}  # fmt: skip
    sampler = NeighborSampler(data, [3, 2], device="cpu", seed=1)
    kind = typed.edge_types[0]
    return {
        "types": NeighborLoader(typed, [3, 2], kind[2], **common),
        "nodes": NodeLoader(data, sampler, shuffle=True, **common),
        "links": LinkNeighborLoader(data, [3, 2], neg_sampling="binary", shuffle=True, **{**common, "batch_size": 100}),
    }


@pytest.mark.parametrize("name", ["types", "nodes", "links"])
def test_every_loader_shares(name):
    expected = [batch_words(batch) for batch in make_others(0, 1)[name]]

    got = [[batch_words(batch) for batch in make_others(rank, 2)[name]] for rank in range(2)]

    assert len(expected) > 2
    assert [got[number % 2][number // 2] for number in range(len(expected))] == expected


def test_the_loader_of_layers_shares():
    def make(rank, count):
        return LayerLoader(make_data().edge_index, [3], batch_size=16, seed=1, device="cpu", ranks=(rank, count))

    expected = [n_id.tolist() for _, n_id, _ in make(0, 1)]

    got = [[n_id.tolist() for _, n_id, _ in make(rank, 2)] for rank in range(2)]

    assert [got[number % 2][number // 2] for number in range(5)] == expected


def batch_words(batch):
    return str({str(key): value for key, value in batch.to_dict().items()})


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"ranks": (2, 2)}, ArgumentError, r"ranks must have a rank in \[0, 2\), got 2"),
    ({"ranks": (0,)}, ArgumentTypeError, "ranks must be None, 'auto' or"),
    ({"ranks": (0, True)}, ArgumentTypeError, "ranks must be None, 'auto' or"),
    ({"ranks": "some"}, ArgumentTypeError, "got 'some'"),
    ({"ranks": (0, 2), "uneven": "wait"}, ArgumentError, "uneven must be one of pad, drop, keep, got 'wait'"),
])  # fmt: skip
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_loader(**options)


def test_a_sampler_of_the_users_is_not_shared():
    loader = make_loader(shuffle=False, ranks=(0, 2), sampler=DistributedSampler(range(70), 2, 0))

    with pytest.raises(ArgumentError, match="ranks needs batches that the loader itself makes"):
        iter(loader)
    with pytest.raises(ArgumentError, match="ranks needs batches that the loader itself makes"):
        len(loader)


def test_processes_without_a_group_must_be_given_the_seed():
    loader = make_loader(seed=None, ranks=(0, 2))

    with pytest.raises(ArgumentError, match=r"seed must be given with ranks=\(0, 2\)"):
        next(iter(loader))


def test_auto_is_one_process_where_there_is_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    assert hashes(make_loader(ranks="auto")) == hashes(make_loader())
    assert len(list(make_loader(ranks="auto", seed=None))) == 5


def test_auto_reads_what_torchrun_says(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    assert hashes(make_loader(ranks="auto")) == hashes(make_loader(ranks=(1, 2)))


def collect(rank):
    # The generators of processes differ, also in how far they are: each epoch follows that of rank 0.
    torch.manual_seed(rank + 5)
    loader, epochs = make_loader(seed=None, ranks="auto"), []
    for _ in range(2):
        epochs.append(hashes(loader))
        torch.rand(rank)
    left = hashes(itertools.islice(loader, 1))
    state = loader.state_dict()
    loader.load_state_dict(state)
    return [*epochs, left + hashes(loader)], state


@pytest.mark.slow
def test_two_processes_of_a_group_share_an_epoch():
    torch.manual_seed(5)
    alone = make_loader(seed=None)
    expected = [hashes(alone) for _ in range(3)]

    (first, state), (second, other_state) = run_ranks(collect, 2)

    assert state == other_state
    for epoch in range(3):
        got = [first[epoch], second[epoch]]
        assert [got[number % 2][number // 2] for number in range(5)] == expected[epoch]


def begin_unlike(rank):
    said = {}
    for name, values in {"seed": (1, 2), "num_seeds": (70, 64), "batch_size": (16, 8), "uneven": ("pad", "keep"),
                         "drop_last": (False, True), "shuffle": (True, False)}.items():  # fmt: skip
        # No process waits for another one, so that each is seen to differ by the second.
        for turn in range(2):
            if turn == rank:
                try:
                    next(iter(make_loader(**{"ranks": "auto", name: values[rank]})))
                except ArgumentError as error:
                    said[name] = str(error)
            dist.barrier()
    return said, len(hashes(make_loader(ranks="auto")))


@pytest.mark.slow
def test_processes_whose_loaders_differ_hear_in_what():
    (first, _), (second, _) = got = run_ranks(begin_unlike, 2)

    assert first == {}
    unlike = [("seed", 2, 1), ("num_seeds", 64, 70), ("batch_size", 8, 16), ("uneven", "'keep'", "'pad'"),
              ("drop_last", True, False), ("shuffle", False, True)]  # fmt: skip
    rule = "must be equal in every process of ranks='auto'"
    assert second == {name: f"{name} {rule}, got {own} in rank 1 and {other} in rank 0" for name, own, other in unlike}
    # As before, loaders that are alike.
    assert [count for _, count in got] == [3, 3]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(5, 7)

    def forward(self, batch):
        return self.conv(batch.x, batch.edge_index)[: batch.batch_size]


def train_in_all_ways(rank):
    return {way: train(way) for way in ("pad", "join", "sampler")}


def train(way):
    torch.manual_seed(3)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"ranks": "auto"} if way != "sampler" else {
        "shuffle": False, "sampler": DistributedSampler(range(70), seed=3)}  # fmt: skip
    loader = make_loader(uneven="keep" if way == "join" else "pad", **options)
    num_steps = 0
    with Join([model], enable=way == "join"):
        for batch in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), batch.y[: batch.batch_size]).backward()
            optimizer.step()
            num_steps += 1
    return num_steps, [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow
def test_ddp_trains_to_the_end_of_uneven_epochs():
    first, second = run_ranks(train_in_all_ways, 2)

    steps = {way: [first[way][0], second[way][0]] for way in first}
    assert steps == {"pad": [3, 3], "join": [3, 2], "sampler": [3, 3]}
    for way in first:
        for a, b in zip(first[way][1], second[way][1], strict=True):
            assert torch.isfinite(a).all()
            assert torch.equal(a, b)


def die(rank):
    loader = make_loader(ranks="auto")
    for number, _ in enumerate(loader):
        if rank == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_others()


def fail(rank):
    for _ in make_loader(ranks="auto", transform=refuse if rank == 1 else None):
        wait_for_others()


def wait_for_others():
    """An error of another one is told in words of its own first, however busy the machine: it ends this one then."""
    try:
        dist.barrier()
    except RuntimeError:
        # Longer than a test may take.
        time.sleep(3600)
        raise


def refuse(batch):
    raise RuntimeError(f"no batch of {batch.batch_size} seeds today")


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_is_named():
    with pytest.raises(mp.ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        run_ranks(die, 2)

    assert not mp.active_children()


@pytest.mark.slow
def test_an_error_in_a_process_shows_its_traceback():
    with pytest.raises(mp.ProcessRaisedException, match="no batch of 16 seeds today"):
        run_ranks(fail, 2)


def test_a_copy_keeps_its_share():
    loader = make_loader(ranks=(1, 2))

    assert hashes(copy.copy(loader)) == hashes(loader)


def read_shared(rank):
    data = make_data()
    data.x = data.x.repeat(1, 4) if rank == 0 else data.x.repeat(1, 4) * 0
    loader = NeighborLoader(data, [3, 2], batch_size=16, seed=1, device="cpu", ranks="auto", uneven="keep",
                            cache_policy="p2p_clique_replicate")  # fmt: skip
    return hashes(loader), float(data.x.sum()), float(data.y.sum())


@pytest.mark.slow
def test_processes_keep_the_features_of_the_first_together():
    data = make_data()
    data.x = data.x.repeat(1, 4)
    expected = hashes(NeighborLoader(data, [3, 2], batch_size=16, seed=1, device="cpu"))

    results = run_ranks(read_shared, 2)

    got = [batches for batches, *_ in results]
    assert [got[number % 2][number // 2] for number in range(5)] == expected
    # The tensors of all processes are views of the same rows.
    assert [total for _, total, _ in results] == [float(data.x.sum())] * 2


@pytest.mark.parametrize(("options", "message"), [
    ({"cache_policy": "all"}, "cache_policy must be one of None, device_replicate, p2p_clique_replicate, got 'all'"),
    ({"cold_policy": "unified"}, "cold_policy='unified' needs a cache_policy, got None"),
    ({"cache_policy": "p2p_clique_replicate", "cold_policy": "shard"}, "'shard' needs cache_policy='device_replicate'"),
    ({"cache_policy": "device_replicate", "cold_policy": "ice"}, "cold_policy must be one of auto, unified, pinned"),
])  # fmt: skip
def test_bad_policies_are_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        make_loader(**options)
