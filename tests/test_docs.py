"""What `help` shows: every public name is told, every argument too, and the examples hold."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest
from torch import Tensor

import pyg_direct
from pyg_direct.errors import DeviceError, IdError
from pyg_direct.ops.argument_checks import check_flag
from tests.docstrings import find_gaps

PACKAGE = Path(pyg_direct.__file__).parent


def find_modules(text):
    """Names of the package's modules whose source holds `text`."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if text in path.read_text())
    return [".".join(["pyg_direct", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
            for path in paths]  # fmt: skip


ROOMS = find_modules("\n__all__ = ")
NAMES = {f"{room}.{name}": getattr(importlib.import_module(room), name)
         for room in ROOMS for name in importlib.import_module(room).__all__ if not name.startswith("__")}  # fmt: skip


def members_of(cls):
    """Public methods and properties that the package wrote, by name."""
    for name in dir(cls):
        owner = next(base for base in cls.__mro__ if name in vars(base)) if not name.startswith("_") else None
        if owner is not None and owner.__module__.startswith("pyg_direct"):
            member = inspect.getattr_static(owner, name)
            member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if callable(member):
                yield name, member


def find_all_gaps(thing):
    """What is left out of a function; or of a class and, with their names, of its methods."""
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
        return  # a table, told by its module

    assert thing.__doc__  # that of a class is not inherited
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


@pytest.mark.slow
@pytest.mark.parametrize("module", find_modules("    >>> "))
def test_examples_in_docstrings_hold(module):
    found = doctest.testmod(importlib.import_module(module))

    assert found.attempted > 0
    assert found.failed == 0
