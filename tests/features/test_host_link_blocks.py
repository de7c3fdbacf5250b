"""The number of blocks that read host memory is measured once."""

import json

import pytest
import torch

from pyg_direct import Feature
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features import host_link_blocks as link
from pyg_direct.runtime.cuda.memory import allocate


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache on disk and in memory."""
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))
    monkeypatch.setattr(link, "_KNOWN", {})
    return tmp_path


def make_table(num_bytes):
    """A GPU's view of rows in unified memory."""
    block = allocate(num_bytes, "unified", "cuda")
    block.view_on_cpu(torch.float32, (num_bytes // 4,)).fill_(1.0)
    return block.view_on_gpu(torch.float32, (num_bytes // 400, 100))


@pytest.mark.gpu
def test_a_measured_number_is_kept(cache, monkeypatch):
    table = make_table(link._LEAST_TABLE + 400)

    found = link.find_link_blocks(table, "unified")

    monkeypatch.setattr(link, "_measure", lambda table: pytest.fail("measured twice"))
    assert link.find_link_blocks(table, "unified") == found
    monkeypatch.setattr(link, "_KNOWN", {})
    assert link.find_link_blocks(table, "unified") == found
    assert list(json.loads((cache / "link_blocks.json").read_text()).values()) == [found]


@pytest.mark.gpu
def test_it_reads_as_fast_as_many_blocks_do(cache):
    found = link.find_link_blocks(make_table(link._LEAST_TABLE + 400), "unified")

    assert found in link._CANDIDATES
    assert found < link._CANDIDATES[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["", "[]", "seventeen", "17", "-8", '"12"'])
def test_what_another_program_left_in_the_cache_is_measured_again(cache, monkeypatch, text):
    table = make_table(link._LEAST_TABLE + 400)
    monkeypatch.setattr(link, "_measure", lambda table: 12)
    link.find_link_blocks(table, "unified")
    link._KNOWN.clear()
    kept = cache / "link_blocks.json"
    kept.write_text(kept.read_text().replace(": 12", f": {text}"))

    assert link.find_link_blocks(table, "unified") == 12


@pytest.mark.gpu
def test_a_small_table_measures_nothing(cache):
    found = link.find_link_blocks(make_table(4000), "unified")

    assert found == link.DEFAULT_BLOCKS
    assert list(cache.iterdir()) == []


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
