"""`ConvSpec`: all that is known of an accelerated convolution, and its form over joined relations, `Joined`.

A convolution is one file, which ends with its `ConvSpec`; `table.py` lists them. What an instance was accelerated with
is its attribute `_spec`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from pyg_direct.nn.hetero.joined_edges import Relation
    from pyg_direct.nn.sorted_edges import SortedEdges

# What a convolution sends along an edge: (rows of nodes, weights of edges); None where PyG must find it.
Message = tuple[Tensor, "Tensor | None"] | None


@dataclass(frozen=True, eq=False)
class Joined:
    """Relations of a convolution that are summed together. Kinds of convolutions that share one go together.

    Attributes:
        read: What relations must have in common, of (convolution, rows of its sources, rows of its targets), and what
            belongs to edges; None where a relation is summed by itself.
        convolve: Results of relations that have it in common; None where each is faster by itself.
        finish: Makes of each of them what the convolution returns.
        add_up: Results of relations, added up by group, where these go together in one step.
        takes_attributes: Whether edges have rows.
    """

    read: Callable[..., Hashable]
    convolve: Callable[[Sequence[Relation]], list[Tensor] | None]
    finish: Callable[[Any, Tensor], Tensor] | None = None
    add_up: Callable[[Sequence[Relation], list[list[int]]], list[Tensor]] | None = None
    takes_attributes: bool = False

    def __deepcopy__(self, memo: Any) -> Joined:
        return self


def read_steps(kind: Any) -> tuple[Any, ...]:
    """What a class does with messages."""
    return kind.message, kind.aggregate, kind.update, kind.edge_update, kind.message_and_aggregate


def find_nothing(module: Any) -> None:
    """Leave no option to PyG."""


@dataclass(frozen=True, eq=False)
class ConvSpec:
    """A convolution of PyG's that our operators serve.

    Attributes:
        kind: PyG's class.
        forward: Replaces `forward` of an instance.
        propagate: Replaces `propagate` of an instance; `dispatch.propagate` serves what adds up rows of nodes.
        parts: Replace methods of their names, which PyG's `forward` calls on the way.
        message: Rows and weights of (convolution, rows of sources, edges, arguments of `propagate`), for
            `dispatch.propagate`.
        sum: Results of (convolution, rows of sources, edges, number of targets, arguments of `propagate`), for
            convolutions that add up rows of edges; None where PyG must find them.
        find_left: Why options of a convolution leave it to PyG, beside those of all; None where they do not.
        joined: Its form over relations that are summed together.
        sees_neighbors_only: Whether a node's result depends on nothing but its in-neighbors and the edges between.
        steps: What PyG's class does with messages: programs may put others in their place.
    """

    kind: Any
    forward: Callable[..., Any] | None = None
    propagate: Callable[..., Any] | None = None
    parts: tuple[Callable[..., Any], ...] = ()
    message: Callable[[Any, Tensor, SortedEdges, dict[str, Any]], Message] | None = None
    sum: Callable[[Any, Tensor, SortedEdges, int, dict[str, Any]], Tensor | None] | None = None
    find_left: Callable[[Any], str | None] = find_nothing
    joined: Joined | None = None
    sees_neighbors_only: bool = False
    steps: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", read_steps(self.kind))

    def __deepcopy__(self, memo: Any) -> ConvSpec:
        return self

    def is_own(self, kind: type) -> bool:
        """Whether a class, or one that is made of it, does with messages what PyG's class does."""
        return read_steps(kind) == self.steps
