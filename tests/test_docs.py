"""What `help` shows: every public name is told, every argument too, and the examples hold."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import pyg_direct

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


def untold(function, text, typed_will_do=False):
    """Parameters that `text` does not name."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in named if not re.search(rf"\b{p.name}\b", text)
            and not (typed_will_do and p.annotation is not p.empty)]  # fmt: skip


def test_rooms_are_found():
    assert {"pyg_direct", "pyg_direct.loader", "pyg_direct.distributed", "pyg_direct.dynamic.nn"} <= set(ROOMS)
    assert untold(lambda told, other: None, "told: What is.") == ["other"]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_and_argument_is_told(name):
    thing = NAMES[name]
    if not callable(thing):
        return  # a table, told by its module

    text = thing.__doc__  # that of a class is not inherited
    assert text
    is_own = not inspect.isclass(thing) or "__init__" in vars(thing)
    assert untold(thing.__init__ if inspect.isclass(thing) else thing, text) == [] or not is_own
    if inspect.isclass(thing):
        members = dict(members_of(thing))
        assert [key for key, member in members.items() if not inspect.getdoc(member)] == []
        methods = {key: member for key, member in members.items() if inspect.isfunction(member)}
        found = {key: untold(method, text + inspect.getdoc(method), typed_will_do=True)
                 for key, method in methods.items()}  # fmt: skip
        assert {key: names for key, names in found.items() if names} == {}


@pytest.mark.slow
@pytest.mark.parametrize("module", find_modules("    >>> "))
def test_examples_in_docstrings_hold(module):
    found = doctest.testmod(importlib.import_module(module))

    assert found.attempted > 0
    assert found.failed == 0
