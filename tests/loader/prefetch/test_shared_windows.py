"""Processes of a host that plan batches over one file: a row that one of them has read is copied by the others."""

import gc
import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data

from pyg_direct import Feature, FeatureStore, NeighborLoader, save_rows
from pyg_direct.features import disk_rates, range_reader
from pyg_direct.features.disk_rates import DiskRates
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.tiers import host_window
from tests.processes import run_ranks, start_method

NODES, WIDTH, BATCHES = 6000, 128, 40
EDGES = torch.randint(NODES, (2, 40_000), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path):
    save_rows(tmp_path / "x.npy", torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1)))
    return tmp_path


def settle(folder, patch):
    """Let the table be larger than memory, on a disk that gives few bytes beside the rows."""
    patch.setattr(RowFile, "is_cached", lambda file, rows: False)
    patch.setattr(range_reader, "available_bytes", lambda: 1000)
    for module in (range_reader, host_window):
        patch.setattr(module, "find_rates", lambda *args: DiskRates(7e9, 1e6))
    patch.setattr(disk_rates, "_KNOWN", {})
    patch.setattr(host_window.tempfile, "tempdir", str(folder))


def open_loader(folder, ahead, ranks=None):
    store = FeatureStore(device="cpu")
    store[None, "x", None] = Feature(device="cpu").from_file(folder / "x.npy")
    return NeighborLoader((store, Data(edge_index=EDGES, num_nodes=NODES)), [5, 3], torch.arange(32 * BATCHES),
                          batch_size=32, shuffle=True, seed=3, device="cpu", ahead=ahead, ranks=ranks)  # fmt: skip


def look(batches):
    return [(batch.n_id.numpy().tobytes(), batch.x.numpy().tobytes()) for batch in batches]


def read_all(loader):
    """Rows read, bytes read, and rows copied, for all batches of a loader."""
    look(loader)
    counts = count(loader)
    # A loader, and the window that it keeps, are parts of a cycle.
    del loader
    gc.collect()
    return counts


def count(loader):
    (reads,) = loader.tell().disk
    return reads.num_rows, reads.num_pages * reads.page_bytes, reads.num_copied


def train(rank, folder, ahead, steps):
    """Batches of a rank, in step with the others, and what it has read."""
    with pytest.MonkeyPatch.context() as patch:
        settle(folder, patch)
        loader, batches = open_loader(folder, ahead, (rank, 2)), []
        for number, batch in enumerate(loader):
            dist.barrier()
            batches.append(batch)
            if number + 1 == steps:
                break
        dist.barrier()
        return look(batches), count(loader)


@pytest.fixture
def alone(folder, monkeypatch):
    """Batches of each rank with the rows in memory, and what one process reads for all of them."""
    settle(folder, monkeypatch)

    def make(ahead):
        expected = [look(open_loader(folder, 0, (rank, 2))) for rank in range(2)]
        return expected, read_all(open_loader(folder, ahead))

    return make


def test_each_row_is_read_by_one_of_two_processes(folder, alone):
    # Memory for all rows.
    ahead = f"{2 * NODES * WIDTH * 4}B"
    expected, (_, num_read, _) = alone(ahead)

    results = run_ranks(train, 2, folder, ahead, -1)

    assert [batches for batches, _ in results] == expected
    rows, read, copied = map(sum, zip(*(counts for _, counts in results), strict=True))
    # Rows that came along in the pages of others are not counted, and those differ.
    assert read <= 1.02 * num_read
    assert rows <= NODES
    assert copied > 0


def test_windows_smaller_than_the_table_share_their_rows(folder, alone):
    ahead = f"{NODES * WIDTH}B"
    expected, _ = alone(ahead)
    # One after the other.
    apart = [read_all(open_loader(folder, ahead, (rank, 2))) for rank in range(2)]
    assert not any(copied for _, _, copied in apart)

    results = run_ranks(train, 2, folder, ahead, -1)

    assert [batches for batches, _ in results] == expected
    rows, read, copied = map(sum, zip(*(counts for _, counts in results), strict=True))
    assert copied > 0
    assert rows < sum(rows for rows, _, _ in apart)
    assert read < sum(read for _, read, _ in apart)


def leave_early(rank, folder, ahead):
    """The first process leaves its epoch after some batches, and begins another one."""
    if rank == 1:
        return train_alone(rank, folder, ahead)
    with pytest.MonkeyPatch.context() as patch:
        settle(folder, patch)
        loader = open_loader(folder, ahead, (rank, 2))
        batches = iter(loader)
        next(batches)
        batches.close()
        return look(loader)


def train_alone(rank, folder, ahead):
    with pytest.MonkeyPatch.context() as patch:
        settle(folder, patch)
        return look(open_loader(folder, ahead, (rank, 2)))


def list_members(folder):
    gc.collect()
    return [*(folder / f"pyg_direct-{os.geteuid()}").iterdir()]


@pytest.mark.parametrize("share", [2, 0.25])
def test_an_epoch_that_one_process_leaves_early_is_whole_in_the_other(folder, alone, share):
    ahead, before = f"{int(share * NODES * WIDTH * 4)}B", set(Path("/dev/shm").glob("*pyg*"))
    expected, _ = alone(ahead)
    again = open_loader(folder, 0, (0, 2))
    look(again)

    assert run_ranks(leave_early, 2, folder, ahead) == [look(again), expected[1]]

    assert set(Path("/dev/shm").glob("*pyg*")) == before
    assert list_members(folder) == []


def hang(folder, ahead, connection):
    """Begin to read a window, and never end."""
    with pytest.MonkeyPatch.context() as patch:
        settle(folder, patch)
        patch.setattr(range_reader.RangeReader, "read", lambda *args: (connection.send("reads"), time.sleep(1000)))
        look(open_loader(folder, ahead, (0, 2)))


@pytest.mark.parametrize("share", [2, 0.25])
def test_a_process_that_is_killed_while_it_reads_is_replaced(folder, alone, share):
    ahead = f"{int(share * NODES * WIDTH * 4)}B"
    expected, _ = alone(ahead)
    context = get_context(start_method())
    ours, theirs = context.Pipe()
    process = context.Process(target=hang, args=(folder, ahead, theirs), daemon=True)
    process.start()
    ours.recv()
    batches = iter(open_loader(folder, ahead, (1, 2)))

    os.kill(process.pid, signal.SIGKILL)
    process.join()

    assert look(batches) == expected[1]
    del batches
    assert list_members(folder) == []


def test_a_system_without_shared_memory_shares_the_page_cache(folder, alone, monkeypatch):
    ahead = f"{NODES * WIDTH}B"
    expected, _ = alone(ahead)
    seen, open_handle = set(), RowFile.open_handle
    monkeypatch.setattr("pyg_direct.features.tiers.window.open_host_window", lambda *args: None)
    monkeypatch.setattr(RowFile, "open_handle", lambda file, *, is_direct: (
        seen.add(is_direct), open_handle(file, is_direct=is_direct))[1])  # fmt: skip

    assert look(open_loader(folder, ahead, (0, 2))) == expected[0]

    assert seen == {False}
