"""Rows of which every process holds a part: read by all, sent no more than needed, in any order of work."""

import logging
import queue
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import HeteroData

from pyg_direct import Feature, FeatureStore, NeighborLoader
from pyg_direct.errors import ArgumentError, IdError, PlacementWarning, RankError
from pyg_direct.features import process_sharing
from pyg_direct.features.process_sharing import Room, find_too_small
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.features.tiers.sharded import ShardedTier, range_of
from tests.batches import hash_batches, make_data
from tests.distributed.threads import CPU, Meeting, ThreadCommunicator, run_threads
from tests.features.contract import DTYPES, ROWS, TierContract, bytes_of, make_rows
from tests.processes import run_ranks

HOT = torch.tensor([0, 7, 21, 39])


def open_rows(comm, rows, hot=None):
    first, end = range_of(comm.rank, comm.size, len(rows))
    own = Feature(device="cpu").from_cpu_tensor(rows[first:end].clone()).stored
    if hot is None:
        return SpilledRows(ShardedTier(len(rows), own, comm))
    places = torch.full((len(rows),), -1)
    places[hot] = torch.arange(len(hot))
    held = Feature(device="cpu").from_cpu_tensor(rows[hot]).stored
    return SpilledRows(ShardedTier(len(rows), own, comm), lambda ids: places[ids], held)


def wanted_by(rank):
    """Ids of a process, some several times; none of the last one of three."""
    return torch.randint(40, (25 if rank < 2 else 0,), generator=torch.Generator().manual_seed(rank))


class Asking:
    """Channel of rank 0 to the others, which take part in its exchanges."""

    def __init__(self, comm, turns):
        self._comm, self._turns = comm, turns

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def run(self, fn, *args):
        self._turns.put(None)
        return self._comm.run(fn, *args)


class TestShardedTier(TierContract):
    """Rows of two processes, as the first sees them."""

    read_only = True

    @pytest.fixture
    def tier_of(self):
        meeting, turns = Meeting(2), queue.SimpleQueue()

        def take_part():
            tier = None
            while (turn := turns.get()) != "end":
                if turn is None:
                    tier.take_nothing()
                else:
                    tier = open_rows(ThreadCommunicator(meeting, 1, CPU), turn).tier

        def make(rows):
            turns.put(rows)
            return open_rows(Asking(ThreadCommunicator(meeting, 0, CPU), turns), rows).tier

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(take_part)
            yield make
            turns.put("end")
            done.result()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("hot", [None, HOT, torch.arange(40)], ids=["none", "some", "all"])
