"""PyG's own tests pass with our loaders in the place of PyG's, but for those listed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_geometric.datasets import Planetoid

from tests.compat import datasets, suite, temporal
from tests.compat.suite import EXPECTED, ROOT, Result, describe_machine, find_unexpected, run, tabulate

RESULTS = [
    Result("test/loader/test_a.py::test_one[1]", "passed", ""),
    Result("test/loader/test_a.py::test_one[2]", "failed", "why | not"),
    Result("test/loader/test_b.py::test_two", "skipped", "no GPU"),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pygs_own_tests_pass_but_for_those_listed():
    if "PYG_TESTS" not in os.environ:
        pytest.skip("needs PYG_TESTS, the folder of PyG's tests; tests/loader holds ours of the same contracts")

    results = run(Path(os.environ["PYG_TESTS"]).resolve())

    assert find_unexpected(results, EXPECTED.read_text(), given=describe_machine())[0] == []
    assert sum(result.outcome == "passed" for result in results) >= 130


def test_what_is_not_listed_is_found():
    unexpected, unused = find_unexpected(RESULTS, "# why\nfailed | */test_a.py::* | known\nfailed | */test_b* | no\n")

    assert unexpected == [RESULTS[2]]
    assert unused == ["failed | */test_b* | no"]


def test_a_line_counts_only_where_what_it_asks_for_is_given():
    expected = "[GPU] failed | */test_a.py::* | known\nskipped | */test_b* | no GPU\n"

    assert find_unexpected(RESULTS, expected) == ([RESULTS[1]], [])
    assert find_unexpected(RESULTS, expected, given=("GPU",)) == ([], [])
    assert find_unexpected(RESULTS[:1], expected, given=("GPU",))[1] == [
        "failed | */test_a.py::* | known", "skipped | */test_b* | no GPU"]  # fmt: skip


def test_counts_are_by_file_and_reasons_by_test():
    lines = tabulate(RESULTS).splitlines()

    assert "| loader/test_a.py | 1 | 1 | 0 |" in lines
    assert "| all | 1 | 1 | 1 |" in lines
    assert "| failed | loader/test_a.py::test_one | 1 | why \\| not |" in lines


def test_counts_name_the_commit_that_they_were_taken_at(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "HERE", tmp_path)
    monkeypatch.setattr(suite, "run", lambda tests: RESULTS)
    monkeypatch.setattr(temporal, "COUNTS", tmp_path / "counts_temporal.md")
    monkeypatch.setattr(temporal, "run", lambda tests, files, plugin: RESULTS)
    monkeypatch.setattr(temporal, "version", lambda name: "1.0")
    monkeypatch.setenv("PYG_DIRECT_COMMIT", "abc1234")

    assert (suite.main(tmp_path), temporal.main(tmp_path)) == (1, 1)

    written = [path.read_text() for path in tmp_path.glob("counts*.md")]
    assert len(written) == 2
    assert all("commit abc1234; `python -m" in text and "| all | 1 | 1 | 1 |" in text for text in written)


def test_every_expected_line_has_a_reason():
    lines = [re.sub(r"^\[[\w -]+\] ", "", line).split("|") for line in EXPECTED.read_text().splitlines()
             if line and not line.startswith("#")]  # fmt: skip

    assert {line[0].strip() for line in lines} == {"failed", "skipped"}
    assert all(len(line) == 3 and line[2].strip() for line in lines)


@pytest.mark.full
def test_without_a_path_our_own_tests_run_and_are_counted(capsys, monkeypatch):
    found = []
    monkeypatch.setattr(suite, "run", lambda *args, **options: found.extend(run(*args, **options)) or found)
    # Meant for who runs this test.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-n 2")

    # Two of one name, in two folders.
    files = (
        "loader/arguments/test_arguments.py",
        "loader/neighbor_loader/test_labor.py",
        "sampling/uniform_plan/test_labor.py",
    )
    code = suite.main_own(files)

    told = capsys.readouterr().out
    assert code == 0, told
    assert "failed" not in told.splitlines()[-1]
    counts = {
        row[0]: [int(cell) for cell in row[1:]] for row in re.findall(r"\| (\S+) \| (\d+) \| (\d+) \| (\d+) \|", told)
    }
    assert set(counts) == {*files, "all"}
    assert counts["all"][0] > 50
    assert counts["all"][1] == 0
    assert len({result.test for result in found}) == len(found), "no test is counted twice"


@pytest.mark.parametrize(("outcome", "reason", "code"), [("failed", "", 1), ("skipped", "felt like it", 1),
                                                         ("skipped", "needs two CUDA devices", 0)])  # fmt: skip
def test_what_is_not_listed_of_our_own_tests_is_told(monkeypatch, capsys, outcome, reason, code):
    result = Result("tests/loader/test_a.py::test_one", outcome, reason)
    monkeypatch.setattr(suite, "run", lambda *args, **options: [*RESULTS[:1], result])

    assert suite.main_own() == code

    assert ("not expected: tests/loader/test_a.py::test_one" in capsys.readouterr().out) == bool(code)


def test_our_own_tests_are_there():
    assert [file for file in suite.OWN if not (ROOT / "tests" / file).exists()] == []


def test_a_folder_without_pygs_tests_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be the folder `test`"):
        run(tmp_path)


def test_a_generated_graph_is_found_by_pygs_data_set(tmp_path):
    datasets.write("cora", tmp_path, 0.1)

    data = Planetoid(str(tmp_path), "Cora")[0]

    assert (data.num_nodes, data.num_features) == (270, 1433)
    assert int(data.train_mask.sum()) > 0


def test_types_of_a_generated_graph_are_those_of_mag():
    data = datasets.make_mag(0.001)

    data.validate()
    assert set(data.node_types) == {"paper", "author", "institution", "field_of_study"}
    assert len(data.edge_types) == 4


@pytest.mark.full
def test_data_modules_are_those_that_the_trainers_of_pygs_tests_know(tmp_path):
    # PyG prefers those of `lightning`, which is installed beside it.
    for path in ("pytorch_lightning/__init__.py", "lightning/__init__.py", "lightning/pytorch.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("class LightningDataModule:\n    pass\n")
    program = (
        "import tests.compat.plugin\n"
        "import pytorch_lightning\n"
        "from torch_geometric.data.lightning import LightningNodeData\n"
        "assert issubclass(LightningNodeData, pytorch_lightning.LightningDataModule), LightningNodeData.__mro__\n"
    )

    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})  # fmt: skip

    assert done.returncode == 0, done.stderr
