"""Queries of edges between pairs of nodes, answered by the owners of the edges, so that negative links avoid edges."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.row_exchange import Unpacker, pack
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.sampling.negative_links import Balance, Draw, EdgeSet, Pairs


class PairExchange:
    """Queries of edges between pairs of nodes. Its calls are collective.

    Args:
        communicator: Communicator of the owners of the other parts; None to answer only.
    """

    def __init__(self, part: GraphPart, communicator: Communicator | None) -> None:
        self._part, self._communicator = part, communicator
        # An edge is held by the owner of its expanded node.
        self._held_by_target = part.manifest.direction == "in"
        self._sets: dict[EdgeType, EdgeSet] = {}
        self._balances: dict[EdgeType, Balance] = {}

    def contains(self, edge_type: EdgeType, sources: Tensor, targets: Tensor) -> Tensor:
        """Check if each pair is an edge of a relation, bool `[n]`; two exchanges.

        Args:
            sources, targets: Ids of the ends, int64 `[n]`.
        """
        held = (edge_type[2], targets) if self._held_by_target else (edge_type[0], sources)
        owners, none = self._part.owners(*held), torch.empty(0, dtype=torch.uint8, device=sources.device)
        places = [(owners == rank).nonzero().view(-1) for rank in range(self._part.num_parts)]
        messages = [pack([torch.stack([sources[at], targets[at]])]) if at.numel() else none for at in places]
        found = torch.empty(sources.shape, dtype=torch.bool, device=sources.device)
        for at, answer in zip(places, self._swap(edge_type, messages), strict=True):
            found[at] = Unpacker(answer).take(torch.bool, at.numel())
        return found

    def weigh(self, edge_type: EdgeType) -> Balance:
        """Weigh the edges of a relation between nodes of one type; the first call is an exchange."""
        if edge_type not in self._balances:
            self._balances[edge_type] = Balance.add(self._collect_balances(edge_type))
        return self._balances[edge_type]

    def weigh_own(self, edge_type: EdgeType) -> Balance:
        """Weigh the edges of this part."""
        return self.open_set(edge_type).weigh()

    def _collect_balances(self, edge_type: EdgeType) -> list[tuple[int, int]]:
        """Collect the weights of all parts."""
        assert self._communicator is not None
        message = pack([torch.tensor(self.weigh_own(edge_type), device=self._part.device)])
        found = self._communicator.exchange([message] * self._part.num_parts, "balances")
        return [tuple(Unpacker(balance).take(torch.int64, 2).tolist()) for balance in found]

    def make_set(self, edge_type: EdgeType, sources: Tensor, targets: Tensor) -> EdgeSet:
        """Make a set of pairs of nodes that a relation connects, int64 `[n]`."""
        books = self._part.books
        return EdgeSet(sources, targets, books[edge_type[0]].num_nodes, books[edge_type[2]].num_nodes)

    def _swap(self, edge_type: EdgeType, messages: list[Tensor]) -> list[Tensor]:
        """Exchange questions, answer the received ones, and return the owners' answers."""
        assert self._communicator is not None
        asked = self._communicator.exchange(messages, "pairs")
        return self._communicator.exchange([self.answer(edge_type, message) for message in asked], "edges")

    def answer(self, edge_type: EdgeType, message: Tensor) -> Tensor:
        """Return, as bytes, which of another process's pairs are edges of this part."""
        if not message.numel():
            return message
        sources, targets = Unpacker(message).take(torch.int64, 2, message.numel() // 16)
        return pack([self.open_set(edge_type).contains(sources, targets)])

    def open_set(self, edge_type: EdgeType) -> EdgeSet:
        """Open the set of the edges of this part, once."""
        if edge_type not in self._sets:
            self._sets[edge_type] = self._part.edge_set(edge_type)
        return self._sets[edge_type]


class EdgesOfAll:
    """Edges of a relation of a graph in parts; avoids the same pairs as `EdgeSet` of the whole graph.

    Attributes:
        parts: Empty: a kernel of one process cannot avoid them alone, as those of an `EdgeSet`.
    """

    def __init__(self, pairs: PairExchange, edge_type: EdgeType) -> None:
        self._pairs, self.edge_type = pairs, edge_type
        self.parts: tuple[Tensor, ...] = ()
        # Positive links that this process knows, in addition to the edges.
        self._links: EdgeSet | None = None

    def with_links(self, sources: Tensor, targets: Tensor, *, is_one_type: bool) -> EdgesOfAll:
        """Add links, see `Edges`; collective for any links."""
        other = copy.copy(self)
        if is_one_type and self._pairs.weigh(self.edge_type).is_even:
            sources, targets = torch.cat([sources, targets]), torch.cat([targets, sources])
        other._links = self._pairs.make_set(self.edge_type, sources, targets)
        return other

    def open_own(self) -> EdgeSet:
        """Open the set of the edges of this part."""
        return self._pairs.open_set(self.edge_type)

    def find_links(self) -> Tensor:
        """Return the keys of the links that this process knows, int64 `[n]`, ascending."""
        assert self._links is not None
        (keys,) = self._links.parts
        return keys

    def _contains(self, sources: Tensor, targets: Tensor) -> Tensor:
        found = self._pairs.contains(self.edge_type, sources, targets)
        return found if self._links is None else found | self._links.contains(sources, targets)

    def avoid(self, draw: Draw, pairs: Pairs, tries: int) -> int:
        """Avoid edges, see `Edges`; collective, with a number of exchanges that does not depend on the draws."""
        wrong = self._contains(pairs.sources, pairs.targets).nonzero().view(-1)
        if tries == 1:
            return wrong.numel()
        # All further tries of the few wrong pairs at once: processes need not agree when to stop.
        others = [draw(wrong, slot) for slot in range(1, tries)]
        sources, targets = (torch.stack(ends) for ends in ([o.sources for o in others], [o.targets for o in others]))
        is_edge = self._contains(sources.view(-1), targets.view(-1)).view(sources.shape)
        # The first pair that is no edge, otherwise the last.
        is_last = torch.arange(tries - 1, device=wrong.device) == tries - 2
        chosen = (~is_edge | is_last.view(-1, 1)).byte().argmax(0)
        columns = torch.arange(wrong.numel(), device=wrong.device)
        timely = [other.is_timely for other in others if other.is_timely is not None]
        is_timely = torch.stack(timely)[chosen, columns] if timely else None
        pairs.replace(wrong, Pairs(sources[chosen, columns], targets[chosen, columns], is_timely))
        return int(is_edge.all(0).sum())
