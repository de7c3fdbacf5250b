"""Rows of gathers tell what was read."""

import pytest
import torch

from pyg_direct.bench import gather


@pytest.mark.parametrize(("num_bytes", "size"), [(8 << 30, "8"), (1 << 29, "0.5"), ((5 << 30) + 1000, "5")])
def test_tables_in_host_memory_are_named_by_their_size(monkeypatch, num_bytes, size):
    monkeypatch.setattr(gather, "pinned_copy_rate", lambda: 5e10)
    monkeypatch.setattr(gather, "fill_host_table", lambda *given: (None, torch.empty(0)))
    monkeypatch.setattr(gather, "time_cold_rows", lambda *given, ascending: [4e10])

    cases = {row.case for row in gather.measure_cold_rows(num_bytes)}

    assert f"gather/cold/512 B/{size} GiB pinned/random" in cases
