"""Path of each convolution: accelerated operators, or PyG's code and the reason.

Every accelerated convolution has a `Paths` that records its calls, and its class has one for the whole process. Calls
that torch compiles or traces are not recorded, because a compiled program would be compiled again for each number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pyg_direct.object_text import flatten, show_table

# Reasons that several convolutions share.
UNKNOWN = "edges are not known to be sorted"
SMALL = "edges are not known to be sorted, and are too few to sort a graph for"
NOT_YET = "first passes over a graph; its edges are sorted if it comes back"
UNFIT = "edges do not fit the rows"
OWN_LOOPS = "the layer adds loops of PyG's, in an order that is not known"
NARROW = "rows are too narrow for the loops of a CPU"
DTYPE = "rows are of a dtype that has no operator"
NO_WEIGHTS = "{} of rows with weights has no operator"
ARGUMENTS = "what the layer was called with is not covered"


class Paths:
    """Calls of a convolution, or of all of a class, by the path that they took.

    Attributes:
        left: Calls that PyG's code served, by reason.
    """

    __slots__ = ("_total", "accelerated", "left")

    def __init__(self, total: Paths | None = None) -> None:
        self.accelerated = 0
        self.left: dict[str, int] = {}
        self._total = total

    def note(self) -> None:
        """Count a call that accelerated operators served."""
        self.accelerated += 1
        if self._total is not None:
            self._total.accelerated += 1

    def note_left(self, reason: str) -> None:
        """Count a call that was left to PyG."""
        left, total = self.left, self._total
        left[reason] = left.get(reason, 0) + 1
        if total is not None:
            total.left[reason] = total.left.get(reason, 0) + 1

    def __deepcopy__(self, memo: Any) -> Paths:
        # A copy of a layer has no calls yet.
        return Paths(self._total)


# By name of the class.
_TOTALS: dict[str, Paths] = {}


def make_paths(kind: type, made: type[Paths] = Paths) -> Paths:
    """Make the paths of a convolution, which also count for all of its class."""
    return made(_TOTALS.setdefault(kind.__name__, Paths()))


def list_totals() -> dict[str, Paths]:
    """Return calls of this process so far, by name of the class; classes without calls are left out."""
    return {name: total for name, total in sorted(_TOTALS.items()) if total.accelerated or total.left}


class ConvReport(NamedTuple):
    """One convolution of a model.

    Attributes:
        name: Its name in the model; empty for the model itself.
        accelerated: Calls that accelerated operators served so far.
        left: Calls that were left to PyG so far, by reason.
        reason: Why all of its calls are left to PyG in its present state; None if they are not.
    """

    name: str
    kind: str
    accelerated: int
    left: dict[str, int]
    reason: str | None

    def __str__(self) -> str:
        label = f"{self.name}: {self.kind}" if self.name else self.kind
        return f"{label}, {describe_calls(self.accelerated, self.left, self.reason)}"


class Report(NamedTuple):
    """Counts of an accelerated model so far; the text has a line for each convolution.

    Attributes:
        convolutions: Each convolution of the model, in the model's order.
        replay: Passes that were replayed, those that were not, and why; None unless the model is replayed.
    """

    convolutions: list[ConvReport]
    replay: str | None = None

    def to_dict(self) -> dict[str, int | float]:
        """Return numbers of calls by flat names, such as `convs.0/accelerated`, for loggers of metrics."""
        return flatten({one.name or one.kind: {"accelerated": one.accelerated, "left": sum(one.left.values())}
                        for one in self.convolutions})  # fmt: skip

    def _repr_html_(self) -> str:
        rows = [(one.name, one.kind, describe_calls(one.accelerated, one.left, one.reason))
                for one in self.convolutions]  # fmt: skip
        return show_table(self.replay or "convolutions", rows, ("name", "class", "calls"))

    def __str__(self) -> str:
        lines = [str(one) for one in self.convolutions] or ["the model has no convolutions"]
        return "\n".join(lines if self.replay is None else [*lines, self.replay])


def describe_calls(accelerated: int, left: dict[str, int], reason: str | None = None) -> str:
    """Describe the calls of a convolution, for example `12 accelerated, 3 left to PyG (3: edges are not ...)`."""
    words = [f"{accelerated} accelerated"] if accelerated or not (left or reason) else []
    if left:
        reasons = "; ".join(f"{count}: {why}" for why, count in sorted(left.items(), key=lambda pair: -pair[1]))
        words.append(f"{sum(left.values())} left to PyG ({reasons})")
    elif reason is not None:
        words.append(f"left to PyG: {reason}")
    return ", ".join(words)


def describe_left(left: Iterable[tuple[str, str, str]]) -> str:
    """Describe in one line the convolutions that are left to PyG.

    Args:
        left: (name in the model, class, reason) of each.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind, reason in left:
        groups.setdefault((kind, reason), []).append(name)
    words = []
    for (kind, reason), names in groups.items():
        which = f"{kind} {names[0]}".strip() if len(names) == 1 else f"{len(names)} {kind}"
        words.append(f"{which} ({reason})")
    return f"left to PyG: {', '.join(words)}"
