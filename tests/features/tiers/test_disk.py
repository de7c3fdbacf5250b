"""Rows of a file, read by threads."""

import os
import threading
from concurrent.futures import wait
from itertools import chain

import pytest
import torch

from pyg_direct.errors import FileError, PygDirectError
from pyg_direct.features import row_files
from pyg_direct.features.row_files import RowFile, save_rows
from pyg_direct.features.tiers import disk
from pyg_direct.features.tiers.disk import DiskTier, StagedTier
from pyg_direct.kernels.rows.gather import read_file_rows_cpu
from pyg_direct.runtime.host.threads import Pool
from tests.features.contract import TierContract, bytes_of, make_rows


class TestDiskTier(TierContract):
    """Rows in a file, read by the CPU."""

    read_only = True

    @pytest.fixture(params=["cached", "not cached"])
    def tier_of(self, tmp_path, request, monkeypatch):
        monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: request.param == "cached")
        return lambda rows: DiskTier(RowFile(save_rows(tmp_path / "rows.safetensors", rows)))

    def test_threads_share_rows_that_are_not_in_memory(self, tier_of, request, monkeypatch):
        rows = make_rows(5000)
        ids = torch.randint(5000, (20_000,))
        # The first thread waits for another one, which may be late if the machine is busy.
        shares = note_shares(monkeypatch, together=2)

        got = self.read(tier_of(rows), ids)

        assert torch.equal(bytes_of(got), bytes_of(rows)[ids])
        is_shared = "not cached" in request.node.name
        assert sum(len(share) for _, share in shares) == 20_000 * is_shared
        assert len({name for name, _ in shares}) > 1 or not is_shared

    @pytest.mark.parametrize(("out", "positions", "words"), [
        (torch.empty(9, 4), [0, 1], "out must be contiguous rows"),
        (torch.empty(9, 5, dtype=torch.float64), [0, 1], "out must be contiguous rows"),
        (torch.empty(5, 9).t(), [0, 1], "out must be contiguous rows"),
        (torch.empty(9, 5), [0, 9], r"positions must lie in \[0, 9\)"),
        (torch.empty(9, 5), [0], "positions must be as many as the 2 ids, got 1"),
    ])  # fmt: skip
    def test_places_that_do_not_fit_are_refused(self, tier_of, out, positions, words):
        with pytest.raises(PygDirectError, match=words):
            tier_of(make_rows()).place(torch.tensor([1, 2]), out, torch.tensor(positions))

    @pytest.mark.parametrize("change", ["touched", "cut short", "replaced", "taken away"])
    def test_a_file_that_changed_is_not_read(self, tier_of, change):
        tier = tier_of(make_rows())
        path = tier.file.path
        if change == "touched":
            os.utime(path, ns=(0, 0))
        elif change == "cut short":
            os.truncate(path, 10)
        elif change == "replaced":
            save_rows(path, make_rows())
        else:
            path.unlink()

        with pytest.raises(FileError, match="taken away" if change == "taken away" else "changed while it was read"):
            self.read(tier, [1, 2])


