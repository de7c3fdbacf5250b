"""Relations that hold the links that a batch is sampled around, or their reverse edges, and so would give them away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.relation import LINKS, EdgeType
from pyg_direct.loader.graph import Parts
from pyg_direct.sampling.subgraph import find_partner

# Relations, and whether their edges are the links turned round.
Ways: TypeAlias = tuple[tuple[EdgeType, bool], ...]


def check_exclusion(exclude: Any, rev_edge_type: Any, parts: Parts) -> None:
    """Check the options that say which edges a batch leaves out.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """
    if not isinstance(exclude, (bool, str)) or exclude not in (False, True, "reverse"):
        raise ArgumentError(f"exclude_target_edges must be False, True or 'reverse', got {exclude!r}")
    if rev_edge_type is None:
        return
    if exclude != "reverse":
        raise ArgumentError("rev_edge_type must be None unless exclude_target_edges='reverse', got "
                            f"{rev_edge_type!r} with exclude_target_edges={exclude!r}")  # fmt: skip
    if not parts.is_hetero:
        raise ArgumentError("rev_edge_type must be None for a graph without types, whose reverse edges are the links "
                            f"turned round, got {rev_edge_type!r}")  # fmt: skip
    if not isinstance(rev_edge_type, (tuple, list)):
        raise ArgumentTypeError(f"rev_edge_type must be a relation (source, name, target), got {rev_edge_type!r}")
    if tuple(rev_edge_type) not in parts.edges:
        raise ArgumentError(f"rev_edge_type must be a relation of the graph, got {rev_edge_type!r} of "
                            f"{list(parts.edges)}")  # fmt: skip


def find_ways(parts: Parts, edge_type: EdgeType | None, *, with_reverse: bool, is_bidirectional: bool,
              rev_edge_type: Sequence[str] | None) -> Ways:  # fmt: skip
    """Find the relations that links of a relation are taken out of.

    Args:
        parts: The graph.
        edge_type: The relation of the links; None without types.
        with_reverse: Take their reverse edges out too.
        is_bidirectional: Edges stand in the batch in both directions, so that either gives a link away.
        rev_edge_type: The relation of the reverse edges; None to find it.

    Raises:
        ArgumentError: the reverse relation is not known, or does not lead back.
    """
    if not parts.is_hetero:
        return ((LINKS, False), (LINKS, True)) if with_reverse or is_bidirectional else ((LINKS, False),)
    assert edge_type is not None
    known, back = list(parts.edges), []
    if is_bidirectional:
        partner = find_partner(edge_type, known) if edge_type in known else None
        back = [kind for kind in known if kind == partner or find_partner(kind, known) == edge_type]
    if with_reverse:
        back += _find_reverse(parts, edge_type, rev_edge_type)
    ways = [(edge_type, False), *((kind, True) for kind in dict.fromkeys(back))]
    return tuple(way for way in ways if way[0] in known)


def _find_reverse(parts: Parts, edge_type: EdgeType, given: Sequence[str] | None) -> list[EdgeType]:
    """The relations that hold the reverse edges of another."""
    source, name, target = edge_type
    if given is not None:
        reverse: EdgeType = tuple(given)  # type: ignore[assignment]
        if (reverse[0], reverse[-1]) != (target, source):
            raise ArgumentError(f"rev_edge_type must lead back from {target!r} to {source!r} for links of {edge_type}, "
                                f"got {reverse}")  # fmt: skip
        return [reverse]
    for other in (f"rev_{name}", name.removeprefix("rev_")):
        if other != name and (target, other, source) in parts.edges:
            return [(target, other, source)]
    own = [edge_type] if source == target else []
    others = [kind for kind in parts.edges if (kind[0], kind[-1]) == (target, source) and kind != edge_type]
    found = {kind: parts.is_reverse(edge_type, kind) for kind in others}
    if None in found.values() or (others and not own and not any(found.values())):
        raise ArgumentError(
            "exclude_target_edges='reverse' must know the relation of the reverse edges: none is named "
            f"{(target, f'rev_{name}', source)}, and none is known to have the edges of {edge_type} turned round; pass "
            f"rev_edge_type, one of {others}, or exclude_target_edges=True to leave reverse edges in the batch"
        )
    return own + [kind for kind in others if found[kind]]
