"""Programs over small graphs find generated data sets, and their lines are compared."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from torch_geometric.datasets import TUDataset

from tests.compat import example_programs
from tests.compat.example_programs import (
    PROGRAMS,
    Program,
    Run,
    choose,
    compare_all,
    find_gpu,
    find_missing,
    find_seconds,
    is_apart,
    is_slow,
    order,
    tabulate,
)
from tests.compat.generated_data import MAKERS, draw, generate

ROOT = Path(__file__).resolve().parents[2]


def test_a_data_set_is_generated_instead_of_downloaded(tmp_path, monkeypatch):
    for kind in MAKERS:
        # Undone after the test.
        for name in ("download", "process"):
            monkeypatch.setattr(kind, name, getattr(kind, name))
    generate()
    state = torch.get_rng_state()

    dataset = TUDataset(str(tmp_path), "MUTAG")

    assert (len(dataset), dataset.num_features, dataset.num_classes) == (188, 3, 2)
    assert all(graph.validate() and not graph.is_directed() for graph in dataset)
    assert torch.equal(torch.get_rng_state(), state)


def test_graphs_are_drawn_again_alike():
    first, second = draw(5, 4, 9), draw(5, 4, 9)

    assert all(torch.equal(one.edge_index, other.edge_index) for one, other in zip(first, second, strict=True))
    assert {len(one.kinds) for one in draw(40, 4, 6)} == {4, 5, 6}


def test_lines_are_compared_and_rows_of_other_programs_stay():
    plain, ours = [Run(["a 1", "b 2"], 0.5, "")], [Run(["a 1", "b 3"], 0.25, "DataLoader (1)")]
    before = tabulate({"kept.py": {"PyG": plain, "pyg_direct": plain}}, commit="1")

    rows = tabulate({"new.py": {"PyG": plain, "pyg_direct": ours}}, before, "2").splitlines()

    assert rows[2:] == ["| kept.py | 2 | 2 | b 2 | the same | 0.50 | 0.50 |  | 1 |",
                        "| new.py | 2 | 1 | b 2 | b 3 | 0.50 | 0.25 | DataLoader (1) | 2 |"]  # fmt: skip
    assert tabulate({}, "\n".join(rows)).splitlines() == rows
    assert is_apart({"PyG": plain, "pyg_direct": ours})


def test_drawn_batches_are_compared_by_their_mean_scores():
    plain = [Run([f"Epoch 1, Test: {score}"]) for score in (0.70, 0.72, 0.74)]
    near = [Run([f"Epoch 1, Test: {score}"]) for score in (0.72, 0.74, 0.76)]
    far = [Run([f"Epoch 1, Test: {score}"]) for score in (0.90, 0.92, 0.94)]

    assert not is_apart({"PyG": plain, "pyg_direct": near})
    assert is_apart({"PyG": plain, "pyg_direct": far})
    row = tabulate({"new.py": {"PyG": plain, "pyg_direct": far}}).splitlines()[-1]
    assert row == "| new.py | 1 | - | 0.72 ± 0.012 | 0.92 ± 0.012 | - | - |  | unknown |"


def test_parts_hold_each_program_once_and_rows_are_not_made_again():
    parts = [choose(part=f"{number}/4") for number in (1, 2, 3, 4)]

    assert sorted(one.name for part in parts for one in part) == sorted(one.name for one in PROGRAMS)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    before = tabulate({"gat.py": {"PyG": [Run(["a 1"])], "pyg_direct": [Run(["a 1"])]}})
    assert [one.name for one in choose("gat.py,agnn", before=before)] == ["agnn.py", "super_gat.py", "rgat.py"]
    for wrong in ("0/4", "5/4", "2", "a/b"):
        with pytest.raises(ValueError, match="part must be K/N"):
            choose(part=wrong)


def test_the_longest_programs_begin_first_after_those_of_unknown_length():
    runs = {f"{name}.py": {"PyG": [Run(["a 1"], seconds)], "pyg_direct": [Run(["a 1"])]}
            for name, seconds in (("short", 0.5), ("long", 3.0))}  # fmt: skip

    ordered = order([Program("short.py"), Program("new.py"), Program("long.py")], tabulate(runs))

    assert [one.path for one in ordered] == ["new.py", "long.py", "short.py"]


def test_packages_that_a_program_imports_and_that_are_missing_are_named(tmp_path, monkeypatch):
    (tmp_path / "all.py").write_text("import torch.nn\nfrom . import near\nfrom numpy import array\n")
    (tmp_path / "some.py").write_text("import torch\ndef train():\n    from not_there.part import things\n")

    assert find_missing(Program("all.py"), tmp_path) is None
    assert find_missing(Program("some.py"), tmp_path) == "not_there"
    for name, has in (("WITH_PYG_LIB", False), ("WITH_TORCH_SPARSE", True)):
        monkeypatch.setattr(example_programs, name, has)
    assert find_missing(Program("all.py", is_drawn=True), tmp_path) is None
    monkeypatch.setattr(example_programs, "WITH_TORCH_SPARSE", False)
    assert find_missing(Program("all.py", is_drawn=True), tmp_path) == "pyg-lib or torch-sparse"


def test_seconds_of_a_gpu_are_those_of_a_late_line():
    times = [0.0, 5.0, 6.0, 7.0, 7.1, 7.2]

    assert find_seconds(times, on_gpu=False) == 7.2
    assert find_seconds(times, on_gpu=True) == pytest.approx(0.1)
    assert math.isnan(find_seconds([1.0], on_gpu=True))
    runs = {"PyG": [Run(["a 1"], 0.95)], "pyg_direct": [Run(["a 1"], 1.0)]}
    assert is_slow(runs)
    assert not is_slow({**runs, "PyG": [Run(["a 1"], 0.99)]})


TEXT = """
import torch
for epoch in range({epochs}):
    print(f"Epoch {{epoch}}, Loss: {{torch.rand(1).item():.4f}}, Test: {{0.5 + {more}}}")
    print("Other")
