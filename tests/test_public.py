"""What users see: the names, their documentation, and an import that leaves the GPU alone."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyg_direct

NAMES = [name for name in pyg_direct.__all__ if not name.startswith("__")]
CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def test_names_are_sorted_and_exist():
    assert pyg_direct.__all__ == sorted(pyg_direct.__all__)
    assert len(set(pyg_direct.__all__)) == len(pyg_direct.__all__)
    for name in pyg_direct.__all__:
        assert hasattr(pyg_direct, name)


def test_nothing_else_is_public():
    modules = {name for name, value in vars(pyg_direct).items() if inspect.ismodule(value)}

    names = {name for name in vars(pyg_direct) if not name.startswith("_")} - modules

    assert names == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_documented(name):
    thing = getattr(pyg_direct, name)

    members = {
        key: getattr(thing, key) for key, value in vars(thing).items()
        if not key.startswith("_") and (callable(value) or isinstance(value, (property, classmethod, staticmethod)))
    }  # fmt: skip

    assert inspect.getdoc(thing)
    assert [key for key, member in members.items() if not inspect.getdoc(member)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_told_in_the_changelog(name):
    text = CHANGELOG.read_text()

    assert f"`{name}`" in text or name == "Adj"


def test_version_is_the_one_of_the_changelog():
    headings = re.findall(r"^## \[(.+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$", CHANGELOG.read_text(), re.M)

    assert pyg_direct.__version__ == headings[0]


def test_import_starts_neither_cuda_nor_its_compiler():
    program = """
import sys
import torch

def refuse(*args, **kwargs):
    raise SystemExit("CUDA was started")

torch.cuda.init = torch.cuda._lazy_init = torch._C._cuda_init = refuse
import pyg_direct
assert not torch.cuda.is_initialized()
assert "numba.cuda" not in sys.modules
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stderr) == (0, "")
