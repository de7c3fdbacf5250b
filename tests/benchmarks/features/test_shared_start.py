from types import SimpleNamespace

import pytest

from benchmarks.features import shared_start
from benchmarks.features.shared_start import PAPERS_NODES, measure_shared_start


@pytest.mark.full
def test_a_process_reads_the_rows_that_another_holds():
    seconds, memory = measure_shared_start(1000 / PAPERS_NODES, (1,))
    assert 0 < seconds.p50 < 300
    assert memory.limit == 1000 * 128 * 4 / 1e9


def test_memory_that_processes_share_is_counted_once(monkeypatch):
    # A process alone; then with another that has half of what is shared, and 5 bytes of its own.
    held = iter([SimpleNamespace(uss=10, pss=20), SimpleNamespace(uss=10, pss=15), SimpleNamespace(uss=5, pss=10)])
    counted = []

    def find(process):
        counted.append(process)
        return SimpleNamespace(memory_full_info=lambda: next(held))

    monkeypatch.setattr(shared_start.psutil, "Process", find)

    assert shared_start._count_bytes([3]) == 20
    assert shared_start._count_bytes([3, 4]) == 25
    assert counted == [3, 3, 4]
