"""Sampled edges in both directions, as PyG's `subgraph_type="bidirectional"` has them."""

from __future__ import annotations

from tests.reference.general import Output

Edges = list[tuple[int, int, int]]


def merge(forth: Edges, back: Edges) -> Edges:
    """Distinct (source, target) by target, then source, each with the first edge id that it has."""
    first = {}
    for source, target, edge in forth + [(target, source, edge) for source, target, edge in back]:
        first.setdefault((target, source), edge)
    return [(source, target, first[target, source]) for target, source in sorted(first)]


def find_reverse(edge_type: tuple, edge_types: list[tuple]) -> tuple | None:
    """The relation that holds the reverse edges: `rev_` and its name; itself; or the only one that leads back."""
    source, name, target = edge_type
    named = (target, f"rev_{name}", source)
    back = [kind for kind in edge_types if (kind[0], kind[2]) == (target, source)]
    if named in edge_types:
        return named
    if source == target:
        return edge_type
    return back[0] if len(back) == 1 else None


def make_bidirectional(out: Output, keep_ids: bool) -> Output:
    """Every edge both ways, once; ids are kept for a graph without types, and otherwise dropped for merged edges."""
    before = {kind: list(zip(out.row[kind], out.col[kind], out.edge[kind], strict=True)) for kind in out.row}
    after = dict(before)
    merged = set()
    for kind in before:
        reverse = find_reverse(kind, list(before))
        if kind[1].startswith("rev_") or reverse is None:
            continue
        after[kind] = merge(before[kind], before[reverse])
        merged.add(kind)
        if reverse[1] == f"rev_{kind[1]}":
            after[reverse] = [(target, source, edge) for source, target, edge in after[kind]]
            merged.add(reverse)
    out.row = {kind: [source for source, _, _ in edges] for kind, edges in after.items()}
    out.col = {kind: [target for _, target, _ in edges] for kind, edges in after.items()}
    out.edge = {kind: None if kind in merged and not keep_ids else [edge for _, _, edge in edges]
                for kind, edges in after.items()}  # fmt: skip
    out.num_sampled_nodes = out.num_sampled_edges = None
    return out
