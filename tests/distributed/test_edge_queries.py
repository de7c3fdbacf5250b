"""Pairs that are edges are told by those who hold them; strict negatives are those of one machine."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.distributed.edge_queries import EdgesOfAll, PairExchange
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.partitioning.manifest import Book
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.sampling.negative_links import EdgeSet, Nodes, draw_negatives
from tests.distributed.threads import run_threads
from tests.reference.negative import list_avoided

CPU = torch.device("cpu")
RELATION = ("user", "rates", "movie")
SIZES = (7, 5)


class PartInMemory:
    """What an exchange of pairs knows of a part: its owners and its edges."""

    def __init__(self, part, num_parts, ends, direction):
        self.part, self.num_parts, self.manifest = part, num_parts, SimpleNamespace(direction=direction)
        self.books = {kind: Book(size, num_parts) for kind, size in zip(RELATION[::2], SIZES, strict=True)}
        end = 1 if direction == "in" else 0
        self._own = ends[:, self.owners(RELATION[2 * end], ends[end]) == part]

    def owners(self, kind, ids):
        return self.books[kind].owners(ids)

    def edge_set(self, edge_type):
        return EdgeSet(*self._own, *SIZES)


def list_values(drawn):
    """Negative links as lists, None where they have no times, and the number of edges among them."""
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in drawn]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=40), st.sampled_from(["in", "out"]),
       st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 2**64 - 1))  # fmt: skip
def test_negatives_are_those_of_one_machine(edges, direction, num_parts, timed, triplet, key):
    ends = torch.tensor(edges, dtype=torch.int64).view(-1, 2).t()
    parts = [PartInMemory(part, num_parts, ends, direction) for part in range(num_parts)]
    times = [torch.arange(size) if timed else None for size in SIZES]
    users, movies = (Nodes(size, None, time, CPU) for size, time in zip(SIZES, times, strict=True))

    def draw(avoided, rank):
        # Others want other numbers of them, or none.
        count = 9 * rank
        return draw_negatives(count, key, movies, sources=torch.arange(count) % SIZES[0] if triplet else users,
                              until=torch.arange(count) % 6 if timed else None, edges=avoided, device=CPU)  # fmt: skip

    def avoid(edges, rank):
        # Each has links of its own, the last one none.
        links = torch.arange(2 * (num_parts - 1 - rank)).view(2, -1)
        return edges.with_links(links[0], links[1] % SIZES[1], is_one_type=False)

    got = run_threads(lambda comm: draw(avoid(EdgesOfAll(PairExchange(parts[comm.rank], comm), RELATION), comm.rank),
                                        comm.rank), num_parts)  # fmt: skip

    for rank, drawn in enumerate(got):
        expected = draw(avoid(EdgeSet(*ends, *SIZES), rank), rank)
        assert list_values(drawn) == list_values(expected)


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("both", [True, False])
def test_links_are_no_negatives_turned_round_where_edges_of_all_parts_go_both_ways(tmp_path, direction, both):
    edges = torch.tensor([[0, 1, 2, 2, 4], [1, 2, 3, 3, 4]])
    edges = torch.cat([edges, edges.flip(0)], 1) if both else edges
    partition_graph(tmp_path / "p", edges, 2, num_nodes=6, direction=direction)
    parts = [GraphPart(tmp_path / "p", part, device=CPU) for part in range(2)]
    every = torch.cartesian_prod(torch.arange(6), torch.arange(6)).t()

    def ask(comm):
        # The other process has no links that are held out.
        links = torch.tensor([[5, 0], [0, 2]]) if comm.rank else torch.tensor([[0], [1]])
        avoided = EdgesOfAll(PairExchange(parts[comm.rank], comm), parts[0].manifest.edges[0].name)
        for _ in range(2):
            joined = avoided.with_links(*links, is_one_type=True)
        return links, comm.num_exchanges, joined._contains(*every)

    for links, num_exchanges, is_avoided in run_threads(ask, 2):
        pairs, held_out = ([tuple(pair) for pair in ends.t().tolist()] for ends in (edges, links))
        assert set(map(tuple, every[:, is_avoided].t().tolist())) == list_avoided(pairs, held_out, True)
        assert num_exchanges == 1


@pytest.mark.parametrize("direction", ["in", "out"])
def test_pairs_are_sent_to_their_owners_only(tmp_path, direction):
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    partition_graph(tmp_path / "p", edges, 2, num_nodes=4, method="range", direction=direction)
    parts = [GraphPart(tmp_path / "p", part, device=CPU) for part in range(2)]

    def ask(comm):
        pairs = PairExchange(parts[comm.rank], comm)
        asked = (torch.tensor([0, 0, 2, 3]), torch.tensor([1, 2, 3, 2])) if comm.rank else (torch.tensor([1]),) * 2
        found = pairs.contains(parts[0].manifest.edges[0].name, *asked)
        return found.tolist(), comm.num_exchanges, comm.sent["pairs"]

    first, second = run_threads(ask, 2)

    # Part 0 has nodes 0 and 1: one source or target of the four pairs, or two.
    assert first == ([False], 2, 0)
    assert second == ([True, False, True, False], 2, 16 if direction == "in" else 32)