"""


def write_programs(folder, **epochs):
    for number, (name, count) in enumerate(epochs.items()):
        (folder / f"{name}.py").write_text(TEXT.format(epochs=count, more=number))
    example_programs.PROGRAMS = [Program(f"{name}.py") for name in epochs]
    return example_programs.PROGRAMS


def run_alone(name, *args):
    """Run a function of this module in a process of its own: the programs are forked from one that has only begun."""
    text = f"import sys; from tests.compat import test_example_programs as own; own.{name}(*sys.argv[1:])"
    made = subprocess.run([sys.executable, "-c", text, *map(str, args)], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return made.stdout


def compare_side_by_side(folder, jobs):
    folder, jobs = Path(folder), int(jobs)
    programs = write_programs(folder, long=100, short=2, some=7)
    found = dict(compare_all(programs, folder, 120, on_gpu=True, jobs=jobs))
    lines = {one.name: None if runs is None else [len(run.lines) for run in runs["pyg_direct"]]
             for one, runs in found.items()}  # fmt: skip
    # Five times as many as on a CPU, or all of them; a program with too few has failed.
    assert lines == {"long.py": [15] * 3, "short.py": None, "some.py": [7] * 3}, lines
    assert found[programs[0]]["PyG"][0].lines == found[programs[0]]["pyg_direct"][0].lines
    assert list(compare_all(programs, folder, 120, on_gpu=True, jobs=jobs, seconds=0)) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_programs_run_side_by_side_each_to_its_last_line(tmp_path, jobs):
    run_alone("compare_side_by_side", tmp_path, jobs)


SLOW = """
import os, time
if os.fork() == 0:
    # Holds the pipe open, as a loader's process does.
    time.sleep(1000)
for epoch in range(3):
    print(f"Epoch {epoch}, Test: 0.5", flush=True)
time.sleep(1000)
"""


def end_in_time(folder, jobs):
    folder = Path(folder)
    programs = write_programs(folder, slow=1, short=3)
    (folder / "slow.py").write_text(SLOW)
    # Three lines, and more are waited for: then its time ends, and no row is made of it.
    found = dict(compare_all(programs, folder, 1000, on_gpu=True, jobs=int(jobs), seconds=8))
    assert set(found) <= {programs[1]}, found
    # All lines that it needs: a process that it began does not hold up the next run.
    example_programs.MORE_LINES = 1
    found = dict(compare_all(programs[:1], folder, 1000, on_gpu=True))
    assert [len(one.lines) for one in found[programs[0]]["PyG"]] == [3] * 3


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_ends_in_time_whatever_programs_do(tmp_path, jobs):
    run_alone("end_in_time", tmp_path, jobs)


def compare_missing(folder):
    folder = Path(folder)
    write_programs(folder, first=3, second=3)
    example_programs.find_gpu = lambda: "NVIDIA H200"
    for only in ("first", ""):
        with pytest.raises(typer.Exit) as end:
            example_programs.main(folder, only, missing=True, out=folder)
        assert end.value.exit_code == 0


def test_rows_are_written_as_programs_end_and_only_missing_ones_are_made(tmp_path):
    said = run_alone("compare_missing", tmp_path).splitlines()

    text = (tmp_path / "example_programs_h200.md").read_text()
    rows = [row for row in text.splitlines() if ".py |" in row]
    assert [row.split(" | ")[0] for row in rows] == ["| first.py", "| second.py"]
    assert "NVIDIA H200" in text
    assert [line.split(" | ")[0] for line in said if line.startswith("| ")] == ["| first.py", "| second.py"]


@pytest.mark.parametrize("name", ["", "NVIDIA H200"])
def test_a_gpu_is_asked_in_another_process(monkeypatch, name):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(asked.append(1) or name))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)

    assert find_gpu() == name
    assert asked == []
