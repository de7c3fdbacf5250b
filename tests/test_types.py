"""Type checkers find misspelt options and values of a wrong type; options by name are those of the constructors."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from pyg_direct import NeighborLoader, infer, inference_loader
from pyg_direct.distributed import DistNeighborLoader
from pyg_direct.loader import arguments
from pyg_direct.loader.arguments import _TORCH_OPTIONS
from tests.typed_calls import __file__ as CALLS

ROOT = Path(__file__).parents[1]
TORCH = set(_TORCH_OPTIONS) - {"filter_per_worker", "dataset", "collate_fn"}


@pytest.mark.slow
def test_mypy_refuses_just_the_calls_that_are_wrong():
    expected = {number: word for number, line in enumerate(Path(CALLS).read_text().splitlines(), 1)
                for word in re.findall(r"# refused: (.+)$", line)}  # fmt: skip

    # With the project's settings, by which mypy keeps what it knows of the package for all its runs.
    done = subprocess.run([sys.executable, "-m", "mypy", "--no-error-summary", CALLS], cwd=ROOT, capture_output=True,
                          text=True, timeout=280)  # fmt: skip

    found = {}
    for number, message in re.findall(r"^tests/typed_calls\.py:(\d+): error: (.+)$", done.stdout, re.M):
        found.setdefault(int(number), []).append(message)
    assert done.stderr == ""
    assert len(expected) > 25
    assert found.keys() == expected.keys(), done.stdout
    for number, word in expected.items():
        assert word in " ".join(found[number])


def options_of(function, *without):
    parts = inspect.signature(function).parameters.values()
    return {part.name for part in parts if part.kind is not part.VAR_KEYWORD} - {"self", *without}


def test_options_by_name_are_those_of_the_constructors():
    own = options_of(NeighborLoader.__init__, "data", "num_neighbors", "input_nodes")
    rows = {"feature_cache", "store_dtype", "cache_policy", "cold_policy", "hotness", "presample", "ahead"}
    dist = options_of(DistNeighborLoader.__init__, "graph", "num_neighbors", "input_nodes", "subgraph_type")

    named = {name: set(get_type_hints(kind)) for name, kind in vars(arguments).items() if name.endswith("Options")}

    assert named["TorchOptions"] == TORCH
    assert named["ShuffledOptions"] == TORCH - {"batch_size"}
    assert named["WorkerOptions"] == TORCH - {"batch_size", "shuffle"}
    assert named["SubGraphOptions"] == TORCH | own - {"subgraph_type", "neighbor_sampler"}
    assert named["InferenceLoaderOptions"] == named["WorkerOptions"] | own - rows
    assert named["InferOptions"] == named["InferenceLoaderOptions"] - options_of(infer)
    assert named["DistSubGraphOptions"] == TORCH | dist


def test_types_of_options_are_those_of_the_constructors():
    given = get_type_hints(NeighborLoader.__init__)

    for name, kind in get_type_hints(arguments.SubGraphOptions).items():
        if name in given:
            assert kind == given[name], name
    assert get_type_hints(inference_loader)["return"] is NeighborLoader
