"""Rows of a file, read by threads."""

import os
import threading

import pytest
import torch

from pyg_direct.errors import FileError, PygDirectError
from pyg_direct.features import disk
from pyg_direct.features.disk import DiskTier, StagedTier
from pyg_direct.features.rowfile import RowFile
from pyg_direct.features.save import save_rows
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
        expected, shares = bytes_of(rows)[ids], []
        prepare_read = disk.prepare_read

        def note(*args):
            read = prepare_read(*args)
            return lambda begin, end: (shares.append((threading.current_thread().name, end - begin)), read(begin, end))

        monkeypatch.setattr(disk, "prepare_read", note)

        got = self.read(tier_of(rows), ids)

        assert torch.equal(bytes_of(got), expected)
        assert sum(count for _, count in shares) == 20_000
        assert (len({name for name, count in shares if count}) > 1) == ("not cached" in request.node.name)

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

    @pytest.mark.parametrize(("ids", "ranges"), [([3, 5, 6], [(3, 6)]), ([0, 39], []), ([7], [(7, 7)])])
    def test_what_lies_close_together_is_read_ahead(self, tier_of, monkeypatch, ids, ranges):
        rows, asked = make_rows(), []
        tier = tier_of(rows)
        monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
        read_ahead = tier.file.read_ahead
        monkeypatch.setattr(tier.file, "read_ahead", lambda *range: (asked.append(range), read_ahead(*range)))

        got = self.read(tier, ids)

        assert asked == ranges
        assert torch.equal(bytes_of(got), bytes_of(rows)[ids])

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
