"""`ConvSpec`: the description of an accelerated convolution, and its form over joined relations, `Joined`.

A convolution is one file, which ends with its `ConvSpec`; `table.py` lists them. The attribute `_spec` of an instance
holds the `ConvSpec` that accelerated it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from pyg_direct.nn.any_convolution import KnownTargets
    from pyg_direct.nn.hetero.joined_edges import Relation
    from pyg_direct.nn.sorted_edges import SortedEdges

# Message of a convolution along an edge: (rows of nodes, weights of edges); None if PyG must compute it.
Message = tuple[Tensor, "Tensor | None"] | None
# Rows of each group that are read, the first ones; None for all.
NumRead = Sequence["int | None"]


@dataclass(frozen=True, eq=False)
class Joined:
    """Relations of a convolution that are summed together. Kinds of convolutions that share one go together.

    Attributes:
        read: Returns the key that relations must share, from (convolution, rows of its sources, rows of its targets)
            and the rows of edges; None if a relation is summed separately.
        convolve: Results of relations that share the key; None if each is faster separately.
        finish: Makes the result of the convolution from each of them.
        add_up: Results of relations, added up by group, if these go together in one step; None if each is faster
            separately. Given is also how many rows of each group are read, the first ones, or None for all; it may
            return more.
        add_up_whole: The same over whole graphs, whose relations need not share the key.
        takes_attributes: True if edges have rows.
    """

    read: Callable[..., Hashable]
    convolve: Callable[[Sequence[Relation]], list[Tensor] | None]
    finish: Callable[[Any, Tensor], Tensor] | None = None
    add_up: Callable[[Sequence[Relation], list[list[int]], NumRead], list[Tensor] | None] | None = None
    add_up_whole: Callable[[Sequence[Relation], list[list[int]]], list[Tensor] | None] | None = None
    takes_attributes: bool = False

    def __deepcopy__(self, memo: Any) -> Joined:
        return self


def read_steps(kind: Any) -> tuple[Any, ...]:
    """Return the methods of a class that process messages."""
    return kind.message, kind.aggregate, kind.update, kind.edge_update, kind.message_and_aggregate


def find_nothing(module: Any) -> None:
    """Leave no option to PyG."""


@dataclass(frozen=True, eq=False)
class ConvSpec:
    """A PyG convolution that accelerated operators serve.

    Attributes:
        propagate: Overrides `propagate` of an instance; `dispatch.propagate` serves convolutions that add up rows of
            nodes.
        parts: Override methods of their names, which PyG's `forward` calls.
        message: Rows and weights of (convolution, rows of sources, edges, arguments of `propagate`), for
            `dispatch.propagate`.
        sum: Results of (convolution, rows of sources, edges, number of targets, arguments of `propagate`), for
            convolutions that add up rows of edges; None if PyG must compute them.
        find_left: Returns why options of a convolution leave it to PyG, beside the options of all; None if they do not.
        fuse: Result of `propagate` of `any_convolution.py`, of (convolution, known targets, arguments); None if the
            convolution's own messages must be aggregated.
        joined: Its form over relations that are summed together.
        leaves_to_any: True if the operators of any layer (`any_convolution.py`) serve what it leaves. `find_left` then
            knows all reasons.
        sees_neighbors_only: True if a node's result depends only on its in-neighbors and the edges between.
        steps: Methods of PyG's class that process messages; programs may override them.
    """

    kind: Any
    forward: Callable[..., Any] | None = None
    propagate: Callable[..., Any] | None = None
    parts: tuple[Callable[..., Any], ...] = ()
    message: Callable[[Any, Tensor, SortedEdges, dict[str, Any]], Message] | None = None
    sum: Callable[[Any, Tensor, SortedEdges, int, dict[str, Any]], Tensor | None] | None = None
    find_left: Callable[[Any], str | None] = find_nothing
    fuse: Callable[[Any, KnownTargets, dict[str, Any]], Tensor | None] | None = None
    joined: Joined | None = None
    leaves_to_any: bool = False
    sees_neighbors_only: bool = False
    steps: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", read_steps(self.kind))

    def __deepcopy__(self, memo: Any) -> ConvSpec:
        return self

    def is_own(self, kind: type) -> bool:
        """Report whether a class, or one derived from it, processes messages as PyG's class does."""
        return read_steps(kind) == self.steps