def test_every_process_gets_the_rows_that_it_asks_for(size, hot):
    rows = make_rows()

    got = run_threads(lambda comm: open_rows(comm, rows, hot).take(wanted_by(comm.rank)), size)

    for rank in range(size):
        assert torch.equal(bytes_of(got[rank]), bytes_of(rows[wanted_by(rank)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_dtype_come_bit_for_bit(dtype):
    rows = make_rows(dtype=dtype)

    got = run_threads(lambda comm: open_rows(comm, rows, HOT).take(wanted_by(comm.rank)), 2)

    assert torch.equal(bytes_of(got[1]), bytes_of(rows[wanted_by(1)]))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_of_any_shape_come_bit_for_bit(row):
    rows = make_rows(row=row)

    got = run_threads(lambda comm: open_rows(comm, rows).take(wanted_by(comm.rank).int()), 2)

    assert got[0].shape == (25, *row)
    assert torch.equal(bytes_of(got[0]), bytes_of(rows[wanted_by(0)]))


def test_fewer_rows_than_processes():
    rows = make_rows(2)

    got = run_threads(lambda comm: open_rows(comm, rows).take(torch.tensor([1, 0, 1])), 3)

    assert all(torch.equal(bytes_of(one), bytes_of(rows[[1, 0, 1]])) for one in got)


def test_only_rows_of_others_are_sent():
    def run(comm):
        rows = open_rows(comm, make_rows(row=(5,)), HOT)
        rows.take(torch.tensor([0, 1, 7, 8, 30, 31, 39]))
        return dict(comm.sent), rows.num_read, rows.num_missed, rows.tier.num_remote

    got = run_threads(run, 2)

    # Of 1, 8, 30 and 31 two are with each; a row takes 20 bytes and an id 4.
    assert got == [({"sharded ids": 8, "sharded rows": 40}, 7, 4, 2)] * 2


def test_a_bad_id_is_told_to_all():
    def run(comm):
        try:
            open_rows(comm, make_rows()).take(torch.tensor([3, 40 if comm.rank == 1 else 4]))
        except (IdError, RankError) as error:
            return f"{type(error).__name__}: {error}"

    got = run_threads(run, 2)

    assert "RankError: rank 1 failed" in got[0]
    assert "IdError" in got[1]


@pytest.mark.parametrize(("rooms", "expected"), [
    # One copy fits.
    ([("a", 100), ("a", 100), ("b", 100), ("b", 120)], None),
    # One host cannot hold it, but the half of it.
    ([("a", 500), ("a", 500), ("b", 50), ("b", 60)], ("b", 50)),
    # All processes on one host hold no less together.
    ([("a", 50), ("a", 50)], None),
    # The share of its processes does not fit either.
    ([("a", 40), ("a", 40), ("a", 40), ("b", 100)], None),
])  # fmt: skip
def test_rows_are_shared_out_where_only_that_fits(rooms, expected):
    found = find_too_small([Room(host, num_bytes, False) for host, num_bytes in rooms], 100)

    assert found == (None if expected is None else Room(*expected, False))


def test_rows_that_are_shared_already_take_no_more_memory():
    assert find_too_small([Room("a", 10, True), Room("b", 200, False)], 100) is None


@pytest.mark.parametrize(("options", "message"), [
    ({"device_list": [0]}, "cold_policy='shard' needs device_list='group'"),
    ({"device_list": "group", "cache_policy": "p2p_clique_replicate"}, "needs cache_policy='device_replicate'"),
])  # fmt: skip
def test_what_cannot_be_shared_out_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        Feature(device="cpu", cold_policy="shard", **options)


def test_one_process_keeps_all():
    feature = Feature(device="cpu", device_list="group", cold_policy="shard").from_cpu_tensor(make_rows())

    assert feature.placement == "cpu"


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        # Compilation in this process is reported here too.
        if not record.getMessage().startswith("compiled "):
            self.lines.append(record.getMessage())


def list_reads(rank):
    """Each as many ids as it likes, the last time one of them alone."""
    return [torch.arange(rank, 100, 3), torch.arange(50 * rank), torch.arange(100 if rank == 1 else 0)]


def use_features(rank, path):
    """Distribute a table in a file by hand and by choice."""
    table = torch.from_numpy(np.load(path, mmap_mode="c"))
    heard, logger = _Lines(), logging.getLogger("pyg_direct")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    feature = Feature(device="cpu", device_list="group", cold_policy="shard", device_cache_size="20%").from_cpu_tensor(
        table)  # fmt: skip
    feature.count_served()
    ids = list_reads(rank)
    right = [torch.equal(feature[own], table[own]) for own in ids]
    store = FeatureStore(device="cpu")
    for call, message in (
        (lambda: feature.update_([1], table[:1]), "cannot be updated: several processes hold them"),
        (feature.share_ipc, "whose rows are shared out over processes cannot be sent"),
        (lambda: feature.read_mmap(ids[0]), "this Feature has no file"),
        (
            lambda: store.put_tensor(feature, group_name=None, attr_name="x", index=None),
            "tensor must hold all its rows",
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    narrow = Feature(device="cpu", device_list="group", cold_policy="shard", store_dtype=torch.float16).from_cpu_tensor(
        table)  # fmt: skip
    named = Feature(device="cpu", device_list="group", cold_policy="shard").from_cpu_tensor(table)
    named.set_local_order(torch.arange(99, -1, -1))
    every = torch.arange(100)
    right += [torch.equal(narrow[every], table.half().float()), torch.equal(named[every], table.flip(0))]
    # As if each process had its own host, which cannot hold the table, but a third of it.
    kept_calls = process_sharing.identify_host, process_sharing.available_bytes
    process_sharing.identify_host, process_sharing.available_bytes = lambda: f"host {rank}", lambda: table.numel() * 4
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        chosen = Feature(device="cpu", device_list="group").from_cpu_tensor(table)
    right.append(torch.equal(chosen[every], table))
    process_sharing.available_bytes = lambda: 1 << 40
    kept = Feature(device="cpu", device_list="group").from_cpu_tensor(table.clone())
    process_sharing.identify_host, process_sharing.available_bytes = kept_calls
    # They have one way to each other.
    exchanges = {id(one.stored.tier.exchange) for one in (feature, narrow, named, chosen)}
    tiers = [(tier.name, tier.num_rows, tier.num_read) for tier in feature.tell().tiers]
    return (right, [one.placement for one in (feature, chosen, kept)], [str(w.message) for w in warned
            if w.category is PlacementWarning], tiers, heard.lines[0], len(exchanges))  # fmt: skip


SHARED_OUT = {"device": "cpu", "cache_policy": "device_replicate", "cold_policy": "shard"}


def load_in_step(rank):
    """Compare batches of distributed rows with batches of one process; one rank has more batches than the other."""
    found = []
    for options in ({"uneven": "keep"}, {"uneven": "pad", "prefetch": 0}, {"feature_cache": "30%", "prefetch": 3}):
        loader = NeighborLoader(make_data(), [3, 2], torch.arange(70), batch_size=16, shuffle=True, seed=1,
                                ranks="auto", **SHARED_OUT, **options)  # fmt: skip
        first = [hash_batches([batch]) for batch in loader]
        # One leaves after a batch, the others do not; then another loader, of other lengths, in between.
        for number, _ in enumerate(loader):
            if rank == 0 and number == 0:
                break
        others = list(NeighborLoader(loader.data, [2], torch.arange(30 if rank else 60), batch_size=10, **SHARED_OUT))
        last = [hash_batches([batch]) for batch in loader]
        placed = {name: feature.placement for name, feature in loader._list_places()[1].items()}
        found.append((first, last, len(others), placed["x"]))
    typed = NeighborLoader(make_typed(), [3, 2], ("author", torch.arange(40)), batch_size=8, seed=1, ranks="auto",
                           uneven="keep", **SHARED_OUT)  # fmt: skip
    rows = [[batch[kind].x[:, 0].tolist() == batch[kind].n_id.tolist() for kind in batch.node_types] for batch in typed]
    places = [feature.placement for feature in typed._list_places()[1].values()]
    workers = NeighborLoader(loader.data, [2], batch_size=10, num_workers=1, multiprocessing_context="spawn",
                             **SHARED_OUT)  # fmt: skip
    with pytest.raises(ArgumentError, match="num_workers must be 0 where processes hold a part of the rows each"):
        iter(workers)
    return found, rows, places


def learn_in_step():
    """Report whether learned rows equal those after the step before, in batches whose other rows are distributed."""
    data, right = make_data(), []
    data.learned = torch.nn.Parameter(torch.randn(70, 3))
    loader = NeighborLoader(data, [3, 2], torch.arange(70), batch_size=16, ranks="auto", prefetch=2, **SHARED_OUT)
    for batch in loader:
        # Batches ahead would be made now.
        time.sleep(0.02)
        right.append(torch.equal(batch.learned.detach(), data.learned.detach()[batch.n_id]))
        batch.learned.sum().backward()
        with torch.no_grad():
            data.learned.sub_(data.learned.grad)
    return right, loader._list_places()[1]["x"].placement


def make_typed():
    data = HeteroData()
    for kind, count in (("author", 40), ("paper", 60)):
        data[kind].x = torch.arange(count).float().view(-1, 1).expand(-1, 6).contiguous()
    generator = torch.Generator().manual_seed(0)
    for kind, ends in ((("author", "writes", "paper"), (40, 60)), (("paper", "of", "author"), (60, 40))):
        data[kind].edge_index = torch.stack([torch.randint(count, (200,), generator=generator) for count in ends])
    return data


def use_all(rank, path):
    found = use_features(rank, path), load_in_step(rank), learn_in_step()
    # Before one ends the group that others still exchange rows over.
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of three processes."""
    path = tmp_path_factory.mktemp("rows") / "x.npy"
    np.save(path, np.random.default_rng(0).random((100, 8), np.float32))
    return run_ranks(use_all, 3, path)


def test_features_of_processes(results):
    for rank, ((right, placements, warned, tiers, line, num_exchanges), *_) in enumerate(results):
        assert right == [True] * 6
        assert placements == ["sharded", "sharded", "cpu"]
        assert len(warned) == 1
        assert "shares the rows out over 3 processes" in warned[0]
        ids, (first, end) = torch.cat(list_reads(rank)), range_of(rank, 3, 100)
        is_hot, is_own = ids < 20, (ids >= first) & (ids < end)
        assert tiers == [("host memory (cpu)", 20, int(is_hot.sum())),
                         ("host memory (cpu)", end - first, int((is_own & ~is_hot).sum())),
                         ("other processes", 100 - end + first, int((~is_own & ~is_hot).sum()))]  # fmt: skip
        assert line.startswith(f"100 rows shared out over 3 processes: {end - first} of them here, 0.000 GB of host "
                               "memory, and copies of 20 hot rows; in ")  # fmt: skip
        assert num_exchanges == 1


def test_batches_are_those_of_one_process_and_nobody_waits_for_ever(results):
    alone = NeighborLoader(make_data(), [3, 2], torch.arange(70), batch_size=16, shuffle=True, seed=1, device="cpu")
    epochs = [[hash_batches([batch]) for batch in alone] for _ in range(3)]
    for rank, (_, (found, rows, places), _) in enumerate(results):
        for first, last, num_others, placement in found:
            # Without padding.
            assert first[: len(epochs[0][rank::3])] == epochs[0][rank::3]
            assert last[: len(epochs[2][rank::3])] == epochs[2][rank::3]
            assert (num_others, placement) == (3 if rank else 6, "sharded")
        assert (len(found), places) == (3, ["sharded"] * 2)
        assert rows == [[True, True]] * (1 if rank == 2 else 2)


def test_rows_that_are_learned_are_those_of_the_last_step_beside_others_that_are_shared_out(results):
    for *_, (right, placement) in results:
        assert right == [True] * 2
        assert placement == "sharded"