class TestReadsOfTheDisk:
    """Rows that the system must read first."""

    @pytest.fixture
    def tier_of(self, tmp_path, monkeypatch):
        monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
        return lambda rows: DiskTier(RowFile(save_rows(tmp_path / "rows.safetensors", rows)))

    @pytest.mark.parametrize(("count", "num_rows", "num_shares"), [(1, 40, 1), (3, 40, 1), (8, 40, 2), (960, 40, 8),
                                                                   (128, 10_000, 8), (128, 200_000, 32)])  # fmt: skip
    def test_each_thread_reads_on_in_the_order_of_the_file(self, tier_of, monkeypatch, count, num_rows, num_shares):
        # Rows of 20 bytes: of the most rows, 16 KiB or more lie between two that are read.
        rows, ids = make_rows(num_rows), torch.randint(num_rows, (count,), dtype=torch.int32)
        shares = note_shares(monkeypatch)

        got = TierContract.read(tier_of(rows), ids)

        assert torch.equal(bytes_of(got), bytes_of(rows)[ids.long()])
        in_order = sorted(share for _, share in shares)
        assert list(chain.from_iterable(in_order)) == sorted(ids.tolist())
        assert len(shares) == num_shares

    def test_rows_are_placed_in_any_order(self, tier_of):
        rows, ids, positions = make_rows(), torch.tensor([7, 3, 39, 3, 0]), torch.tensor([5, 1, 0, 8, 2])
        out = torch.zeros(9, 5)

        tier_of(rows).place(ids, out, positions)

        expected = torch.zeros(9, 5)
        expected[positions] = rows[ids]
        assert torch.equal(bytes_of(out), bytes_of(expected))

    @pytest.mark.parametrize("most", [0, 1, 3])
    def test_rows_that_come_in_pieces_are_read_to_their_end(self, tier_of, monkeypatch, most):
        rows, ids = make_rows(), [7, 3, 39, 3, 0, 9]
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda handle, targets, *place: preadv(handle, [targets[0][:7]], *place))
        # As after a signal: so many rows came, the next one did not come whole.
        monkeypatch.setattr(
            row_files,
            "read_file_rows_cpu",
            lambda *args: read_file_rows_cpu(*args[:2], args[2][:most], *args[3:]),
        )

        got = TierContract.read(tier_of(rows), ids)

        assert torch.equal(bytes_of(got), bytes_of(rows)[ids])

    def test_a_file_that_is_cut_short_while_it_is_read_is_told(self, tier_of, monkeypatch):
        tier = tier_of(make_rows(5000))
        monkeypatch.setattr(tier.file, "check", lambda: os.truncate(tier.file.path, 50_000))

        with pytest.raises(FileError, match=r"rows.safetensors was cut short while it was read: it ends before byte"):
            TierContract.read(tier, torch.arange(5000))

    def test_a_disk_that_fails_is_told(self, tier_of, monkeypatch):
        tier = tier_of(make_rows())
        monkeypatch.setattr(tier.file, "_handle", os.open(tier.file.path, os.O_WRONLY))

        with pytest.raises(FileError, match=r"could not be read at byte \d+: Bad file descriptor"):
            TierContract.read(tier, [1, 2])
        os.close(tier.file._handle)

    def test_a_disk_that_hangs_is_named_with_the_byte(self, tier_of, monkeypatch):
        rows, hangs, go_on, read_rows = make_rows(5000), threading.Event(), threading.Event(), RowFile.read_rows

        def hang(file, ids, *rest):
            if 700 in ids:
                hangs.set()
                go_on.wait()
            read_rows(file, ids, *rest)

        monkeypatch.setattr(RowFile, "read_rows", hang)
        monkeypatch.setattr(disk, "wait", lambda *args: (hangs.wait(), wait(*args))[1])
        monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", "0.3")
        tier = tier_of(rows)
        # Threads of their own: those of the process would wait in other tests.
        pool = Pool(4, "test_disk")
        monkeypatch.setattr(disk, "_pool", lambda process: pool)
        try:
            # The first thread has all rows, and shows every 256 rows that it goes on.
            place = tier.file.layout.offset + 512 * 20
            with pytest.raises(FileError, match=rf"rows.safetensors gave no bytes for 0.3 seconds, at byte {place}: c"):
                TierContract.read(DiskTier(tier.file, num_threads=1), torch.arange(5000))
        finally:
            go_on.set()
            pool.close()

    def test_systems_without_such_a_call_read_the_mapped_file(self, tier_of, monkeypatch):
        rows, ids = make_rows(500), torch.randint(500, (1000,))
        shares = note_shares(monkeypatch)
        monkeypatch.delattr(os, "preadv")

        got = TierContract.read(tier_of(rows), ids)

        assert torch.equal(bytes_of(got), bytes_of(rows)[ids])
        assert shares == []


def note_shares(monkeypatch, together=1):
    """List (thread, ids) of reads from the file itself from now on; the first `together` wait for each other."""
    shares, read_rows, meeting = [], RowFile.read_rows, threading.Barrier(together)

    def note(file, ids, *rest):
        if len(ids):
            shares.append((threading.current_thread().name, ids.tolist()))
            if len(shares) <= together:
                meeting.wait(60)
        read_rows(file, ids, *rest)

    monkeypatch.setattr(RowFile, "read_rows", note)
    return shares


@pytest.mark.gpu
class TestStagedTier(TierContract):
    """Rows in a file, for a GPU."""

    read_only = True

    @pytest.fixture(params=["one slot", "many"])
    def tier_of(self, tmp_path, request, monkeypatch):
        if request.param == "many":
            monkeypatch.setattr(disk, "_SLOT_BYTES", 64)
        device = torch.device("cuda", 0)
        return lambda rows: StagedTier(DiskTier(RowFile(save_rows(tmp_path / "rows.safetensors", rows))), device)
