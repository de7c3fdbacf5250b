"""Programs are run as they are, and what they reach with both loaders is compared."""

import pytest

from tests.compat.programs import PROGRAMS, Program, Run, find_apart, run, tabulate

RESULTS = {"a.py": {"PyG": [Run([0.5, 0.9], [2.0]), Run([0.5, 0.8], [4.0])],
                    "pyg_direct": [Run([0.4, 0.845], [1.0])]}}  # fmt: skip


def test_a_program_is_seeded_and_its_last_score_read(tmp_path):
    text = "import sys, torch\nfor e in range(3):\n    print(f'Epoch: {e}, Test: 0.{e}{torch.initial_seed()}')\n"
    (tmp_path / "program.py").write_text(text)
    program = Program("program.py", "cora", "data", 1.0, r"Test: ([\d.]+)")

    got = run(program, tmp_path, "PyG", seed=7, epochs=None, timeout=100)

    assert got.scores == [0.07, 0.17, 0.27]
    assert len(got.seconds) == 2


def test_training_may_be_timed_without_what_follows(tmp_path):
    text = "import time\nfor e in range(3):\n    print('Epoch:', e)\n    time.sleep(0.5)\n    print('F1: 0.5')\n"
    (tmp_path / "program.py").write_text(text)
    program = Program("program.py", "ppi", "data", 1.0, r"F1: ([\d.]+)", "F1:", "Epoch:")

    got = run(program, tmp_path, "PyG", seed=7, epochs=None, timeout=100)

    assert got.scores == [0.5] * 3
    assert len(got.seconds) == 2
    assert max(got.seconds) < 0.5


@pytest.mark.slow
def test_a_program_that_fails_is_told(tmp_path):
    (tmp_path / "program.py").write_text("raise ValueError('no data')")

    with pytest.raises(RuntimeError, match="no data"):
        run(Program("program.py", "cora", "data", 1.0, "x"), tmp_path, "PyG", seed=0, epochs=1, timeout=100)


def test_scores_are_those_of_the_last_epochs():
    lines = tabulate(RESULTS, {"a.py": "cora x 1"}, commit="abc1234").splitlines()

    assert "| a.py | PyG | cora x 1 | 90.0, 80.0 | 85.00 | 5.00 | 3.000 | abc1234 |" in lines
    assert "| a.py | pyg_direct | cora x 1 | 84.5 | 84.50 | nan | 1.000 | abc1234 |" in lines
    assert Run([0.0] * 8 + [0.8, 0.9], []).reached == pytest.approx(85)


def test_rows_of_other_programs_stay():
    earlier = tabulate({**RESULTS, "b.py": {"PyG": [Run([0.1], [])]}}, {"a.py": "x", "b.py": "y"})

    lines = tabulate(RESULTS, {"a.py": "z"}, "# Title\n\n" + earlier).splitlines()

    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| b.py", "PyG", "y"], ["| a.py", "PyG", "z"], ["| a.py", "pyg_direct", "z"]]  # fmt: skip


def test_rows_of_before_commits_were_named_stay_without_one():
    earlier = (
        "| program | loader | graph | score of each seed, % | mean | standard error | seconds an epoch, median |\n"
        "| --- | --- | --- | --- | ---: | ---: | ---: |\n| b.py | PyG | y | 10.0 | 10.00 | nan | nan |\n"
    )

    once = tabulate(RESULTS, {"a.py": "z"}, earlier, "abc1234")
    lines = tabulate({}, {}, once).splitlines()

    assert lines == once.splitlines()
    assert lines[2:4] == ["| b.py | PyG | y | 10.0 | 10.00 | nan | nan | - |",
                          "| a.py | PyG | z | 90.0, 80.0 | 85.00 | 5.00 | 3.000 | abc1234 |"]  # fmt: skip


def test_more_than_a_point_apart_is_told():
    assert find_apart(RESULTS) == []
    assert len(find_apart({"a.py": {"PyG": [Run([0.9], [])], "pyg_direct": [Run([0.88], [])]}})) == 1


def test_programs_of_nodes_links_types_and_subgraphs_are_run():
    assert [program.dataset for program in PROGRAMS] == ["reddit", "mag", "cora", "flickr", "ppi"]
