"""Objects in one line, for `repr`, as tables, for notebooks, and numbers under flat names, for loggers.

A class lists its parts, and `describe` or `one_line` joins them. Debuggers and errors show these texts, so they never
raise. If the constructor of an object failed, its text has the parts that can be listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

# Text instead of parts that could not be listed.
_REST = "..."
# Characters that keys of metrics lack.
_OTHERS = re.compile(r"[^\w./-]+")


def describe(owner: object, parts: Iterable[str], places: Iterable[str] = ()) -> str:
    """Return the text of an object, such as `NeighborLoader(10 seeds, [5]; x 9.5 GB unified)`.

    Args:
        parts: Text of each part; if a generator raises, `...` stands for the rest.
        places: Text of each place of its memory, behind a semicolon; likewise.
    """
    first = _collect(parts)
    # An incomplete object has no places to list.
    second = [] if _REST in first else _collect(places)
    halves = [text for text in (", ".join(first), ", ".join(second)) if text]
    return f"{type(owner).__name__}({'; '.join(halves)})"


def one_line(list_parts: Callable[[Any], Iterable[str]]) -> Callable[[Any], str]:
    """Make a `__repr__` of a method that yields the parts of the object's text."""

    @wraps(list_parts)
    def describe_self(self: Any) -> str:
        return describe(self, list_parts(self))

    return describe_self


def _collect(parts: Iterable[str]) -> list[str]:
    found = []
    try:
        for part in parts:
            # A name or an option of the program may have line breaks.
            found.append(" ".join(str(part).split()))
    except Exception:
        found.append(_REST)
    return found


def show_count(count: int, noun: str, several: str | None = None) -> str:
    """Return a number with its noun, such as `1 batch` or `2,500 seeds`.

    Args:
        several: Its noun in the plural; None adds an `s`.
    """
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"


def show_sizes(sizes: int | Mapping[str, int]) -> str:
    """Return numbers of nodes, such as `5 nodes` or `5 nodes of 2 types`."""
    if not isinstance(sizes, Mapping):
        return show_count(sizes, "node")
    return f"{show_count(sum(sizes.values()), 'node')} of {show_count(len(sizes), 'type')}"


def show_fanouts(num_neighbors: Any) -> str:
    """Return fanouts, such as `[10, 5]`, with the number of their relations or types, if any.

    Args:
        num_neighbors: A list, `NumNeighbors`, or lists by relation or node type.
    """
    values = num_neighbors if isinstance(num_neighbors, Mapping) else getattr(num_neighbors, "values", num_neighbors)
    if not isinstance(values, Mapping):
        return str(list(values))
    each = [list(own) for own in values.values()]
    if not each:
        return str(getattr(num_neighbors, "default", None) or [])
    count = show_count(len(each), "type" if isinstance(num_neighbors, Mapping) else "relation")
    return f"{each[0] if all(own == each[0] for own in each) else 'fanouts'} of {count}"


def show_place(placement: str, device: object) -> str:
    """Return the memory of rows and the device that reads them, such as `unified, cuda:0`, or the device for its own.

    Args:
        placement: The memory, `cuda`, `unified`, `pinned`, `cpu`, or a word of a tier.
    """
    return str(device) if placement == str(device).partition(":")[0] else f"{placement}, {device}"


def show_options(**options: Any) -> list[str]:
    """Return options as `name=value`, without those that are None, False or empty."""
    shown = {name: value for name, value in options.items() if value is not None and value is not False}
    return [f"{name}={value!r}" for name, value in shown.items() if not (hasattr(value, "__len__") and not len(value))]


def flatten(numbers: Mapping[str, Any], above: str = "") -> dict[str, int | float]:
    """Return nested numbers under one key each, for loggers of metrics.

    Args:
        numbers: Numbers, or mappings of numbers, by name; None and truth values are left out.

    Returns:
        Keys are names joined by `/`, of letters, digits, `_`, `.` and `-`; other characters become `_`.
    """
    found: dict[str, int | float] = {}
    for name, value in numbers.items():
        key = f"{above}/{_OTHERS.sub('_', name).strip('_')}".lstrip("/")
        if isinstance(value, Mapping):
            found |= flatten(value, key)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[key] = value
    return found


def show_parts(owner: object, parts: Iterable[str], places: Iterable[str] = ()) -> str:
    """Return an object as HTML, which notebooks show: a row for each part.

    Args:
        parts: Text of each part, as of `describe`.
        places: Text of each place of its memory.
    """
    return show_table(type(owner).__name__, [[part] for part in (*_collect(parts), *_collect(places))])


def show_table(title: str, rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """Return a table as HTML, which notebooks show."""
    from html import escape

    def line(cells: Iterable[object], kind: str) -> str:
        style = "text-align:left;white-space:pre-wrap"
        return "<tr>" + "".join(f'<{kind} style="{style}">{escape(str(cell))}</{kind}>' for cell in cells) + "</tr>"

    head = f"<thead>{line(heads, 'th')}</thead>" if heads else ""
    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{escape(title)}</caption>{head}<tbody>{body}</tbody></table>"
