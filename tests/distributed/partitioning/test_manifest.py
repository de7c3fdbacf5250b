"""FORMAT.md tells the keys of a manifest as they are written."""

import re
from pathlib import Path

import numpy as np

import pyg_direct.distributed
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from tests.distributed.partitions import read_manifest

TEXT = Path(pyg_direct.distributed.__file__).with_name("partitioning") / "FORMAT.md"
TYPES = {"string": str, "integer": int, "boolean": bool, "list": list, "object": dict, "null": type(None)}
# Objects whose keys are names of the user's, or of files.
NAMED = ("nodes[].rows", "edges[].rows", "files")


def read_documented():
    """Types of each key, as the table of keys tells them."""
    table = TEXT.read_text().partition("## The keys of `manifest.json`")[2]
    return dict(re.findall(r"^\| `(\S+)` \| ([a-z ]+) \|", table, re.MULTILINE))


def list_keys(value, path=""):
    """(key, its value) of everything inside a value of a manifest."""
    for key, inner in value.items():
        here = f"{path}{{}}" if path in NAMED else f"{path}.{key}".removeprefix(".")
        yield here, inner
        if isinstance(inner, dict):
            yield from list_keys(inner, here)
        for item in inner if isinstance(inner, list) else ():
            yield from list_keys(item, f"{here}[]") if isinstance(item, dict) else ()


def is_of(value, told):
    """Whether a value has a type that is told, such as `string or null` or `list of integer`."""
    for name in told.split(" or "):
        outer, _, inner = name.partition(" of ")
        if type(value) is TYPES[outer] and all(type(item) is TYPES[inner] for item in (value if inner else ())):
            return True
    return False


def test_the_keys_that_are_documented_are_those_written(tmp_path):
    edges = np.random.default_rng(0).integers(0, 30, (2, 90))
    relations = {("a", "to", "b"): edges, ("b", "to", "a"): edges[:, :50]}
    options = [
        {"node_rows": {"a": {"x": np.ones((30, 2))}}, "edge_rows": {("a", "to", "b"): {"w": np.ones(90)}}},
        {"node_time": {"a": np.arange(30)}, "edge_weight": {("a", "to", "b"): np.ones(90)}, "method": "range"},
        {"edge_time": {("a", "to", "b"): np.arange(90)}, "method": "streaming"},
    ]
    documented, written = read_documented(), {}

    for number, more in enumerate(options):
        partition_graph(tmp_path / str(number), relations, 3, num_nodes={"a": 30, "b": 30}, **more)
        for key, value in list_keys(read_manifest(tmp_path / str(number))):
            written.setdefault(key, []).append(value)

    assert set(documented) == set(written)
    wrong = [(key, value) for key, values in written.items() for value in values if not is_of(value, documented[key])]
    assert not wrong
