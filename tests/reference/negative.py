"""Negative links drawn one by one in Python integers."""

from __future__ import annotations

from itertools import accumulate

from tests.reference.draw import draw, draw_below

NEGATIVES, TRIES = 2**62 + 2, 32


def draw_node(key: int, number: int, slot: int, num_nodes: int, time: list[int] | None, until: int | None,
              weight: list[float] | None) -> int:  # fmt: skip
    """A node among those that exist `until` then: uniform, or by weight; the earliest when none does."""
    order = sorted(range(num_nodes), key=lambda node: 0 if time is None else time[node])
    allowed = order if time is None else [node for node in order if time[node] <= until]
    if not allowed:
        return order[0]
    if weight is None:
        return allowed[draw_below(key, number, slot, len(allowed))]
    sums = list(accumulate(weight[node] for node in allowed))
    share = (draw(key, number, slot) >> 12) * 2.0**-52
    return next((node for node, total in zip(allowed, sums, strict=True) if total > share * sums[-1]), allowed[0])


def list_avoided(edges: list[tuple[int, int]], links: list[tuple[int, int]], is_one_type: bool) -> set[tuple[int, int]]:
    """Edges and links; also reversed ones if ends are of one type and there are edges, all both ways."""
    known = set(edges)
    is_turned = is_one_type and any(s != t for s, t in known) and all((t, s) in known for s, t in known)
    return known | set(links) | ({(t, s) for s, t in links} if is_turned else set())


def draw_negatives(count: int, key: int, num_sources: int, num_targets: int, *, sources: list[int] | None = None,
                   time: tuple | None = None, until: list[int] | None = None, weight: tuple = (None, None),
                   edges: set | None = None) -> list[tuple[int, int]]:  # fmt: skip
    """(source, target) of each negative; with `edges` the first of `TRIES` draws that is no edge, otherwise the
    last.
    """
    keys = [draw(key, NEGATIVES, end) for end in (0, 1)]
    links = []
    for number in range(count):
        for slot in range(1 if edges is None else TRIES):
            then = None if until is None else until[number]
            times = (None, None) if time is None else time
            source = sources[number] if sources is not None else draw_node(keys[0], number, slot, num_sources, times[0],
                                                                            then, weight[0])  # fmt: skip
            target = draw_node(keys[1], number, slot, num_targets, times[1], then, weight[1])
            if edges is None or (source, target) not in edges:
                break
        links.append((source, target))
    return links
