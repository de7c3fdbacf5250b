"""Rows of graphs larger than the memory left to them, beside the same graph in memory."""

import pytest
import torch

from benchmarks.features import larger_than_memory
from benchmarks.features.larger_than_memory import Files, count_private_bytes, measure_larger_than_memory
from pyg_direct import save_rows
from pyg_direct.datasets import synthetic_graph
from pyg_direct.features.row_files import RowFile


@pytest.mark.full
def test_each_row_of_the_table_is_measured(tmp_path, monkeypatch):
    graph = synthetic_graph("products", scale=0.001)
    monkeypatch.setattr(larger_than_memory, "_REPEATS", 1)
    # Small files may stay in the page cache.
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)

    rows = [
        *measure_larger_than_memory(graph.to_data(), graph.train_idx, graph.num_classes, "tiny", 16, 3000, tmp_path)
    ]

    assert all(row.p50 > 0 for row in rows[:-2])
    assert {row.case for row in rows} == {"disk/tiny/larger than memory"}
    metrics = [row.metric for row in rows]
    assert metrics[:2] == ["disk, 1 MB at a time in order", "disk, pages of 4 KB at random"]
    for order in ("plain", "packed"):
        ratios = [row.p50 for row in rows if row.metric.startswith(f"bytes read over bytes of rows, {order}")]
        assert len(ratios) == 3
        assert min(ratios) > 0
    ratios = [row.p50 for row in rows if row.metric.startswith("bytes read over bytes of rows, ordered, ")]
    assert len(ratios) == 2
    for words in ("epoch, rows in host memory", "epoch, packed rows in a file 8 times",
                  "epoch, ordered rows in a file 8 times", "packing of rows by the reads", "infer, rows in a file",
                  "infer, rows and layers in files", "epoch of samples, lists in a file 8 times",
                  "host memory for rows of a file"):  # fmt: skip
        assert any(metric.startswith(words) for metric in metrics)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_kept", [True, False])
def test_pages_that_the_system_keeps_are_counted(tmp_path, monkeypatch, is_kept):
    path = save_rows(tmp_path / "x.npy", torch.zeros(2000, 128))
    files = Files(path, path, [])
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: is_kept)

    files.forget()

    assert files.most_kept == is_kept


def test_memory_of_this_process_is_counted():
    before = count_private_bytes()

    rows = torch.ones(40 << 20, dtype=torch.uint8)

    assert count_private_bytes() - before > 0.9 * rows.numel()
