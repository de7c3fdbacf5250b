"""Contract of every tier; a new tier must pass it (`class TestPeerTier(TierContract)`)."""

import os

import pytest
import torch

from pyg_direct import save_rows
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.features.memory_rows import MemoryRows
from pyg_direct.features.tiers.choice import open_table
from tests.poison import poisoned_memory

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn]  # fmt: skip
ROWS = [(), (1,), (3,), (4,), (7,), (25,), (32,), (100,), (3, 5), (2, 3, 5), (0,)]


def make_rows(count=40, row=(5,), dtype=torch.float32):
    """Rows of random bytes: also NaNs, infinities and subnormal numbers."""
    if dtype == torch.bool:
        return torch.randint(2, (count, *row)).bool()
    size = count * torch.Size(row).numel() * dtype.itemsize
    return torch.randint(256, (size,), dtype=torch.uint8).view(dtype).view(count, *row)


def bytes_of(rows):
    """Bytes of each row `[n, bytes]`, as a NaN does not equal itself."""
    rows = rows.cpu().contiguous()
    return rows.view(len(rows), -1).view(torch.uint8) if rows.numel() else rows.new_empty(len(rows), 0).byte()


class TierContract:
    """Inherit it and give `tier_of`, a fixture that makes a tier of the rows of a CPU tensor."""

    # True if `write` is refused.
    read_only = False

    @pytest.fixture
    def tier_of(self):
        raise NotImplementedError

    @staticmethod
    def read(tier, ids):
        """Rows of ids, into memory that shows when it was not written."""
        ids = torch.as_tensor(ids).to(tier.device)
        with poisoned_memory():
            out = torch.empty((len(ids), *tier.shape[1:]), dtype=tier.dtype, device=tier.device)
        tier.read(ids, out)
        tier.synchronize()
        return out

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rows_of_any_dtype_come_bit_for_bit(self, tier_of, dtype):
        rows = make_rows(dtype=dtype)
        ids = [5, 0, 39, 5, 5, 17, 38, 1, 0]
        expected = bytes_of(rows)[ids]

        got = self.read(tier_of(rows), ids)

        assert torch.equal(bytes_of(got), expected)

    @pytest.mark.parametrize("row", ROWS, ids=str)
    def test_rows_of_any_shape_come_bit_for_bit(self, tier_of, row):
        rows = make_rows(row=row)
        ids = torch.randint(40, (200,))
        expected = bytes_of(rows)[ids]

        got = self.read(tier_of(rows), ids)

        assert (got.shape, got.dtype) == ((200, *row), torch.float32)
        assert torch.equal(bytes_of(got), expected)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_ids_may_have_either_width_and_any_order(self, tier_of, dtype):
        rows = make_rows(1000)
        ids = torch.randperm(1000).to(dtype)
        expected = bytes_of(rows)[ids.long()]

        got = self.read(tier_of(rows), ids)

        assert torch.equal(bytes_of(got), expected)

    @pytest.mark.parametrize(
        ("row", "dtype"), [((5,), torch.float32), ((), torch.int8), ((0,), torch.float32)], ids=str
    )
    def test_rows_are_placed_among_others(self, tier_of, row, dtype):
        rows, out = make_rows(row=row, dtype=dtype), make_rows(9, row=row, dtype=dtype)
        ids, positions = [5, 39, 5, 0], [8, 1, 0, 4]
        expected = bytes_of(out).clone()
        expected[positions] = bytes_of(rows)[ids]
        tier = tier_of(rows)
        out, positions = out.to(tier.device), torch.tensor(positions, device=tier.device)

        tier.place(torch.tensor(ids, device=tier.device), out, positions)
        tier.place(torch.empty(0, dtype=torch.int64, device=tier.device), out, positions[:0])

        tier.synchronize()
        assert torch.equal(bytes_of(out), expected)

    @pytest.mark.parametrize("row", [(5,), (0,)], ids=str)
    def test_rows_come_in_a_tensor_of_their_own(self, tier_of, row):
        rows = make_rows(row=row)
        tier, ids = tier_of(rows.clone()), torch.tensor([7, 39, 7, 0])

        got = tier.take(ids.to(tier.device))

        tier.synchronize()
        assert (got.shape, got.dtype, got.device) == ((4, *row), torch.float32, tier.device)
        assert torch.equal(bytes_of(got), bytes_of(rows)[ids])

    @pytest.mark.parametrize("ids", [[5, 0, 39, 5, 7, 8], [7, 0, 7], [5, 38], []], ids=str)
    def test_rows_in_memory_are_read_beside_others(self, tier_of, ids):
        rows, held_ids = make_rows(), torch.tensor([0, 7, 39])
        held = make_rows(3)
        expected = rows.clone()
        expected[held_ids] = held
        tier = tier_of(rows)
        places = torch.full((40,), -1, device=tier.device)
        places[held_ids.to(tier.device)] = torch.arange(3, device=tier.device)
        memory = MemoryRows(open_table(held.to(tier.device)), tier.device, torch.float32)

        got, num_missed = tier.take_beside(torch.tensor(ids, device=tier.device).long(), places.__getitem__, memory)

        tier.synchronize()
        assert torch.equal(bytes_of(got), bytes_of(expected[torch.tensor(ids).long()]))
        assert num_missed == sum(one not in held_ids.tolist() for one in ids)

    def test_no_ids_read_nothing(self, tier_of):
        got = self.read(tier_of(make_rows()), torch.empty(0, dtype=torch.int64))

        assert got.shape == (0, 5)

    def test_it_says_what_it_holds(self, tier_of):
        tier = tier_of(make_rows(row=(2, 3), dtype=torch.int16))

        assert (tier.shape, tier.dtype) == ((40, 2, 3), torch.int16)
        assert tier.placement in ("cuda", "peer", "unified", "pinned", "cpu", "mmap", "sharded")
        lines = tier.describe(40, None, None)
        assert sum(line.num_rows for line in lines) == 40
        assert all(line.name and line.num_read is None for line in lines)
        assert tier.table is None or tier.table.shape == tier.shape

    @pytest.mark.parametrize("bad", [40, -1, 2**40])
    def test_an_id_of_no_row_is_told_and_the_tier_stays_usable(self, tier_of, bad):
        rows = make_rows()
        expected = bytes_of(rows)[[39]]
        tier = tier_of(rows)

        with pytest.raises(IdError, match=r"must lie in \[0, 40\)"):
            self.read(tier, [3, bad])

        assert torch.equal(bytes_of(self.read(tier, [39])), expected)

    @pytest.mark.parametrize(("ids", "error"), [(torch.zeros(2), ArgumentTypeError),
                                                (torch.zeros(1, 2, dtype=torch.int64), ArgumentError)])  # fmt: skip
    def test_what_are_no_ids_is_refused(self, tier_of, ids, error):
        tier = tier_of(make_rows())

        with pytest.raises(error, match="ids must have"):
            tier.read(ids.to(tier.device), torch.empty(2, 5, device=tier.device))

    @pytest.mark.parametrize(("shape", "dtype"), [((2, 4), torch.float32), ((3, 5), torch.float32),
                                                  ((2, 5), torch.float64)])  # fmt: skip
    def test_a_target_of_another_kind_is_refused(self, tier_of, shape, dtype):
        tier = tier_of(make_rows())

        with pytest.raises(ArgumentError, match=r"out must be contiguous \(2, 5\) of torch.float32"):
            tier.read(torch.tensor([1, 2], device=tier.device), torch.empty(shape, dtype=dtype, device=tier.device))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
    def test_written_rows_are_read_again(self, tier_of, dtype):
        rows, new = make_rows(dtype=dtype), make_rows(3, dtype=dtype)
        expected = bytes_of(rows).clone()
        tier = tier_of(rows)
        ids = torch.tensor([7, 0, 39], device=tier.device)
        if self.read_only:
            with pytest.raises(ArgumentError, match="read-only"):
                tier.write(ids, new.to(tier.device))
        else:
            expected[ids.cpu()] = bytes_of(new)
            tier.write(ids, new.to(tier.device))

        assert torch.equal(bytes_of(self.read(tier, torch.arange(40))), expected)


def change_file(path, change, rows):
    """Change a file of rows: "touched", "cut short", "replaced" or "taken away"."""
    if change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "cut short":
        os.truncate(path, 300)
    elif change == "replaced":
        save_rows(path, rows)
    else:
        path.unlink()
