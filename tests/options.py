"""Options in tests: each has an effect, or is refused with an error of the package; an option without an entry
fails.
"""

import inspect

import pytest
import torch

from pyg_direct.errors import PygDirectError


class Refused:
    """An option that is not there, that needs another, or whose value is checked as its place is not here."""

    errors: tuple[type[Exception], ...] = (PygDirectError,)

    def __init__(self, value, words, **base):
        self.value, self.words, self.base = value, words, base

    def check(self, make, name):
        with pytest.raises(self.errors, match=self.words):
            make(**self.base, **{name: self.value})


class Seen:
    """A check that a function sees a difference between two objects made with different values."""

    def __init__(self, see, *values, **base):
        self.see, self.values, self.base = see, values, base

    def check(self, make, name):
        first, second = (self.see(make(**self.base, **{name: value})) for value in self.values)
        assert first != second


def check_options(kind, make, known):
    """Check each parameter of a function or class by its entry, one case or several, with `make(**options)`."""
    assert set(inspect.signature(kind).parameters) == set(known)
    for name, cases in known.items():
        for case in cases if isinstance(cases, tuple) else (cases,):
            case.check(make, name)


def look(loader):
    """All that batches hold."""
    return [repr([str(batch), *map(str, _list_values(batch))]) for batch in loader]


def _list_values(value):
    if isinstance(value, torch.Tensor):
        return [(value.dtype, (value.to_dense() if value.layout != torch.strided else value).tolist())]
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in _list_values(part)]
    if hasattr(value, "to_dict"):
        return [item for part in value.to_dict().items() for item in _list_values(list(part))]
    return [item for part in value.values() for item in _list_values(part)] if isinstance(value, dict) else [value]
