"""Negative links: random nodes, nodes allowed by time, and pairs that are no edge; functions of a key.

`RandomNegativeSampler` returns pairs of nodes that are no edge, after GraphLearn-for-PyTorch's class.

Negative edges of a whole graph, or of each graph of a batch, are as PyG's `negative_sampling` defines them. Pairs of
nodes are numbered, graph after graph, without self loops if both ends are of one node type. Candidates are drawn on the
device of the edges, sorted, and compared with the sorted numbers of the edges. Random numbers come from torch's
generator of this device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.pyg_edges import EdgeList, read_edges
from pyg_direct.kernels.batch_counters import NEGATIVE_DRAW
from pyg_direct.object_text import one_line, show_count, show_options
from pyg_direct.ops.argument_checks import check_count, check_ids
from pyg_direct.ops.sampling.draw_random import derive_key, draw_below, draw_bits, draw_until
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.random_key import call_key, check_seed
from pyg_direct.typing import Device

# How often a strict negative is drawn anew before it is kept as it is.
TRIES = 32
# Products of a draw's words with more nodes would not fit 63 bits.
MAX_NODES = 2**31
# Key of the bits that edges are weighed with, and how many are at once.
_BALANCE, _EDGES_AT_ONCE = 0x5851F42D4C957F2D, 1 << 24
# Of the largest chance: so many nodes have a sum below 2**1024.
_EXPONENT = 990


class Drawn(NamedTuple):
    """Negative links.

    Attributes:
        sources, targets: int64 `[n]`.
        is_timely: Whether both ends exist already, bool `[n]`; None without times.
        num_edges: How many are pairs to avoid, after all tries; 0 unless strict.
    """

    sources: Tensor
    targets: Tensor
    is_timely: Tensor | None
    num_edges: int

    @property
    def num_untimely(self) -> int:
        """How many have an end that did not exist yet, as no allowed node did. Waits for a GPU."""
        return 0 if self.is_timely is None else int((~self.is_timely).sum())


class Nodes:
    """The nodes of one type that an end of a negative link is drawn from.

    Args:
        weight: A chance for each, float `[N]`; None for equal ones.
        time: When each begins to exist, integers `[N]`; None for always.

    Attributes:
        tables: Number of nodes, times, nodes in the order of times, and sums of weights, as kernels read them; empty if
            unused.
    """

    def __init__(self, num_nodes: int, weight: Tensor | None, time: Tensor | None, device: torch.device) -> None:
        if not 0 < num_nodes < MAX_NODES:
            raise ArgumentError(f"neg_sampling needs 1 to {MAX_NODES - 1} nodes to draw from, got {num_nodes}")
        self._count, self._order, self._times, self._running = num_nodes, None, None, None
        if time is not None:
            times, order = time.cpu().long().sort(stable=True)
            self._times, self._order = times.to(device), order.to(device)
        if weight is not None:
            chances = check_weight(weight, num_nodes)
            if time is not None:
                chances = chances[order]
            # Summed on the CPU, as sums on a GPU differ in their last bits.
            self._running = torch.cat([chances.new_zeros(1), chances.cumsum(0)]).to(device)
        none = torch.empty(0, dtype=torch.int64, device=device)
        times, order = none if self._times is None else self._times, none if self._order is None else self._order
        self.tables = num_nodes, times, order, none.double() if self._running is None else self._running

    def draw(self, numbers: Tensor, key: int, slot: int, until: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Draw (a node for each draw, whether time and chances allow it, None if they always do): int64 and bool `[n]`.

        Args:
            numbers: Numbers that tell the draws apart, int64 `[n]`.
            key: Unsigned 64-bit key.
            until: The last time of a node for each draw, int64 `[n]`; used if nodes have times.
        """
        if self._times is None and self._running is None:
            return draw_below(numbers, self._count, key=key, slot=slot), None
        if self._running is None:
            assert self._times is not None and self._order is not None and until is not None
            return draw_until(numbers, self._times, self._order, until, key=key, slot=slot)
        bits = draw_bits(numbers, key=key, slot=slot)
        bound = torch.full_like(bits, self._count)
        if self._times is not None:
            assert until is not None
            bound = torch.searchsorted(self._times, until.contiguous(), right=True)
        # If no node exists yet, the earliest one.
        is_allowed, bound = bound > 0, bound.clamp(min=1)
        total = self._running[bound]
        is_allowed &= total > 0
        share = ((bits >> 12) & (2**52 - 1)).double() * 2.0**-52
        place = torch.searchsorted(self._running[1:], share * total, right=True)
        place = torch.where(total > 0, place, 0).minimum(bound - 1)
        return (place if self._order is None else self._order[place]), is_allowed


