"""The guides for one process, on tiny graphs, do what they say."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "guides" / "examples.md"

# What a guide prints at its end, and the least that the number in it must be.
GUIDES = {
    "from_glt.py": (["--scale", "0.003"], r"and all (\d+) edges among them; the seeds are those given", 64),
    "from_graphbolt.py": (["--scale", "0.003"], r"a batch of 256 seeds: (\d+) nodes", 257),
    "hetero.py": (["--scale", "0.003"], r"test papers: ([\d.]+)% right", 20),
    "larger_than_gpu_memory.py": (["--scale", "0.003"], r"\nfile .* ([\d.]+)% ", 10),
    "link_prediction.py": (["--scale", "0.0005", "--epochs", "2"], r"told apart: ([\d.]+)%", 60),
    "molecules.py": (["--scale", "0.1", "--epochs", "4"], r"test molecules: ([\d.]+)% right", 60),
    "recommendation.py": (["--scale", "0.0005", "--epochs", "2"], r"told apart: ([\d.]+)%", 65),
    "temporal.py": (["--scale", "0.0001"], r"told apart: ([\d.]+)%", 55),
}


@pytest.fixture
def run_example(monkeypatch, capsys):
    """Runs an example in this interpreter, as one of its own takes seconds to import torch; gives what it printed."""

    def run(name, *options):
        monkeypatch.delenv("PYG_DIRECT_DATA", raising=False)
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [str(name), "--device", "cpu", *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def losses_of(output):
    return [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+), [\d.]+ s$", output, re.MULTILINE)]


def check_scores(output):
    scores = dict(re.findall(r"^(GraphSAGE|MLP) .* ([\d.]+)%$", output, re.MULTILINE))
    assert float(scores["GraphSAGE"]) > float(scores["MLP"]) + 3, output
    assert len(losses_of(output)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_guide_does_what_it_says(name, run_example):
    options, pattern, least = GUIDES[name]

    output = run_example(name, *options)

    losses = losses_of(output)
    assert losses[-1] < 0.98 * losses[0], output
    assert float(re.search(pattern, output)[1]) >= least, output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ogbn_products_sage.py", "ogbn_products_quiver_style.py"])
def test_example_learns_more_than_an_mlp(name, run_example):
    check_scores(run_example(name, "--scale", "0.003", "--epochs", "8", "--batch-size", "64"))


@pytest.mark.slow
def test_unified_example_learns_more_than_an_mlp(run_example):
    check_scores(run_example("unified_two_lines.py", "--scale", "0.003", "--epochs", "8", "--batch-size", "64"))


@pytest.mark.slow
def test_unified_example_is_a_plain_script_with_two_lines_changed(run_example, tmp_path):
    source = (EXAMPLES / "unified_two_lines.py").read_text()
    plain, num_changed = re.subn(r"^( +)\S.*  # was: (.*)$", r"\1\2", source, flags=re.MULTILINE)
    (tmp_path / "plain.py").write_text(plain)
    options = ["--scale", "0.003", "--epochs", "2", "--batch-size", "64"]

    losses, plain_losses = (losses_of(run_example(script, *options))
                            for script in ("unified_two_lines.py", tmp_path / "plain.py"))  # fmt: skip

    assert num_changed == 2
    assert "unified" not in plain.split("import pyg_direct\n")[1]
    assert len(losses) == 2
    assert losses == plain_losses


IGBH = ["--scale", "1e-5", "--features", "16", "--classes", "5", "--hidden", "16", "--heads", "2",
        "--batch-size", "64", "--fanouts", "5", "3", "2", "--lr", "0.02", "--evaluations", "1", "--epochs", "3",
        "--threads", "1"]  # fmt: skip
AT = re.compile(r"^epoch ([\d.]+): loss ([\d.]+), accuracy ([\d.]+), [\d.]+ s$", re.MULTILINE)


@pytest.mark.full
def test_igbh_example_learns_from_memory_and_from_files_alike(run_example, tmp_path):
    output = run_example("igbh_rgat.py", *IGBH, "--target", "1.1")
    in_files = ["--folder", str(tmp_path / "igbh"), "--rows", "file"]
    written = run_example("igbh_rgat.py", *IGBH, "--target", "0.2", *in_files)

    seen, from_files = AT.findall(output), AT.findall(written)
    assert [at for at, *_ in seen] == ["1.00", "2.00", "3.00"]
    assert float(seen[-1][1]) < 0.85 * float(seen[0][1]), output
    assert "accuracy 1.1 not reached" in output
    assert from_files == seen[: len(from_files)]
    assert re.search(r"^accuracy 0\.2 reached after [\d.]+ s$", written, re.MULTILINE), written
    assert (tmp_path / "igbh" / "paper" / "x.npy").exists()


@pytest.mark.slow
def test_igbh_example_asks_for_a_folder(run_example, capsys):
    with pytest.raises(SystemExit):
        run_example("igbh_rgat.py", "--rows", "file")

    assert "--folder must name the files of the graph" in capsys.readouterr().err


@pytest.mark.slow
def test_dynamic_example_beats_the_mean(run_example):
    output = run_example("dynamic_tgcn.py", "--scale", "0.1")

    errors = dict(re.findall(r"^(T-GCN|mean of the snapshot,) test error ([\d.]+)$", output, re.MULTILINE))
    assert float(errors["T-GCN"]) < 0.7 * float(errors["mean of the snapshot,"]), output


def test_processes_are_as_many_as_gpus_allow(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    count = importlib.import_module("model").count_processes

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = [(3, "cpu"), (None, "cpu"), (None, "cpu", 2), (None, "cuda"), (1, "cuda")]
    assert [count(*arguments) for arguments in given] == [3, 1, 2, 2, 1]
    with pytest.raises(SystemExit, match="--processes must be at most 2, one for each GPU, got 3"):
        count(3, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="--device must be cpu where there is no GPU, got cuda"):
        count(None, "cuda")


def test_every_example_is_listed():
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"model.py"}

    assert {name for name in names if f"examples/{name}" not in PAGE.read_text()} == set()
