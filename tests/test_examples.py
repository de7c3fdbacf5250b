"""The examples run as a user starts them, on a tiny graph."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow


def run_example(name, *options):
    environment = {k: v for k, v in os.environ.items() if k != "PYG_DIRECT_DATA"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    done = subprocess.run([sys.executable, EXAMPLES / name, "--device", "cpu", "--scale", "0.003", *options],
                          capture_output=True, text=True, env=environment, timeout=240, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["ogbn_products_sage.py", "ogbn_products_quiver_style.py", "unified_two_lines.py"])
def test_example_learns_more_than_an_mlp(name):
    output = run_example(name, "--epochs", "8", "--batch-size", "64")

    scores = dict(re.findall(r"^(GraphSAGE|MLP) .* ([\d.]+)%$", output, re.MULTILINE))
    assert float(scores["GraphSAGE"]) > float(scores["MLP"]) + 3, output
    assert len(re.findall(r"^epoch \d: loss [\d.]+, [\d.]+ s$", output, re.MULTILINE)) == 8


def test_dynamic_example_beats_the_mean():
    output = run_example("dynamic_tgcn.py", "--scale", "0.1")

    errors = dict(re.findall(r"^(T-GCN|mean of the snapshot,) test error ([\d.]+)$", output, re.MULTILINE))
    assert float(errors["T-GCN"]) < 0.7 * float(errors["mean of the snapshot,"]), output