class AskedNodes(Nodes):
    """Nodes that a program draws: by the `sample` of its own kind of PyG's `NegativeSampling`.

    Args:
        time: When each begins to exist, integers `[N]`; None for always.
        sample: Draws so many of so many nodes: (count, number of nodes) -> ids.
    """

    def __init__(self, num_nodes: int, time: Tensor | None, device: torch.device, sample: Callable[[int, int], Tensor]
                 ) -> None:  # fmt: skip
        super().__init__(num_nodes, None, None, device)
        self._sample, self._device, self._since = sample, device, None if time is None else time.to(device)

    def draw(self, numbers: Tensor, key: int, slot: int, until: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As `Nodes.draw`; draws of the program depend on no key.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: it gives other nodes, or not as many as it was asked for.
        """
        nodes = self._ask(numbers.numel())
        if self._since is None or until is None:
            return nodes, None
        for _ in range(TRIES):
            late = self._since[nodes] > until
            if not bool(late.any()):
                break
            nodes[late] = self._ask(int(late.sum()))
        return nodes, self._since[nodes] <= until

    def _ask(self, count: int) -> Tensor:
        nodes = check_ids("neg_sampling.sample", self._sample(count, self._count).cpu(), self._count).long()
        if nodes.numel() != count:
            raise ArgumentError(f"neg_sampling.sample must give {count} nodes, got {nodes.numel()}")
        return nodes.to(self._device, copy=True)


class Pairs(NamedTuple):
    """Pairs that may become negative links.

    Attributes:
        sources, targets: int64 `[n]`.
        is_timely: Whether both ends exist already, bool `[n]`; None without times.
    """

    sources: Tensor
    targets: Tensor
    is_timely: Tensor | None

    def replace(self, at: Tensor, others: Pairs) -> None:
        """Put others in the places `at`, int64."""
        self.sources[at], self.targets[at] = others.sources, others.targets
        if self.is_timely is not None and others.is_timely is not None:
            self.is_timely[at] = others.is_timely


# (which of the negatives, number of the try) -> their pairs.
Draw: TypeAlias = Callable[[Tensor | slice, int], Pairs]


class Edges(Protocol):
    """Edges, and other links, that negative links must not be.

    Attributes:
        parts: Keys that kernels of this process compare, each tensor ascending; at most two in a plan on a GPU.
    """

    @property
    def parts(self) -> Sequence[Tensor]:
        """See above."""

    def avoid(self, draw: Draw, pairs: Pairs, tries: int) -> int:
        """Draw pairs that are edges anew, until the try `tries` - 1, in place; how many still are."""

    def with_links(self, sources: Tensor, targets: Tensor, *, is_one_type: bool) -> Edges:
        """Return the edges and these pairs of ids, on the device of the edges; if all edges go both ways, these
        pairs turned round too.

        Args:
            sources, targets: int64 `[n]`.
            is_one_type: Whether both ends are nodes of one type, so that a pair can be turned round.
        """


class Balance(NamedTuple):
    """Sums that show whether edges go both ways. If each node has its edges in one part of a graph, the parts add up.

    Attributes:
        num_edges: Number of distinct edges between two nodes.
        difference: Sum of 64 random bits of each, less the bits of each turned round, as a signed number of 64 bits. If
            all go both ways it is 0; otherwise it is 0 once in 2**64 times.
    """

    num_edges: int
    difference: int

    @classmethod
    def add(cls, parts: Iterable[tuple[int, int]]) -> Balance:
        """Add up the sums of parts."""
        numbers, differences = zip(*parts, strict=True)
        return cls(sum(numbers), (sum(differences) + 2**63) % 2**64 - 2**63)

    @property
    def is_even(self) -> bool:
        """Report whether there are edges, and each is there in both directions."""
        return self.num_edges > 0 and self.difference == 0


class EdgeSet:
    """The edges of a relation, to ask for a pair.

    Args:
        sources, targets: Ids of the ends, `[E]`.
        num_sources, num_targets: Nodes at either end.

    Attributes:
        parts: Their keys (`join`), each tensor sorted for itself.
        num_targets: Nodes at the second end.
    """

    def __init__(self, sources: Tensor, targets: Tensor, num_sources: int, num_targets: int) -> None:
        if num_sources * num_targets >= 2**63:
            raise ArgumentError(f"strict negatives need less than 2**63 pairs, got {num_sources} x {num_targets} nodes")
        self.num_targets = num_targets
        self.parts = [self.join(sources.long(), targets.long()).sort().values]

    def with_parts(self, parts: Sequence[Tensor]) -> EdgeSet:
        """Make the edges of the same relation that have these keys."""
        other = copy.copy(self)
        other.parts = list(parts)
        return other

    def with_links(self, sources: Tensor, targets: Tensor, *, is_one_type: bool) -> EdgeSet:
        """See `Edges`."""
        # Links of most loaders are edges, and take no memory; turned round they are edges too if all go both ways.
        is_new = ~self.contains(sources, targets)
        if not bool(is_new.any()):
            return self
        sources, targets = sources[is_new], targets[is_new]
        keys = [self.join(sources, targets)]
        if is_one_type and self.weigh().is_even:
            keys.append(self.join(targets, sources))
        return self.with_parts([*self.parts, torch.cat(keys).sort().values])

    def weigh(self) -> Balance:
        """Weigh edges between nodes of one type against these turned round."""
        return Balance.add(self._weigh_few(few) for part in self.parts for few in _split(part))

    def _weigh_few(self, keys: Tensor) -> Balance:
        sources, targets = keys // self.num_targets, keys % self.num_targets
        bits = draw_bits(keys, key=_BALANCE) - draw_bits(self.join(targets, sources), key=_BALANCE)
        return Balance(int((sources != targets).sum()), int(bits.sum()))

    def join(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Pairs as one number each, int64 `[n]`."""
        return sources * self.num_targets + targets

    def contains(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Test for each pair whether it is an edge, bool `[n]`."""
        return self.holds(self.join(sources, targets))

    def holds(self, keys: Tensor) -> Tensor:
        """Test for each pair, as one number, whether it is an edge, bool `[n]`."""
        found = torch.zeros_like(keys, dtype=torch.bool)
        for part in self.parts:
            if part.numel():
                found |= part[torch.searchsorted(part, keys).clamp(max=part.numel() - 1)] == keys
        return found

    def avoid(self, draw: Draw, pairs: Pairs, tries: int) -> int:
        """See `Edges`."""
        wrong = self.contains(pairs.sources, pairs.targets).nonzero().view(-1)
        for slot in range(1, tries):
            if not wrong.numel():
                break
            pairs.replace(wrong, draw(wrong, slot))
            wrong = wrong[self.contains(pairs.sources[wrong], pairs.targets[wrong])]
        return wrong.numel()


def _split(keys: Tensor) -> Iterator[Tensor]:
    """Distinct ones of sorted keys, in pieces that take little memory; one at least."""
    for start in range(0, max(keys.numel(), 1), _EDGES_AT_ONCE):
        piece = keys[start : start + _EDGES_AT_ONCE]
        is_first = torch.ones_like(piece, dtype=torch.bool)
        is_first[1:] = piece[1:] != piece[:-1]
        if start:
            is_first[:1] = piece[:1] != keys[start - 1]
        yield piece[is_first]


def draw_negatives(count: int, key: int, targets: Nodes, *, sources: Nodes | Tensor, until: Tensor | None,
                   edges: Edges | None, device: torch.device, tries: int = TRIES) -> Drawn:  # fmt: skip
    """Negative links, number after number, drawn under `key`.

    Args:
        key: Unsigned 64-bit key of the batch.
        sources: Nodes that sources are drawn from, or the sources, int64 `[count]`.
        until: The last time of a node for each link, int64 `[count]`; None without times.
        edges: Pairs to avoid, by drawing up to `tries` times; None to avoid none.
        tries: See `edges`.
    """
    numbers = torch.arange(count, device=device)
    own_keys = [derive_key(key, NEGATIVE_DRAW, end) for end in (0, 1)]

    def draw(at: Tensor | slice, slot: int) -> Pairs:
        chosen, times = numbers[at], None if until is None else until[at]
        if isinstance(sources, Nodes):
            source, is_timely = sources.draw(chosen, own_keys[0], slot, times)
        else:
            source, is_timely = sources[at], None
        target, is_target_timely = targets.draw(chosen, own_keys[1], slot, times)
        if until is None:
            return Pairs(source, target, None)
        both = [timely for timely in (is_timely, is_target_timely) if timely is not None]
        return Pairs(source, target, both[0] & both[-1] if both else torch.ones_like(chosen, dtype=torch.bool))

    pairs = draw(slice(None), 0)
    num_edges = 0 if edges is None else edges.avoid(draw, pairs, tries)
    return Drawn(pairs.sources, pairs.targets, pairs.is_timely, num_edges)


def check_weight(weight: Tensor, num_nodes: int) -> Tensor:
    """Chances as float64 `[N]` on the CPU, in proportion to the weights."""
    if not isinstance(weight, Tensor):
        raise ArgumentTypeError(f"neg_sampling must have weights in a tensor, got {type(weight).__name__}")
    if weight.shape != (num_nodes,):
        raise ArgumentError(f"neg_sampling must have weights of shape ({num_nodes},), got {tuple(weight.shape)}")
    chances = weight.detach().cpu().double()
    wrong = ~((chances >= 0) & (chances < float("inf")))
    if bool(wrong.any()):
        raise ArgumentError(f"neg_sampling must have finite weights of at least 0, got {float(chances[wrong][0])}")
    if not bool((chances > 0).any()):
        raise ArgumentError("neg_sampling must have a weight above 0, got none")
    # Sums must neither overflow nor be too small for fractions; a power of two changes no draw.
    values = chances.numpy()
    scaled = np.ldexp(values, _EXPONENT - int(np.frexp(values.max())[1]))
    # A weight above 0 stays one.
    return torch.from_numpy(np.where(values > 0, np.maximum(scaled, np.nextafter(0.0, 1.0)), 0.0))


_MODES = ("CPU", "ZERO_COPY", "CUDA")


class RandomNegativeSampler:
    """Sampler of pairs of nodes that are not edges; the n-th call under one seed is equal on every device.

    Args:
        graph: Edges `[2, E]`, sources first, or any other input of `CSRTopo`, or a `CSRTopo`.
        mode: GraphLearn's `CPU`, `ZERO_COPY` or `CUDA`; None leaves it to `device`.
        edge_dir: Meaning of the rows of a `CSRTopo`: `out` for sources, `in` for targets; None for its own direction,
            which is `out` if it was made of offsets. Without effect on edges.
        num_nodes: Number of nodes, or (of sources, of targets) if they are of two types; None for one more than the
            highest id.
        device: The device that draws; None is the current GPU if there is one, otherwise the CPU.
        seed: Seed of all draws; with None each call draws one number from torch's generator, and follows from it.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.

    Example:
        >>> ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> RandomNegativeSampler(ring, num_nodes=4, seed=0, device="cpu").sample(3).tolist()
        [[1, 0, 2], [1, 3, 0]]
    """

    def __init__(self, graph: Any, mode: str | None = None, edge_dir: str | None = None, *,
                 num_nodes: int | tuple[int, int] | None = None, device: Device = None,
                 seed: int | None = None) -> None:  # fmt: skip
        if mode is not None and mode not in _MODES:
            raise ArgumentError(f"mode must be one of {', '.join(_MODES)} or None, got {mode!r}")
        if edge_dir not in ("in", "out", None):
            raise ArgumentError(f"edge_dir must be 'in', 'out' or None, got {edge_dir!r}")
        if mode is not None and device is None:
            device = "cpu" if mode == "CPU" else "cuda"
        self.device = resolve_device(device)
        if mode is not None and (mode == "CPU") != (self.device.type == "cpu"):
            raise ArgumentError(f"device must be one that mode={mode!r} draws on, or None, got {str(self.device)!r}")
        self.seed, self._num_calls = check_seed(seed), 0
        sources, targets, known = _read_pairs(graph, edge_dir)
        if num_nodes is None:
            num_nodes = known
        if num_nodes is None:
            num_nodes = 1 + max((int(ends.max()) for ends in (sources, targets) if ends.numel()), default=-1)
        sizes = num_nodes if isinstance(num_nodes, tuple) else (num_nodes, num_nodes)
        are_sizes = all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < MAX_NODES for size in sizes)
        if len(sizes) != 2 or not are_sizes:
            raise ArgumentError(f"num_nodes must be an integer in [1, 2**31), or one for either end, got {num_nodes!r}")
        for ends, size in ((sources, sizes[0]), (targets, sizes[1])):
            if ends.numel() and int(ends.max()) >= size:
                raise ArgumentError(f"num_nodes must be above all ids, got {num_nodes} and id {int(ends.max())}")
        self._sources, self._targets = (Nodes(size, None, None, self.device) for size in sizes)
        self._edges = EdgeSet(sources.to(self.device), targets.to(self.device), *sizes)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(sum(part.numel() for part in self._edges.parts), "edge")
        yield from show_options(seed=self.seed)
        yield str(self.device)

    def sample(self, req_num: int, trials_num: int = 5, padding: bool = False) -> Tensor:
        """Pairs that are no edge, int64 `[2, n]` on `device`, sources first; each call draws anew.

        Args:
            req_num: Pairs wanted.
            trials_num: How often a pair that is an edge is drawn anew.
            padding: Keep pairs that are still edges, so that n is `req_num`; otherwise they are left out.

        Raises:
            ArgumentError: `req_num` is below 0 or `trials_num` below 1, or one is no integer.
        """
        check_count("req_num", req_num, 0)
        check_count("trials_num", trials_num)
        key = call_key(self.seed, self._num_calls)
        self._num_calls += 1
        drawn = draw_negatives(req_num, key, self._targets, sources=self._sources, until=None, edges=self._edges,
                               device=self.device, tries=trials_num)  # fmt: skip
        pairs = torch.stack([drawn.sources, drawn.targets])
        if drawn.num_edges and not padding:
            pairs = pairs[:, ~self._edges.contains(*pairs)]
        return pairs


def _read_pairs(graph: Any, edge_dir: str | None) -> tuple[Tensor, Tensor, int | None]:
    """Return (sources, targets, number of nodes if it is known)."""
    if not isinstance(graph, CSRTopo):
        edges = read_edges(graph, "graph")
        if isinstance(edges, EdgeList):
            return edges.edge_index[0], edges.edge_index[1], edges.num_nodes
        # Rows of sparse containers are targets, as in `adj_t`.
        graph, edge_dir = CSRTopo(indptr=edges.indptr, indices=edges.indices), "in"
    elif edge_dir is not None and graph.listed not in (None, edge_dir):
        raise ArgumentError(f"edge_dir must be what the rows of graph are, {graph.listed!r}, got {edge_dir!r}")
    rows = torch.arange(graph.node_count, device=graph.indptr.device).repeat_interleave(graph.degree)
    columns = graph.indices.to(rows.device)
    is_in = (edge_dir or graph.listed) == "in"
    return (columns, rows, graph.node_count) if is_in else (rows, columns, graph.node_count)


Counts = np.ndarray[Any, np.dtype[np.int64]]
# Graphs with fewer pairs for each candidate list all pairs, as draws would repeat too many of them.
_LIST_BELOW = 8
# Candidates for each pair that is not found yet, and some more: a second round is rare.
_SPARE, _EXCESS = 12, 1.25
_ANY_NUMBER = 2**63 - 1


def sample_negative_edges(edge_index: Tensor, num_nodes: int | tuple[int, int] | None = None,
                          num_neg_samples: float | None = None, method: str = "sparse",
                          force_undirected: bool = False) -> Tensor:  # fmt: skip
    """Draw distinct pairs of nodes that are no edges, with the arguments of PyG's `negative_sampling`.

    The result has as many pairs as are requested, or all pairs that are no edges if there are fewer. Each set of so
    many pairs has the same probability.

    Args:
        edge_index: Edges, `[2, E]`.
        num_nodes: Number of nodes, or (of sources, of targets); None for one more than the highest id.
        num_neg_samples: Number of pairs, or as a float their number for each edge; None for one for each edge.
        method: `sparse` or `dense`; without effect.
        force_undirected: Return each pair in both directions, and half as many pairs.

    Returns:
        int64 `[2, n]` on the device of the edges.
    """
    assert method in ("sparse", "dense")
    edge_index = edge_index.detach().as_subclass(Tensor)
    is_bipartite = num_nodes is not None and not isinstance(num_nodes, int)
    if num_nodes is None:
        num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
    size: Any = num_nodes if is_bipartite else (num_nodes, num_nodes)
    graphs = _Graphs([np.array([int(end)]) for end in size], is_bipartite, force_undirected, edge_index.device)
    return graphs.sample(edge_index, None, np.array([edge_index.shape[1]]), num_neg_samples)


def sample_batched_negative_edges(edge_index: Tensor, batch: Tensor | tuple[Tensor, Tensor],
                                  num_neg_samples: float | None = None, method: str = "sparse",
                                  force_undirected: bool = False) -> Tensor:  # fmt: skip
    """Draw negative edges of each graph of a batch, with the arguments of PyG's `batched_negative_sampling`.

    Args:
        edge_index: Edges, `[2, E]`.
        batch: Graph of each node, int64 `[N]`, ascending; or (of sources, of targets).
        num_neg_samples: Number of pairs of each graph; see `sample_negative_edges`.
        method: `sparse` or `dense`; without effect.
        force_undirected: Return each pair in both directions, and half as many pairs.

    Returns:
        int64 `[2, n]`, graph after graph. As in PyG, graphs after the last one with edges have none.
    """
    assert method in ("sparse", "dense")
    edge_index = edge_index.detach().as_subclass(Tensor)
    is_bipartite = not isinstance(batch, Tensor)
    ends = tuple(batch) if is_bipartite else (batch, batch)
    graph = ends[0][edge_index[0]]
    num_edges = _count(graph)
    sizes = [_count(end)[: len(num_edges)] for end in ends]
    graphs = _Graphs(sizes, is_bipartite, force_undirected, edge_index.device)
    return graphs.sample(edge_index, graph, num_edges, num_neg_samples)


def _count(graph: Tensor, num_graphs: int = 0) -> Counts:
    """Count the entries of each graph, on the host."""
    counts: Counts = torch.bincount(graph, minlength=num_graphs).cpu().numpy()
    return counts


class _Graphs:
    """Numbered pairs of nodes of several graphs.

    Args:
        sizes: Number of sources and of targets in each graph, int64 `[G]`.
        is_bipartite: True if the ends are of two node types, so that no pair is a self loop.
        force_undirected: True if a pair stands for both directions; without effect between two types.
    """

    def __init__(self, sizes: list[Counts], is_bipartite: bool, force_undirected: bool, device: torch.device) -> None:
        self._is_bipartite, self._is_undirected = is_bipartite, force_undirected and not is_bipartite
        self._device = device
        sources, targets = sizes
        self._pairs = sources * (targets if is_bipartite else sources - 1)
        if self._is_undirected:
            self._pairs = self._pairs // 2
        self._begins = np.cumsum(self._pairs) - self._pairs
        first = [np.cumsum(size) - size for size in sizes]
        self._columns = np.stack([*first, targets, self._pairs, self._begins])
        self._table = torch.from_numpy(self._columns).to(device) if len(sources) > 1 else None

    def sample(self, edge_index: Tensor, graph: Tensor | None, num_edges: Counts, num_neg_samples: float | None
               ) -> Tensor:  # fmt: skip
        """Draw negative edges; `graph` is the graph of each edge, `num_edges` their number in each graph."""
        if not len(num_edges):
            return edge_index.new_empty((2, 0))
        total = int(self._pairs.sum())
        numbers, counted = self._number(edge_index, graph)
        # Edges that are no pairs stand behind all pairs.
        known = numbers.clamp_(max=total).sort().values
        is_first = known < total
        is_first[1:] &= known[1:] != known[:-1]
        num_known, num_counted = self._count_of(known, is_first), self._count_of(numbers, counted, graph)
        requested = _read_requested(num_neg_samples, num_edges)
        if self._is_undirected:
            requested = requested // 2
        # As in PyG, parallel edges count as often as they are there, and then leave no negatives.
        requested = np.where(num_counted < self._pairs, np.minimum(requested, self._pairs - num_known), 0)
        found = self._draw(known, requested, self._pairs - num_known)
        return self._read(found)

    def _look_up(self, graph: Tensor | None) -> Any:
        """Return (first source, first target, targets, pairs, first pair) of graphs; numbers if there is only one."""
        return self._columns[:, 0].tolist() if self._table is None else self._table[:, graph]

    def _find_graph(self, numbers: Tensor) -> Tensor | None:
        """Return the graph of each pair; None if there is only one."""
        if self._table is None:
            return None
        # Graphs without pairs begin where the next graph does.
        return torch.searchsorted(self._table[4], numbers, right=True) - 1

    def _count_of(self, numbers: Tensor, is_counted: Tensor, graph: Tensor | None = None) -> Counts:
        """Count pairs of each graph."""
        if self._table is None:
            return np.array([int(is_counted.sum())])
        graph = self._find_graph(numbers) if graph is None else graph
        assert graph is not None, "there are several graphs"
        return _count(graph[is_counted], len(self._pairs))

    def _number(self, edge_index: Tensor, graph: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (number of each edge, very high for self loops; True for edges that PyG counts)."""
        first_source, first_target, num_targets, _, begin = self._look_up(graph)
        row, col = edge_index[0].long() - first_source, edge_index[1].long() - first_target
        if self._is_bipartite:
            return row * num_targets + col + begin, torch.ones_like(row, dtype=torch.bool)
        if self._is_undirected:
            # Pairs above the diagonal, column after column.
            low, high = torch.minimum(row, col), torch.maximum(row, col)
            numbers, counted = high * (high - 1) // 2 + low, row < col
        else:
            numbers, counted = row * (num_targets - 1) + col - (row < col).long(), row != col
        return (numbers + begin).masked_fill_(row == col, _ANY_NUMBER), counted

    def _read(self, numbers: Tensor) -> Tensor:
        """Return the ends of numbered pairs, graph after graph, `[2, n]`."""
        graph = self._find_graph(numbers)
        first_source, first_target, num_targets, _, begin = self._look_up(graph)
        number = numbers - begin
        if self._is_undirected:
            # The root in double precision may be off by one.
            col = ((1 + (8 * number.double() + 1).sqrt()) / 2).long()
            col -= (col * (col - 1) // 2 > number).long()
            col += (col * (col + 1) // 2 <= number).long()
            row = number - col * (col - 1) // 2
        else:
            width = num_targets if self._is_bipartite else num_targets - 1
            row = number // width
            col = number - row * width
            if not self._is_bipartite:
                col += (row <= col).long()
        out = torch.stack([row + first_source, col + first_target])
        if not self._is_undirected:
            return out
        both = torch.cat([out, out.flip(0)], 1)
        # Each graph has its pairs in one direction, then in the other one.
        return both if graph is None else both[:, torch.cat([graph, graph]).argsort(stable=True)]

    def _draw(self, known: Tensor, requested: Counts, available: Counts) -> Tensor:
        """Draw pairs that are not known: numbers, int64 `[requested.sum()]`, graph after graph in random order."""
        share = np.maximum(available, 1) / np.maximum(self._pairs, 1)
        wanted = np.where(requested > 0, np.ceil(_EXCESS * (requested + _SPARE) / share), 0).astype(np.int64)
        is_listed = (requested > 0) & (self._pairs <= _LIST_BELOW * wanted)
        count = np.where(is_listed, self._pairs, wanted)
        found = known.new_empty(0)
        while True:
            candidates = torch.cat([found, self._propose(count, is_listed)]).sort().values
            is_new = torch.ones_like(candidates, dtype=torch.bool)
            is_new[1:] = candidates[1:] != candidates[:-1]
            if known.numel():
                place = torch.searchsorted(known, candidates).clamp_(max=known.numel() - 1)
                is_new &= known[place] != candidates
            found = candidates[is_new]
            graph = self._find_graph(found)
            have = np.array([found.numel()]) if graph is None else _count(graph, len(requested))
            is_short = have < requested
            if not is_short.any():
                return _choose(found, graph, have, requested)
            count, is_listed = np.where(is_short, wanted, 0), np.zeros_like(is_listed)

    def _propose(self, count: Counts, is_listed: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
        """Propose so many pairs of each graph, drawn one by one; of listed graphs all pairs."""
        total = int(count.sum())
        drawn = torch.randint(_ANY_NUMBER, (0 if is_listed.all() else total,), device=self._device)
        if self._table is None:
            # The remainder prefers some pairs, by one in 2**63 / pairs.
            return torch.arange(total, device=self._device) if is_listed[0] else drawn % int(self._pairs[0])
        graph = torch.repeat_interleave(torch.from_numpy(count).to(self._device), output_size=total)
        _, _, _, pairs, begin = self._look_up(graph)
        before = np.cumsum(count) - count
        if not is_listed.any():
            return begin + drawn % pairs
        listed = torch.arange(total, device=self._device) - torch.from_numpy(before).to(self._device)[graph]
        if is_listed.all():
            return begin + listed
        return begin + torch.where(torch.from_numpy(is_listed).to(self._device)[graph], listed, drawn % pairs)


def _read_requested(num_neg_samples: float | None, num_edges: Counts) -> Counts:
    """Read how many pairs each graph is asked for."""
    if num_neg_samples is None:
        return num_edges
    if isinstance(num_neg_samples, float):
        return (num_neg_samples * num_edges).astype(np.int64)
    return np.full_like(num_edges, int(num_neg_samples))


def _choose(found: Tensor, graph: Tensor | None, have: Counts, requested: Counts) -> Tensor:
    """Choose as many pairs of each graph as are requested, at random."""
    order = torch.randperm(found.numel(), device=found.device)
    if graph is None:
        return found[order[: int(requested[0])]]
    order = order[graph[order].argsort(stable=True)]
    # The first ones of each graph.
    skipped = np.repeat(np.cumsum(have) - have - np.cumsum(requested) + requested, requested)
    place = torch.from_numpy(skipped + np.arange(len(skipped))).to(found.device)
    return found[order[place]]
