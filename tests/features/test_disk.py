"""Rows of a file, read by threads."""

import os
import threading

import pytest
import torch

from pyg_direct.errors import FileError
from pyg_direct.features import disk
from pyg_direct.features.disk import DiskTier, StagedTier
from pyg_direct.features.rowfile import RowFile
from pyg_direct.features.save import save_rows
from tests.features.contract import TierContract, bytes_of, make_rows


class TestDiskTier(TierContract):
    """Rows in a file, read by the CPU."""

    read_only = True

    @pytest.fixture
    def tier_of(self, tmp_path):
        return lambda rows: DiskTier(RowFile(save_rows(tmp_path / "rows.safetensors", rows)))

    def test_threads_share_the_rows_among_them(self, tier_of, monkeypatch):
        rows = make_rows(5000)
        ids = torch.randint(5000, (20_000,))
        expected, names = bytes_of(rows)[ids], set()
        read_rows = disk.read_rows
        monkeypatch.setattr(disk, "read_rows",
                            lambda *args: (names.add(threading.current_thread().name), read_rows(*args)))  # fmt: skip

        got = self.read(tier_of(rows), ids)

        assert torch.equal(bytes_of(got), expected)
        assert len(names) > 1

    @pytest.mark.parametrize(("ids", "ranges"), [([3, 5, 6], [(3, 6)]), ([0, 39], []), ([7], [(7, 7)])])
    def test_what_lies_close_together_is_read_ahead(self, tier_of, monkeypatch, ids, ranges):
        rows, asked = make_rows(), []
        tier = tier_of(rows)
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
