"""Number of blocks that read host memory, for rows of any width and beside hot rows."""

import pytest
import torch

from pyg_direct import Feature
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.rows import gather_rows as link


@pytest.mark.parametrize(("misses", "blocks"), [(1.0, 20), (0.8, 24), (0.5, 24), (0.25, 26), (0.0, 38)])
def test_few_more_blocks_read_beside_hot_rows(misses, blocks):
    assert link.blocks_beside_hot(20, misses) == blocks


@pytest.mark.parametrize(("misses", "blocks"), [(1.0, 20), (0.5, 24), (0.25, 28), (0.125, 56), (0.0, 106)])
def test_more_blocks_read_where_other_gpus_hold_rows(misses, blocks):
    assert link.blocks_beside_hot(20, misses, has_peers=True) == blocks


@pytest.mark.gpu
@pytest.mark.parametrize(("hot_rows", "blocks"), [(0, 5), (20, 6), (39, 10)])
def test_hot_rows_take_blocks_of_their_own(hot_rows, blocks):
    feature = Feature(device_cache_size=hot_rows * 16, link_blocks=5).from_cpu_tensor(torch.ones(40, 4))

    assert feature.stored.max_blocks == blocks


@pytest.mark.parametrize(("stored_bytes", "row_bytes", "blocks"), [
    (512, 512, 16), (256, 512, 32), (128, 512, 64), (16, 16, 16), (400, 400, 21), (200, 400, 41), (2048, 2048, 16),
    (4, 4, 64),
])  # fmt: skip
def test_rows_that_leave_threads_idle_take_more_blocks(stored_bytes, row_bytes, blocks):
    assert link.blocks_for_rows(16, stored_bytes, row_bytes) == blocks


@pytest.mark.parametrize(("link_blocks", "error", "words"), [
    (0, ArgumentError, "link_blocks must be at least 1, got 0"),
    (1.5, ArgumentTypeError, "link_blocks must be an int or None, got 1.5"),
    (True, ArgumentTypeError, "got True"),
])  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(link_blocks, error, words):
    with pytest.raises(error, match=words):
        Feature(device="cpu", link_blocks=link_blocks)
