"""Rows of several hosts read and written by id, as one table."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pyg_direct import Feature
from pyg_direct.distributed.dist_feature import DistFeature, PartitionInfo
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.runtime.comm.communicator import Communicator
from tests.distributed.threads import run_threads
from tests.options import Refused, Seen, check_options
from tests.processes import run_ranks

CPU = torch.device("cpu")
N = 50
ROWS = torch.rand(N, 3, generator=torch.Generator().manual_seed(0))
HOSTS = torch.arange(N) * 7 % 3


def open_feature(comm, hosts=HOSTS, replicate=None, rows=ROWS):
    info = PartitionInfo("cpu", comm.rank, comm.size, hosts, replicate)
    return DistFeature(rows[info.own].clone(), info, comm)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, N - 1), max_size=20), min_size=3, max_size=3), st.booleans())
def test_rows_of_all_hosts(wanted, keeps):
    replicate = torch.tensor([1, 5, 9, 30]) if keeps else None

    got = run_threads(lambda comm: open_feature(comm, replicate=replicate)[torch.tensor(wanted[comm.rank]).long()], 3)

    for ids, rows in zip(wanted, got, strict=True):
        assert torch.equal(rows, ROWS[ids])


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float16, torch.int64])
def test_any_dtype_and_shape(dtype):
    rows = (ROWS.view(N, 3, 1) * 2).to(dtype)

    got = run_threads(lambda comm: open_feature(comm, rows=rows)[torch.arange(N)], 3)

    assert all(torch.equal(one, rows) for one in got)


def test_a_host_may_want_no_rows():
    found = run_threads(lambda comm: open_feature(comm)[[5, 6] if comm.rank == 1 else []], 3)

    assert [rows.tolist() for rows in found] == [[], ROWS[5:7].tolist(), []]


def test_only_distinct_rows_that_are_not_here_are_sent():
    def run(comm):
        feature = open_feature(comm, replicate=torch.tensor([1]))
        before = comm.sent["rows"]
        feature[torch.tensor([0, 1, 1, 2, 2, 2])]
        return comm.sent["rows"] - before

    # HOSTS: 0 of node 0, 1 of node 1, 2 of node 2; all ask for all and keep node 1. A row takes 12 bytes.
    assert run_threads(run, 3) == [24, 0, 24]


def test_written_rows_are_read_by_all():
    def run(comm):
        feature = open_feature(comm, replicate=torch.arange(N))
        ids = torch.tensor([3, 4, 4]) + 10 * comm.rank
        feature.put(ids, torch.full((3, 3), float(comm.rank)) + torch.tensor([[0.0], [10.0], [20.0]]))
        return feature[torch.arange(N)]

    got = run_threads(run, 3)

    expected = ROWS.clone()
    for rank in range(3):
        expected[3 + 10 * rank], expected[4 + 10 * rank] = float(rank), 20.0 + rank
    assert all(torch.equal(one, expected) for one in got)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex128, torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_rows_of_any_dtype_are_written(dtype):
    rows = (ROWS * 9).to(dtype)

    def run(comm):
        feature = open_feature(comm, rows=torch.zeros_like(rows))
        feature.put(torch.arange(comm.rank, N, 3), rows[comm.rank :: 3])
        return feature[torch.arange(N)]

    # Bits, as torch compares some dtypes not.
    found = [one.view(torch.uint8) for one in run_threads(run, 3)]
    assert all(torch.equal(one, rows.view(torch.uint8)) for one in found)


def write_and_read(rank):
    communicator = Communicator(device=CPU)
    feature = open_feature(communicator, HOSTS % 2)
    feature.put(torch.tensor([3, 4 + rank]), torch.full((2, 3), float(rank)))
    found = feature[torch.arange(N)]
    communicator.close()
    return found


@pytest.mark.slow
def test_processes_read_what_others_wrote():
    got = run_ranks(write_and_read, 2)

    expected = ROWS.clone()
    expected[3], expected[4], expected[5] = 1.0, 0.0, 1.0
    assert all(torch.equal(one, expected) for one in got)


def test_the_highest_host_writes_last():
    def run(comm):
        feature = open_feature(comm)
        feature.put(torch.tensor([8]), torch.full((1, 3), float(comm.rank)))
        return feature[torch.tensor([8])]

    assert torch.equal(run_threads(run, 3)[0], torch.full((1, 3), 2.0))


def read_all(feature):
    return feature[torch.arange(N)].tolist()


def test_each_option_of_a_table_acts_or_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def run(comm):
        info = PartitionInfo("cpu", comm.rank, 2, HOSTS % 2)
        rows, elsewhere = ROWS[info.own], PartitionInfo("cuda:0", comm.rank, 2, HOSTS % 2)
        fixed = Feature(device="cpu").from_cpu_tensor(rows)
        check_options(
            DistFeature,
            lambda **options: DistFeature(**{"feature": rows, "info": info, "comm": comm, **options}),
            {
                "feature": (
                    Seen(read_all, rows, rows + 1),
                    Refused(rows.tolist(), "feature must be a tensor or a Feature"),
                ),
                "info": (
                    Seen(lambda feature: feature.info.own.tolist(), info, open_feature(comm, (HOSTS % 2).roll(1)).info),
                    Refused(5, "info must be a PartitionInfo, got int"),
                    Refused(PartitionInfo("cpu", 0, 1, HOSTS * 0), "info must be of host", feature=ROWS),
                    Refused(elsewhere, "info must name the device of the feature, cpu, got 'cuda:0'", feature=fixed),
                ),
                "comm": (
                    Refused(None, "a process group must be there"),
                    Refused(5, "comm must be a Communicator or a DistGraph, got int"),
                ),
            },
        )

    run_threads(run, 2)


def test_each_option_of_the_hosts_acts_or_is_refused():
    def run(comm):
        def make(**options):
            info = PartitionInfo(
                **{"device": "cpu", "host": comm.rank, "hosts": 2, "global2host": HOSTS % 2, **options}
            )
            return DistFeature(ROWS[info.own], info, comm)

        def count_sent(feature):
            before = comm.sent["rows"]
            read_all(feature)
            return comm.sent["rows"] - before

        check_options(
            PartitionInfo,
            make,
            {
                "device": Refused("tpu", "device must name"),
                "host": (Refused(2, r"host must lie in \[0, 2\)"), Refused("0", "host must be an integer, got '0'")),
                "hosts": (Refused(3, "info must be of host"), Refused(2.0, "hosts must be an integer, got 2.0")),
                "global2host": (
                    Seen(lambda feature: feature.info.own.tolist(), HOSTS % 2, 1 - HOSTS % 2),
                    Refused(HOSTS.tolist(), "global2host must be a tensor, got list"),
                ),
                "replicate": (
                    Seen(count_sent, None, torch.arange(N)),
                    Refused(torch.tensor([N]), "replicate must lie"),
                    Refused([1], "replicate must be a tensor, got list"),
                ),
            },
        )

    run_threads(run, 2)


def test_errors_name_the_argument():
    with pytest.raises(ArgumentError, match="host must lie"):
        PartitionInfo("cpu", 3, 3, HOSTS)
    with pytest.raises(IdError, match="replicate must lie"):
        PartitionInfo("cpu", 0, 3, HOSTS, torch.tensor([N]))
    with pytest.raises(ArgumentError, match="table must hold parts"):
        PartitionInfo("cpu", 0, 2, HOSTS)
    with pytest.raises(ArgumentError, match=r"table must hold parts in \[0, 3\), got 256 to 258"):
        PartitionInfo("cpu", 0, 3, HOSTS + 256)
    with pytest.raises(ArgumentTypeError, match="table must hold integers"):
        PartitionInfo("cpu", 0, 3, HOSTS / 2)

    def run(comm):
        feature = open_feature(comm)
        with pytest.raises(IdError, match="ids must lie"):
            feature[torch.tensor([N])]
        with pytest.raises(ArgumentError, match="rows must have shape"):
            feature.put(torch.tensor([1]), torch.zeros(1, 2))
        info = PartitionInfo("cpu", comm.rank, 3, HOSTS)
        with pytest.raises(ArgumentError, match="feature must have a row"):
            DistFeature(ROWS, info, comm)
        with pytest.raises(ArgumentTypeError, match="must be a tensor or a Feature"):
            DistFeature([1], info, comm)
        fixed = DistFeature(Feature(device="cpu").from_cpu_tensor(ROWS[info.own]), info, comm)
        with pytest.raises(ArgumentError, match="read only"):
            fixed.put(torch.tensor([1]), ROWS[:1])

    run_threads(run, 3)
