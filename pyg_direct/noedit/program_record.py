"""Record of the objects that replaced PyG's in this process, and of the objects left to PyG, with the reason.

`run` reports it at the end of the program. `LEFT` lists loaders and samplers of PyG without a counterpart of ours; each
is named when the program makes one.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pyg_direct.nn.paths import describe_calls, list_totals
from pyg_direct.progress import announce

# Loaders and samplers without a counterpart of ours, by module within PyG; some PyG versions lack some of them.
LEFT = {
    "loader.ibmb_loader": ("IBMBBatchLoader", "IBMBNodeLoader"),
    "nn.kge.loader": ("KGTripletLoader",),
    "sampler": ("BidirectionalNeighborSampler",),
}
_NONE_OF_OURS = "there is none of ours"
_made: Counter[str] = Counter()
_left: dict[str, Counter[str]] = {}
# Process ids of this process, if it started others.
_starters: set[int] = set()
# Watched classes, and their own `__init__`: None if it is inherited.
_WATCHED: dict[type, Callable[..., None] | None] = {}


def note_made(name: str) -> None:
    """Count an object of ours that was made for one of PyG's, by the name of PyG's class."""
    _made[name] += 1


def note_left(name: str, reason: str = _NONE_OF_OURS) -> None:
    """Count an object that is left to PyG, and report its class and the reason once."""
    _left.setdefault(name, Counter())[reason] += 1
    announce(f"{name} left to PyG: {reason}")


def note_process() -> None:
    """Note that this process has started another one, whose objects are not counted here."""
    _starters.add(os.getpid())


def watch_left() -> None:
    """Report objects of the classes of `LEFT` at their creation, and of the program's subclasses."""
    for room, names in LEFT.items():
        try:
            module = import_module(f"torch_geometric.{room}")
        except ImportError:
            continue
        for name in names:
            kind = getattr(module, name, None)
            if isinstance(kind, type) and kind not in _WATCHED:
                _watch(kind)


def forget_left() -> None:
    """Undo `watch_left`."""
    while _WATCHED:
        kind, own = _WATCHED.popitem()
        if own is None:
            del kind.__init__  # type: ignore[misc]
        else:
            kind.__init__ = own  # type: ignore[misc]


def is_watched(kind: type) -> bool:
    """Check if objects of a class are reported at their creation."""
    return any(one in _WATCHED for one in kind.__mro__)


def _watch(kind: Any) -> None:
    plain = kind.__init__
    _WATCHED[kind] = vars(kind).get("__init__")

    @functools.wraps(plain)
    def named(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        # Once, even if one of these classes is a subclass of another.
        if next((one for one in type(self).__mro__ if one in _WATCHED), None) is kind:
            note_left(type(self).__name__)

    kind.__init__ = named


def describe_program(*, verbose: bool = False) -> list[str]:
    """Describe in lines the objects that were made so far, and those left to PyG."""
    made = ", ".join(f"{name} ({count})" for name, count in sorted(_made.items()))
    if os.getpid() in _starters:
        place = "this process; those that it started are not counted"
        lines = [f"replaced in {place}: {made}" if made else f"no loader was replaced in {place}"]
    else:
        lines = [f"replaced in this program: {made}" if made else "no loader of this program was replaced"]
    for name, paths in list_totals().items():
        if verbose or not paths.left:
            lines.append(f"{name}: {describe_calls(paths.accelerated, paths.left)}")
        else:
            reason, _ = max(paths.left.items(), key=lambda pair: pair[1])
            more = ", ..." if len(paths.left) > 1 else ""
            lines.append(f"{name}: {paths.accelerated} accelerated, {sum(paths.left.values())} left to PyG "
                         f"({reason}{more})")  # fmt: skip
    from pyg_direct.nn.replay.model_replay import Replay

    if Replay.total:
        lines.append(f"{Replay.total} passes of models replayed as CUDA graphs; these call no convolution")
    if _left:
        left = ", ".join(f"{name} ({sum(reasons.values())})" for name, reasons in sorted(_left.items()))
        lines.append(f"left to PyG: {left}")
    return lines
