"""Docstrings: they describe every public name and argument in plain English, and their examples hold."""

import doctest
import importlib
import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import pyg_direct
from pyg_direct.errors import DeviceError, IdError
from pyg_direct.ops.argument_checks import check_flag
from tests.docstrings import MOST_WORDS, find_gaps, find_long_sentences, has_wrong_start, list_docstrings

PACKAGE = Path(pyg_direct.__file__).parent


def find_modules(text):
    """Return names of the package's modules whose source holds `text`."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if text in path.read_text())
    return [".".join(["pyg_direct", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
            for path in paths]  # fmt: skip


ROOMS = find_modules("\n__all__ = ")
NAMES = {f"{room}.{name}": getattr(importlib.import_module(room), name)
         for room in ROOMS for name in importlib.import_module(room).__all__ if not name.startswith("__")}  # fmt: skip


def members_of(cls):
    """List public methods and properties of the package by name, without inherited ones of others."""
    for name in dir(cls):
        owner = next(base for base in cls.__mro__ if name in vars(base)) if not name.startswith("_") else None
        if owner is not None and owner.__module__.startswith("pyg_direct"):
            member = inspect.getattr_static(owner, name)
            member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if callable(member):
                yield name, member


def find_all_gaps(thing):
    """List the gaps of a function; or of a class and, with their names, of its methods."""
    if not inspect.isclass(thing):
        return find_gaps(thing, thing.__doc__)
    gaps = find_gaps(thing.__init__, thing.__doc__, thing) if "__init__" in vars(thing) else []
    for name, member in members_of(thing):
        gaps += [f"{name}: {gap}" for gap in find_gaps(member, inspect.getdoc(member), thing)]
    return gaps


def test_rooms_are_found():
    assert {"pyg_direct", "pyg_direct.loader", "pyg_direct.distributed", "pyg_direct.dynamic.nn"} <= set(ROOMS)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_and_argument_is_told(name):
    thing = NAMES[name]
    if not callable(thing):
        return  # a table, which the docstring of its module describes

    assert thing.__doc__  # a class does not inherit its docstring
    if inspect.isclass(thing):
        assert [key for key, member in members_of(thing) if not inspect.getdoc(member)] == []
    assert find_all_gaps(thing) == []


def _take_rows(ids: Tensor, rows: Tensor, *, fanout: int = 1) -> Tensor:
    """Rows of ids.

    Args:
        ids: int64 `[n]`.
        rows: Any.
    """
    check_flag("fanout", fanout)
    raise ValueError


class _Reader:
    def read(self):
        """Rows, as in `take`."""
        return self.take()

    def take(self):
        raise DeviceError("none")


_Reader.take.__module__ = "pyg_direct"


def test_gaps_are_found():
    assert find_gaps(_take_rows, _take_rows.__doc__) == [
        "shape or dtype of rows", "fanout", "shape or dtype of what is returned", "ArgumentTypeError", "ValueError",
    ]  # fmt: skip
    assert find_gaps(_Reader.read, _Reader.read.__doc__, _Reader) == ["DeviceError"]


def test_an_error_may_be_told_by_its_base():
    def check(ids):
        raise IdError("out of range")

    assert find_gaps(check, "Args:\n    ids: Ids.\n\nRaises:\n    ArgumentError: out of range.") == []


# Rooms in plain English; a room that is rewritten joins them, and none leaves.
PLAIN_ROOMS = ["", "bench", "cli", "compiler", "datasets", "distributed", "dynamic", "features", "graph", "kernels",
               "loader", "nn", "noedit", "ops", "runtime", "sampler", "sampling"]  # fmt: skip


@pytest.mark.parametrize("room", PLAIN_ROOMS)
def test_docstrings_are_plain_english(room):
    texts = [(f"{path.relative_to(PACKAGE)}: {name}", text)
             for path in sorted(PACKAGE.glob(f"{room}/**/*.py" if room else "*.py"))
             for name, text in list_docstrings(path)]  # fmt: skip

    assert len(texts) > 40
    assert [where for where, text in texts if has_wrong_start(text)] == []
    assert [(where, sentence) for where, text in texts for sentence in find_long_sentences(text)] == []


def test_plain_english_is_checked():
    long = " ".join(["word"] * MOST_WORDS) + " more"

    assert has_wrong_start("Whether it is.")
    assert has_wrong_start("(what it is, and more).")
    assert not has_wrong_start("Whatever it is.")
    assert find_long_sentences(f"Do it.\n\n{long}.\n\nArgs:\n    name: {long}.") == [f"{long}.", f"name: {long}."]
    assert find_long_sentences(long.replace(" more", "")) == []
    assert find_long_sentences(f"{long.replace(' more', ' `x y z`')} 12 = f(x)") == [
        f"{long.replace(' more', ' code')} 12 = f(x)"
    ]
    assert find_long_sentences(f"Do it: {long[:60]}.\n\n| {long} |\n\n- {long[:60]}\n- {long[:60]}\n>>> {long}") == []


# Public names without an example, each with the reason.
WITHOUT_EXAMPLE = {
    "Producers": "starts processes",
    "GraphSAINTSampler": "is a base, of which the three samplers have examples",
    "PRESETS": "is a table, which the example of Preset reads",
    "init_p2p": "needs GPUs",
    "p2pCliqueTopo": "needs GPUs",
    "load_ogb": "downloads",
    "patch": "needs PyTorch Geometric Temporal",
    "unpatch": "needs PyTorch Geometric Temporal",
}
MOST_STATEMENTS = 5


def list_statements(name):
    """List the statements in the example of a public name, without imports."""
    found = doctest.DocTestParser().get_examples(inspect.getdoc(NAMES[name]) or "") if callable(NAMES[name]) else []
    return [statement for statement in found if not statement.source.startswith(("from ", "import "))]


def has_reason(name):
    return name.rpartition(".")[2] in WITHOUT_EXAMPLE


@pytest.mark.parametrize("name", [name for name in NAMES if not has_reason(name)])
def test_every_name_has_an_example(name):
    statements = list_statements(name)

    assert 1 <= len(statements) <= MOST_STATEMENTS
    assert any(statement.want for statement in statements)


def test_names_without_an_example_have_none():
    names = [name for name in NAMES if has_reason(name)]

    assert {name.rpartition(".")[2] for name in names} == WITHOUT_EXAMPLE.keys()
    assert [name for name in names if list_statements(name)] == []


def names_for(module):
    """Return the names that the examples of a module need not import, as `docs/reference/index.md` says."""
    rooms = ("pyg_direct", ".".join(module.__name__.split(".")[:2]))
    return {"torch": torch, "Data": Data, "HeteroData": HeteroData,
            **{name.rpartition(".")[2]: thing for room in rooms
               for name, thing in NAMES.items() if name.rpartition(".")[0] == room},
            **{name: thing for name, thing in vars(module).items()
               if getattr(thing, "__module__", None) == module.__name__},
            "__name__": module.__name__}  # fmt: skip


# A process apart, because examples install loaders and name devices.
@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("module", find_modules("    >>> "))
def test_examples_in_docstrings_hold(module, tmp_path, monkeypatch):
    module = importlib.import_module(module)
    monkeypatch.chdir(tmp_path)

    # A thread of its own, because `enable_unified_device` holds for the thread that calls it.
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(doctest.testmod, module, globs=names_for(module)).result()

    assert found.attempted > 0
    assert found.failed == 0
