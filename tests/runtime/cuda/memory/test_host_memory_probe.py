"""Choice of the host memory that is read faster, and its cache."""

import json
import platform
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.errors import PlacementWarning
from pyg_direct.runtime.cuda import memory
from pyg_direct.runtime.cuda.memory import allocate


@pytest.mark.parametrize(
    ("unified", "pinned", "expected"),
    [(50e9, 15e9, "unified"), (50e9, 54e9, "unified"), (15e9, 50e9, "pinned"), (0.0, 15e9, "pinned"),
     (15e9, 0.0, "unified"), (0.0, 0.0, "unified")],
)  # fmt: skip
def test_the_faster_one_is_taken_and_unified_when_they_are_alike(unified, pinned, expected):
    assert memory.decide({"unified": unified, "pinned": pinned}) == expected


class FakeAbilities:
    managed_without_migration = True
    driver_version = 13000


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without a GPU that acts as one whose page-locked memory is faster; counts its measurements."""
    measured = []

    def measure(placement, index):
        measured.append(placement)
        return {"unified": 10e9, "pinned": 20e9}[placement]

    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))
    monkeypatch.setattr(memory, "_measure", measure)
    monkeypatch.setattr(memory, "abilities", lambda index: FakeAbilities)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    memory.choose_host_memory.cache_clear()
    yield measured
    memory.choose_host_memory.cache_clear()


def choose_in_new_process():
    memory.choose_host_memory.cache_clear()
    return memory.choose_host_memory(0)


def test_a_known_machine_is_not_measured_again(machine):
    choices = [choose_in_new_process() for _ in range(3)]

    assert choices == ["pinned"] * 3
    assert machine == ["unified", "pinned"]


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '{"GPU": 3}', '{"GPU | driver 13000 | HOST": {"unified": 1}}'])
def test_a_broken_file_is_measured_again(machine, tmp_path, text):
    (tmp_path / "host_memory.json").write_text(text.replace("HOST", platform.node()))

    choice = choose_in_new_process()

    assert choice == "pinned"
    assert {"unified": 10e9, "pinned": 20e9} in json.loads((tmp_path / "host_memory.json").read_text()).values()


def test_another_driver_is_measured_anew(machine, monkeypatch):
    choose_in_new_process()

    monkeypatch.setattr(FakeAbilities, "driver_version", 13010)
    choose_in_new_process()

    assert machine == ["unified", "pinned"] * 2


def test_a_folder_that_cannot_be_written_is_no_error(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path / "file" / "below"))

    assert choose_in_new_process() == "pinned"


def test_without_managed_memory_there_is_nothing_to_measure(machine, monkeypatch):
    monkeypatch.setattr(FakeAbilities, "managed_without_migration", False)

    assert choose_in_new_process() == "pinned"
    assert machine == []


def check(monkeypatch, rate, placement="unified", num_bytes=8 << 30):
    """Check a table of a machine whose memory is read at so many bytes a second; how often it was read."""
    read = []
    monkeypatch.setattr(memory, "_read_at_random", lambda block: read.append(block) or rate)
    block = SimpleNamespace(placement=placement, num_bytes=num_bytes, device=torch.device("cuda", 0))
    memory.check_filled(block, "features")
    return len(read)


@pytest.mark.parametrize(("placement", "rate", "other"), [("unified", 2.4e9, "pinned"), ("pinned", 4.9e9, "unified")])
def test_a_filled_table_that_is_read_slowly_is_told(machine, monkeypatch, placement, rate, other):
    words = rf"reads features at [\d.]+ GB/s at random from 8.59 GB of {placement}.*placement='{other}'"
    with pytest.warns(PlacementWarning, match=words):
        assert check(monkeypatch, rate, placement) == 1


@pytest.mark.parametrize(("options", "count"), [
    ({"rate": 9e9}, 1), ({"rate": 3e9}, 1), ({"rate": 1.0, "num_bytes": 1 << 29}, 0),
    ({"rate": 1.0, "placement": "cpu"}, 0), ({"rate": 1.0, "placement": "cuda"}, 0),
])  # fmt: skip
def test_others_are_not_told_and_small_ones_not_read(machine, monkeypatch, options, count):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check(monkeypatch, **options) == count


@pytest.mark.gpu
@pytest.mark.slow
def test_a_large_filled_table_is_read_as_a_small_one():
    block = allocate(memory._LARGE, "unified", "cuda")
    block.view_on_cpu(torch.int64, (memory._LARGE // 8,)).fill_(1)
    begin = time.perf_counter()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.check_filled(block, "rows")

    assert time.perf_counter() - begin < 1


@pytest.mark.gpu
def test_a_measurement_is_short_and_changes_no_draw(monkeypatch, tmp_path):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))
    torch.zeros(1, device="cuda").index_select(0, torch.zeros(1, dtype=torch.int64, device="cuda"))
    memory.choose_host_memory.cache_clear()
    torch.manual_seed(5)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(5)

    begin = time.perf_counter()
    choice = memory.choose_host_memory(torch.cuda.current_device())
    seconds = time.perf_counter() - begin
    memory.choose_host_memory.cache_clear()

    assert choice in memory.CANDIDATES
    assert seconds < 0.5
    assert torch.equal(torch.rand(3, device="cuda"), expected)
