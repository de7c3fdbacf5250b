"""Items that are made at their first use are there at any use, and made once."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyg_direct.runtime.host.tensor_views import LazyDict

ITEMS = {"a": 1, "b": 2}
USES = {
    "get": lambda d: d.get("b"),
    "item": lambda d: d["a"],
    "in": lambda d: "a" in d,
    "length": len,
    "list": list,
    "reversed": lambda d: list(reversed(d)),
    "values": lambda d: list(d.values()),
    "copy": lambda d: d.copy(),
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickle": lambda d: pickle.loads(pickle.dumps(d)),
    "unpacked": lambda d: {**d},
    "dict": dict,
    "joined": lambda d: {"c": 3} | d,
    "joined to": lambda d: d | {"c": 3},
    "equal": lambda d: d == ITEMS,
    "repr": repr,
    "pop": lambda d: (d.pop("a"), dict(d)),
    "set": lambda d: (d.__setitem__("c", 3), dict(d)),
    "delete": lambda d: (d.__delitem__("a"), dict(d)),
    "default": lambda d: (d.setdefault("c", 3), dict(d)),
    "update": lambda d: (d.update(c=3), dict(d)),
    "clear": lambda d: (d.clear(), dict(d)),
}


@pytest.mark.parametrize("use", USES)
def test_items_are_there_at_any_use(use):
    made = []
    lazy = LazyDict(lambda: made.append(1) or dict(ITEMS))

    assert made == []
    assert USES[use](lazy) == USES[use](dict(ITEMS))
    assert made == [1]
    len(lazy)
    assert made == [1]


def test_a_change_comes_with_the_items():
    lazy = LazyDict(lambda: dict(ITEMS))

    lazy.when_made(lambda items: items.update(a=5))

    assert lazy == {"a": 5, "b": 2}


def test_threads_make_the_items_once():
    made = []
    lazy = LazyDict(lambda: made.append(1) or {number: object() for number in range(1000)})

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda number: lazy[number % 10], range(40)))

    assert made == [1]
    assert all(one is got[number % 10] for number, one in enumerate(got))
