"""Seeds of a batch by type, checked, as the nodes of hop 0.

Links have ends: the pairs of nodes whose edges a batch leaves out, and links as seeds of a plan on a GPU. `list_pairs`
lists the excluded pairs, such as the links that a batch predicts. `Ends` are links that a plan on a GPU samples around.
Kernels draw their negatives (`LinkInbox`), and find the ends in the batch (`place_ends`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.graph.hetero_topo import EdgeType, HeteroTopo, PlacedHetero
from pyg_direct.kernels.sampling.link_ends import TABLE, WAY, draw_links_gpu, place_links_gpu
from pyg_direct.ops.argument_checks import are_below, check_below, check_ids, check_integers
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import grid_for, prepare_gpu, run_gpu
from pyg_direct.runtime.cuda.launch import OPEN
from pyg_direct.sampling.negative_links import TRIES, Edges, Nodes

_IDENTITY_BITS = 62
# Seeds of a batch and their times, None for the times of the seeds themselves; by type if there are types.
Request: TypeAlias = tuple[Tensor | Mapping[str, Tensor], Tensor | Mapping[str, Tensor] | None]


class Seeds(NamedTuple):
    """Seeds, batch after batch and type after type.

    Attributes:
        rows: Ids within their types, int64 `[B]`.
        trees: Number of each seed of a batch in the order given, int64 `[B]`; empty unless disjoint.
        identities: int64 `[B]`, see `kernels/sampling/worklist.py`.
        times: Time of each tree, batch after batch, int64 `[B]`, or two of each `[B, 2]`; empty on a graph without
            times.
        counts: Seeds of each type of each of G batches, int64 `[G * T]`.
        bases: Start of each of these among the identities, and the end of the last, int64 `[G * T + 1]`.
        tree_shift: Place of the tree among the bits of an identity.
        tree_bits: Bits of a tree; 0 unless disjoint.
        first_trees: First tree of each batch among the times, int64 `[G]`.
        excluded: Edges that are not picked, as the plan keeps them; None for none.
    """

    rows: Tensor
    trees: Tensor
    identities: Tensor
    times: Tensor
    counts: np.ndarray
    bases: np.ndarray
    tree_shift: int
    tree_bits: int
    first_trees: np.ndarray
    excluded: Any = None


def read_group(topology: PlacedHetero, requests: Sequence[Request], disjoint: bool, num_times: int = 1) -> Seeds:
    """Check the seeds of several batches, whose nodes are told apart, and bring them to the device that samples; with
    `num_times` times of each seed.
    """
    alike = _read_alike(topology, requests, disjoint) if num_times == 1 else None
    if alike is not None:
        return alike
    topo, device = topology.topo, topology.device
    given = [{kind: _check_seeds(topo, kind, ids) for kind, ids in _by_type(topo, "seeds", seeds).items()}
             for seeds, _ in requests]  # fmt: skip
    _check_on_gpu(topo, [item for own in given for item in own.items() if item[1].is_cuda and item[1].numel() > 0])
    counts = np.array([[own[kind].numel() if kind in own else 0 for kind in topo.node_types] for own in given],
                      dtype=np.int64)  # fmt: skip
    sizes = counts.sum(1)
    bases, tree_shift, tree_bits = _lay_out(topo, sizes, disjoint)
    times = None
    if topo.is_temporal:
        parts = [time for own, (_, seed_time) in zip(given, requests, strict=True)
                 for time in _read_times(topology, own, seed_time, num_times)]  # fmt: skip
        times = _bring(parts, device) if parts else torch.empty(0, dtype=torch.int64, device=device)
    # Ids, the start of their type, and the first of their trees.
    own: list[tuple[Tensor, int, int]] = []
    begins = iter(bases.tolist())
    for ids_of in given:
        first_tree = dict(zip(ids_of, accumulate((ids.numel() for ids in ids_of.values()), initial=0), strict=False))
        own += [(ids_of[kind].long(), base, first_tree[kind])
                for kind, base in zip(topo.node_types, begins, strict=False) if kind in ids_of]  # fmt: skip
    lengths = np.array([ids.numel() for ids, *_ in own], np.int64)
    numbers = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    trees = numbers + np.repeat(np.array([first for *_, first in own], np.int64), lengths)
    offsets = np.repeat(np.array([base for _, base, _ in own], np.int64), lengths)
    beside = [offsets + (trees << tree_shift), trees] if disjoint else [offsets]
    rows = _bring([ids for ids, *_ in own], device) if own else torch.empty(0, dtype=torch.int64, device=device)
    there = upload(np.stack(beside), device).unbind()
    none = rows[:0]
    return Seeds(rows, there[1] if disjoint else none, rows + there[0], none if times is None else times,
                 counts.reshape(-1), bases, tree_shift, tree_bits, np.cumsum(sizes) - sizes)  # fmt: skip


class SeedList(NamedTuple):
    """Seeds as a captured plan reads them, in an order that does not depend on their device.

    Attributes:
        ids: Ids within their types, batch after batch and type after type, int64 `[B]`; ids on a GPU are not checked.
        times: Time of each tree, batch after batch, int64 `[B]` or `[B, 2]`; None for the times of the seeds
            themselves, or none.
        counts: Seeds of each type of each of G batches, `G * T`.
        first_trees: Number within its batch of the first tree of these, `G * T`.
    """

    ids: Tensor
    times: Tensor | None
    counts: list[int]
    first_trees: list[int]
    most: int

    def numel(self) -> int:
        """Number of seeds."""
        return self.ids.numel()


def list_seeds(topology: PlacedHetero, requests: Sequence[Request], disjoint: bool, num_times: int = 1) -> SeedList:
    """Check the seeds of several batches; those that are on a GPU are left for kernels to check.

    Args:
        requests: Seeds of each batch, and their times.
    """
    topo, device = topology.topo, topology.device
    alike = _find_alike(topo, requests) if num_times == 1 else None
    if alike is not None:
        return _list_alike(topo, *alike, disjoint)
    typed = _list_typed(topo, requests, disjoint)
    if typed is not None:
        return typed
    # Lists: each call of NumPy takes as long as all of this loop.
    num_types = len(topo.node_types)
    counts, first_trees = ([0] * (len(requests) * num_types) for _ in range(2))
    most = 0
    all_own = num_times == 1 and all(seed_time is None for _, seed_time in requests)
    ids: list[Tensor] = []
    times: list[Tensor] = []
    for batch, (seeds, seed_time) in enumerate(requests):
        given = {kind: _check_seeds(topo, kind, own) for kind, own in _by_type(topo, "seeds", seeds).items()}
        tree, first = 0, batch * num_types
        for kind, own in given.items():
            place = first + topo.node_types.index(kind)
            counts[place], first_trees[place] = own.numel(), tree
            tree += own.numel()
        most = max(most, tree)
        ids += given.values() if len(given) == 1 else [given[kind] for kind in topo.node_types if kind in given]
        if topo.is_temporal and all_own:
            _check_own_times(topo, given)
        elif topo.is_temporal:
            times += _read_times(topology, given, seed_time, num_times)
    if disjoint:
        _find_bits(topo, most, len(counts) + 1)
    if any(own.is_cuda for own in (*ids, *times)):
        ids, times = [_bring(ids, device)], [_bring(times, device)] if times else []
    rows, tree_times = (parts[0].long() if len(parts) == 1 else torch.cat(parts).long() if parts else None
                        for parts in (ids, times))  # fmt: skip
    rows = torch.empty(0, dtype=torch.int64, device="cpu") if rows is None else rows
    return SeedList(rows, tree_times, counts, first_trees, most)


def _find_alike(topo: HeteroTopo, requests: Sequence[Request]) -> tuple[str, list[Tensor], list[Tensor]] | None:
    """Find (the type, the ids of each batch, their times) of seeds on the host, int64 and of one type; None for others.

    Times are empty if all batches take the times of the seeds themselves, or the graph has none.
    """
    kind, all_ids, all_times = None, [], []
    for seeds, seed_time in requests:
        given = _by_type(topo, "seeds", seeds)
        if len(given) != 1:
            return None
        ((own, ids),) = given.items()
        if kind not in (None, own) or not _is_list(ids):
            return None
        kind = own
        all_ids.append(ids)
        if topo.is_temporal and seed_time is not None:
            times = _by_type(topo, "seed_time", seed_time)
            time = times.get(kind)
            if len(times) != 1 or not _is_list(time) or time.shape != ids.shape:  # type: ignore[union-attr]
                return None
            all_times.append(time)
    if kind is None or len(all_times) not in (0, len(all_ids)):
        return None
    return kind, all_ids, all_times  # type: ignore[return-value]


def _list_alike(topo: HeteroTopo, kind: str, ids: list[Tensor], times: list[Tensor], disjoint: bool) -> SeedList:
    """As `list_seeds` in a third of the time, for the result of `_find_alike`."""
    if topo.is_temporal and not times:
        _check_own_times(topo, {kind: ids[0]})
    whole = ids[0] if len(ids) == 1 else torch.cat(ids)
    whole_times = None if not times else times[0] if len(times) == 1 else torch.cat(times)
    words = whole.numpy()
    if not are_below(words, topo.num_nodes[kind]):
        check_below(_name_seeds(topo, kind), words, topo.num_nodes[kind])
    num_types = len(topo.node_types)
    counts, first_trees = [0] * (len(ids) * num_types), [0] * (len(ids) * num_types)
    # Not by `len`, which takes torch a microsecond.
    counts[topo.type_numbers[kind] :: num_types] = sizes = [own.shape[0] for own in ids]
    most = max(sizes)
    if disjoint:
        _find_bits(topo, most, len(counts) + 1)
    return SeedList(whole, whole_times, counts, first_trees, most)


def _list_typed(topo: HeteroTopo, requests: Sequence[Request], disjoint: bool) -> SeedList | None:
    """As `list_seeds`, with one check for all types, for seeds of one batch on the host, int64 and without times; None
    for others, and for ids out of range.
    """
    seeds, _ = requests[0]
    if len(requests) > 1 or topo.is_temporal or not isinstance(seeds, dict) or not seeds:
        return None
    numbers, num_types, tree = topo.type_numbers, len(topo.node_types), 0
    counts, first_trees, parts = [0] * num_types, [0] * num_types, list[Any](numbers)
    for kind, own in seeds.items():
        place = numbers.get(kind)
        if place is None or not _is_list(own):
            return None
        counts[place], first_trees[place], parts[place] = own.shape[0], tree, own
        tree += counts[place]
    whole = torch.cat([part for part, count in zip(parts, counts, strict=True) if count]) if tree else own[:0]
    # As unsigned numbers, negative ids are larger than any valid one.
    if (whole.numpy().view(np.uint64) >= topo.type_sizes.repeat(counts)).any():
        return None
    if disjoint:
        _find_bits(topo, tree, num_types + 1)
    return SeedList(whole, None, counts, first_trees, tree)


def list_ends(topology: PlacedHetero, requests: Sequence[Ends], disjoint: bool, num_times: int = 1) -> EndList:
    """List the links of several batches; their ids are checked before.

    Args:
        topology, disjoint, num_times: See `list_seeds`.
        requests: The links of each batch; all have the same options.
    """
    topo, listed = topology.topo, EndList.of(topology.topo, requests)
    for ends in requests:
        if ends.time is not None:
            shape = (ends.num_links,) if ends.width == 1 else (ends.num_links, 2)
            if ends.time.shape != shape or (topo.is_temporal and ends.width != num_times):
                shape = (ends.num_links,) if num_times == 1 else (ends.num_links, num_times)
                raise ArgumentError(f"edge_label_time must have shape {shape}, got {tuple(ends.time.shape)}")
        elif topo.is_temporal and num_times > 1:
            raise ArgumentError("edge_label_time must be given where each link has a window of its own, got None")
        elif topo.is_temporal:
            _check_own_times(topo, dict.fromkeys(topo.node_types[number] for number in listed.type_numbers))
    if disjoint:
        _find_bits(topo, listed.most, len(listed.counts) + 1)
    return listed


def name_seed(topo: HeteroTopo, listed: SeedList, position: int) -> str:
    """Describe a seed that is no node of its type."""
    kind = topo.node_types[
        int(np.searchsorted(np.cumsum(listed.counts), position, side="right")) % len(topo.node_types)
    ]
    return f"{_name_seeds(topo, kind)} must lie in [0, {topo.num_nodes[kind]}), got {int(listed.ids[position])}"


def _read_alike(topology: PlacedHetero, requests: Sequence[Request], disjoint: bool) -> Seeds | None:
    """As `read_group` in as few steps as for one batch and one transfer; None unless the seeds of all are of one type,
    on the host, with times of their own if there are times."""
    topo, alike = topology.topo, _find_alike(topology.topo, requests)
    if alike is None or (topo.is_temporal and not alike[2]):
        return None
    kind, ids, times = alike
    rows = _check_seeds(topo, kind, torch.cat(ids)).numpy()
    sizes = np.array([own.numel() for own in ids], dtype=np.int64)
    bases, tree_shift, tree_bits = _lay_out(topo, sizes, disjoint)
    counts, first_trees = np.zeros((len(sizes), len(topo.node_types)), np.int64), np.cumsum(sizes) - sizes
    number = topo.node_types.index(kind)
    counts[:, number] = sizes
    identities = rows + np.repeat(bases[:-1].reshape(counts.shape)[:, number], sizes)
    parts = [rows, identities]
    if disjoint:
        parts.append(np.arange(len(rows)) - np.repeat(first_trees, sizes))
        identities += parts[-1] << tree_shift
    if times:
        parts.append(torch.cat(times).numpy())
    there = upload(np.stack(parts), topology.device).unbind()
    none = there[0][:0]
    return Seeds(there[0], there[2] if disjoint else none, there[1], there[-1] if times else none, counts.reshape(-1),
                 bases, tree_shift, tree_bits, first_trees)  # fmt: skip


def _is_list(values: Tensor | None) -> bool:
    """Report whether these are int64 `[B]` on the host."""
    return isinstance(values, Tensor) and values.dtype is torch.int64 and values.dim() == 1 and not values.is_cuda


def _lay_out(topo: HeteroTopo, sizes: np.ndarray, disjoint: bool) -> tuple[np.ndarray, int, int]:
    """(bases, place of the tree, bits of a tree) of identities for batches of so many seeds; see `Seeds`."""
    starts = topo.type_starts
    if not disjoint:
        bases = np.concatenate([*(starts[:-1] + number * starts[-1] for number in range(len(sizes))),
                                len(sizes) * starts[-1:]])  # fmt: skip
        return bases, _IDENTITY_BITS, 0
    num_bases = len(sizes) * (len(starts) - 1) + 1
    tree_shift, tree_bits = _find_bits(topo, int(sizes.max()), num_bases)
    return np.arange(num_bases, dtype=np.int64) << (tree_shift + tree_bits), tree_shift, tree_bits


def _find_bits(topo: HeteroTopo, most: int, num_bases: int) -> tuple[int, int]:
    """(place of the tree, bits of a tree) of identities for batches of at most so many seeds."""
    tree_shift, tree_bits = topo.id_bits, max((most - 1).bit_length(), 1)
    if tree_shift + tree_bits + num_bases.bit_length() > _IDENTITY_BITS:
        raise ArgumentError(f"seeds must be fewer for disjoint trees over so many nodes, got {most}")
    return tree_shift, tree_bits


def _bring(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Bring arrays one after the other to a device, int64; arrays of the host travel together."""
    if all(part.device.type == "cpu" for part in parts):
        return upload(torch.cat([part.long() for part in parts]), device)
    return torch.cat([upload(part, device).long() for part in parts])


def _by_type(topo: HeteroTopo, name: str, values: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(values, Tensor):
        if len(topo.node_types) != 1:
            raise ArgumentTypeError(f"{name} must map node types to tensors, for a graph with {topo.node_types}")
        return {topo.node_types[0]: values}
    if type(values) is not dict and not isinstance(values, Mapping):
        raise ArgumentTypeError(f"{name} must be a tensor or map node types to tensors, got {type(values).__name__}")
    for kind in values:
        if kind not in topo.num_nodes:
            raise ArgumentError(f"{name} must name known node types, got {kind!r} of {topo.node_types}")
    return values if type(values) is dict else dict(values)


def _name_seeds(topo: HeteroTopo, kind: str) -> str:
    return "seeds" if topo.is_homogeneous else f"seeds[{kind!r}]"


def _check_seeds(topo: HeteroTopo, kind: str, ids: Tensor) -> Tensor:
    """Return the seeds of a type; seeds on the host are checked to be in its range."""
    return check_ids(_name_seeds(topo, kind), ids, topo.num_nodes[kind])


def _check_on_gpu(topo: HeteroTopo, lists: Sequence[tuple[str, Tensor]]) -> None:
    """Check the range of seeds of types that are on a GPU, none empty, with one wait for all."""
    if not lists:
        return
    bounds = torch.stack([bound.long() for _, ids in lists for bound in torch.aminmax(ids)]).tolist()
    for (kind, _), low, high in zip(lists, bounds[::2], bounds[1::2], strict=True):
        if low < 0 or high >= topo.num_nodes[kind]:
            raise IdError(f"{_name_seeds(topo, kind)} must lie in [0, {topo.num_nodes[kind]}), got "
                          f"{low if low < 0 else high}")  # fmt: skip


def _read_times(topology: PlacedHetero, given: dict[str, Tensor], seed_time: Tensor | Mapping[str, Tensor] | None,
                num_times: int) -> list[Tensor]:  # fmt: skip
    """Times of the seeds of each type, in the order given."""
    topo, device = topology.topo, topology.device
    if seed_time is not None:
        by_type = _by_type(topo, "seed_time", seed_time)
        if set(by_type) != set(given):
            raise ArgumentError(f"seed_time must have the types of seeds {sorted(given)}, got {sorted(by_type)}")
        times = []
        for kind, ids in given.items():
            time = by_type[kind]
            check_integers("seed_time", time)
            shape = ids.shape if num_times == 1 else (*ids.shape, num_times)
            if time.shape != shape:
                raise ArgumentError(f"seed_time must have shape {tuple(shape)}, got {tuple(time.shape)}")
            times.append(time)
        return times
    if num_times > 1:
        raise ArgumentError("seed_time must be given where each seed has a window of its own, got None")
    _check_own_times(topo, given)
    starts = dict(zip(topo.node_types, topo.type_starts.tolist(), strict=False))
    return [topology.rows.node_time[upload(ids, device).long() + starts[kind]] for kind, ids in given.items()]


def _check_own_times(topo: HeteroTopo, given: Iterable[str]) -> None:
    """Refuse seeds without times of their own."""
    if not topo.timed_types:
        raise ArgumentError(
            "seed_time (a loader's input_time) must be given for a graph whose edges have times, got None"
        )
    for kind in given:
        if kind not in topo.timed_types:
            raise ArgumentError("seed_time (a loader's input_time) must be given for seeds without times of their "
                                f"own, got None for {kind!r}")  # fmt: skip


# Sources and targets by relation, ids within their types, int64 `[2, P]`; pairs need not be edges.
Excluded: TypeAlias = Mapping[EdgeType, Tensor]


def list_pairs(topology: PlacedHetero, excluded: Sequence[Excluded]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List the pairs of several batches on the device that samples, int64 `[P]` each.

    Returns:
        (relation, node that the relation expands, its neighbor in the id space of all types, batch) of each pair;
        relations and batches by number.
    """
    topo, device = topology.topo, topology.device
    relations = {kind: number for number, kind in enumerate(topo.edge_types)}
    parts = [(relations[kind], batch, pairs) for batch, own in enumerate(excluded) for kind, pairs in own.items()
             if kind in relations and pairs.numel()]  # fmt: skip
    if not parts:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return none, none, none, none
    sizes, pairs = [part.shape[1] for *_, part in parts], list[Tensor]()
    numbers, batches = np.array([part[:2] for part in parts], np.int64).T
    own = np.repeat(np.stack([numbers, topo.type_starts[topo.reached[numbers]], batches]), sizes, 1)
    if any(part.is_cuda for *_, part in parts):
        pairs += torch.cat([part.to(device) for *_, part in parts], 1).unbind()
        relation, first, batch = upload(own, device).unbind()
    else:
        # One copy for all.
        words = np.concatenate([own, torch.cat([part for *_, part in parts], 1).numpy()])
        relation, first, batch, *pairs = upload(words, device).unbind()
    expanded, reached = (pairs[1], pairs[0]) if topo.direction == "in" else (pairs[0], pairs[1])
    return relation, expanded, reached + first, batch


class Ends:
    """The ends of links and of their negatives, as seeds of a plan on a GPU.

    Args:
        sources, targets: Nodes at either end of the links, int64 `[L]` on the CPU.
        more_sources, more_targets: Negatives at either end, drawn under the key of the batch as `draw_negatives` does.
        has_labels: True if each pair of a source and a target gets a label.
        types: Node types of either end, for a plan with types; None for the only type.
        time: A time for each link, int64 `[L]`, or a window, `[L, 2]`, on the CPU; None without times.
        nodes: Nodes that negatives are drawn from, at either end, for a plan with types; None without negatives.
        avoided: Pairs that negatives are not, for a plan with types; None for none.
        ways: Relations whose edges of the links are not picked, and True for those with the reverse edges; likewise.
        is_triplet: True if only targets have negatives; None to tell by their numbers.
    """

    is_cuda = False

    def __init__(self, sources: Tensor, targets: Tensor, more_sources: int, more_targets: int, has_labels: bool, *,
                 types: tuple[str | None, str | None] = (None, None), time: Tensor | None = None,
                 nodes: tuple[Nodes, Nodes] | None = None, avoided: Edges | None = None,
                 ways: tuple[tuple[EdgeType, bool], ...] = (), is_triplet: bool | None = None) -> None:  # fmt: skip
        self.sources, self.targets = sources, targets
        self.more_sources, self.more_targets, self.has_labels = more_sources, more_targets, has_labels
        self.types, self.time, self.nodes, self.avoided, self.ways = types, time, nodes, avoided, ways
        self.is_triplet = more_sources < more_targets if is_triplet is None else is_triplet
        self.num_links = sources.shape[0]
        self.num_pairs = self.num_links + more_sources
        self._count = self.num_pairs + self.num_links + more_targets

    @property
    def width(self) -> int:
        """Number of times of a link."""
        return 0 if self.time is None else self.time.dim()

    def numel(self) -> int:
        """Number of ends."""
        return self._count

    def __getitem__(self, place: int) -> Tensor:
        """Return a given end, by its place among all."""
        return self.sources[place] if place < self.num_links else self.targets[place - self.num_pairs]


def list_ways(topo: HeteroTopo, ways: Sequence[tuple[EdgeType, bool]]) -> np.ndarray:
    """List the words of relations for `find_link_edges_gpu`, int64 `[W, WAY]`."""
    words = [
        (topo.row_starts[number], topo.type_starts[topo.reached[number]], (topo.direction == "in") != is_turned)
        for number, is_turned in ((topo.edge_types.index(kind), is_turned) for kind, is_turned in ways)
    ]
    return np.array(words, np.int64).reshape(-1, WAY)


class PlacedEnds(NamedTuple):
    """Places of the ends of links in a batch.

    Attributes:
        places: Local ids: sources, sources of negatives, targets, targets of negatives; int64 `[n]`. In a batch with
            types, the negatives of a triplet's link are adjacent.
        labels: 1 for given links and 0 for negatives, float32 `[L + negatives]`; empty unless asked for.
        times: Times of the pairs, or of the links of triplets, int64 `[n]` or `[n, 2]`; None without times.
        num_untimely: Negatives with an end that is later than the link.
        num_edges: Negatives that are pairs to avoid, after all tries.
    """

    places: Tensor
    labels: Tensor
    times: Tensor | None = None
    num_untimely: int = 0
    num_edges: int = 0


class LinkInbox:
    """Links of a group of batches on their way to a GPU: a part of an inbox, and the launch that draws negatives.

    Args:
        given: First word of the inbox for them.
        words: The inbox, as NumPy sees it.
        num_batches: Batches of the plan; those after the given ones are empty.
        arrived: All ends, as seeds, and then their times, int64 on the GPU.
    """

    def __init__(self, given: int, words: np.ndarray, inbox: Tensor, num_batches: int, arrived: Tensor) -> None:
        self._given, self._words, self._inbox, self._arrived = given, words, inbox, arrived
        self.table = words[given : given + TABLE * num_batches].reshape(num_batches, TABLE)
        # Options of the batch before, and its launch: those of a loader's batches are the same.
        self._options: tuple[Any, ...] = ()
        self._launch: Any = None

    def draw(self, listed: EndList) -> None:
        """Write links to the inbox, and draw their negatives into `arrived`."""
        words, table, at = self._words, self.table, self._given + self.table.size
        table[:] = 0
        most = 0
        for row, ends in zip(table, listed.requests, strict=False):
            row[:2] = ends.num_links, ends.more_targets
            most += ends.num_links + ends.more_targets
            for part in (ends.sources, ends.targets, ends.time):
                if part is not None:
                    count = part.numel()
                    words[at : at + count] = part.numpy().reshape(-1)
                    at += count
        first = listed.requests[0]
        options = first.nodes, first.avoided, listed.type_numbers, first.width, first.is_triplet
        if options != self._options:
            self._options, self._launch = options, self._prepare(listed, first)
        # The first array names the GPU; the inbox is on the host.
        self._launch(grid_for(most, self._arrived), (self._arrived,))

    def _prepare(self, listed: EndList, first: Ends) -> Any:
        none = self._arrived[:0]
        # Without negatives nothing is drawn.
        tables = (1, none, none, none.double()) * 2 if first.nodes is None else [*first.nodes[0].tables,
                                                                                *first.nodes[1].tables]  # fmt: skip
        avoided = [] if first.avoided is None else first.avoided.parts
        return prepare_gpu(draw_links_gpu, OPEN, self._inbox, self._given, len(self.table), listed.num_types,
                           *listed.type_numbers, first.width, int(first.is_triplet), *tables, TRIES if avoided else 1,
                           *[*avoided, none, none][:2])  # fmt: skip


def place_ends(listed: EndList, number: int, sample: Any, nodes: Tensor, trees: Tensor, arrived: Tensor,
               type_starts: np.ndarray, failures: Sequence[int]) -> PlacedEnds:  # fmt: skip
    """Find the local ids of the ends of a batch of a group.

    Args:
        nodes: Its nodes as ids of the id space, seeds first, int64; unused with trees.
        trees: Trees of all its nodes, int64 on the GPU, which become numbers of links; `[0]` without trees.
        arrived: See `LinkInbox`.
        type_starts: Start of each type in the id space, int64 `[T + 1]`.
    """
    ends, (source, target), disjoint = listed.requests[number], listed.type_numbers, sample.batch is not None
    first, count, width = number * listed.num_types, ends.numel(), ends.width
    source_at, target_at = listed.begins[first + source], listed.begins[first + target]
    own_sources = ends.num_pairs if source == target else 0
    target_at += own_sources
    ranges: Sequence[int] = 0, 0, 0, own_sources, 0, 0
    if not disjoint:
        firsts = [*accumulate(sample.num_seeds.values(), initial=0)]
        ranges = (firsts[source], firsts[source + 1], int(type_starts[source]),
                  firsts[target], firsts[target + 1], int(type_starts[target]))  # fmt: skip
    num_times = width * ends.num_pairs
    places = memory = arrived.new_empty(count + num_times)
    # Empty without times.
    times = arrived[:0]
    if num_times:
        places, times = memory.unsafe_split_with_sizes([count, num_times])
    labels = memory.new_empty(ends.num_pairs if ends.has_labels else 0, dtype=torch.float32)
    times_at = listed.begins[-1] + width * listed.begins[first]
    run_gpu(place_links_gpu, grid_for(max(count + num_times, trees.shape[0]), arrived), nodes, arrived, ends.num_links,
            ends.more_targets, int(ends.is_triplet), source_at, target_at, times_at, *ranges, int(disjoint), trees,
            places, labels, times)  # fmt: skip
    own_times = None if ends.time is None else times.view(-1, 2) if width == 2 else times
    return PlacedEnds(places, labels, own_times, *failures)


class EndList(NamedTuple):
    """Links as a captured plan reads them, in the form of a `SeedList`.

    Attributes:
        requests: The links of each of G batches.
        num_types: Number of node types, T.
        type_numbers: Numbers of the types of sources and of targets.
        counts: Ends of each type of each batch, `G * T`.
        first_trees: Number within its batch of the first tree of these, `G * T`.
        begins: First of these among all ends, and the end of the last, `G * T + 1`.
    """

    requests: Sequence[Ends]
    num_types: int
    type_numbers: tuple[int, int]
    counts: list[int]
    first_trees: list[int]
    begins: list[int]
    most: int

    @classmethod
    def of(cls, topo: HeteroTopo, requests: Sequence[Ends]) -> EndList:
        """List the links of several batches, all between nodes of the same types."""
        num_types = len(topo.node_types)
        source, target = (0 if kind is None else topo.node_types.index(kind) for kind in requests[0].types)
        counts, first_trees = ([0] * (len(requests) * num_types) for _ in range(2))
        for ends, first in zip(requests, range(0, len(counts), num_types), strict=True):
            counts[first + source] = ends.num_pairs
            counts[first + target] += ends.num_links + ends.more_targets
            first_trees[first + target] = 0 if source == target else ends.num_pairs
        most = max(ends.numel() for ends in requests)
        return cls(requests, num_types, (source, target), counts, first_trees, [*accumulate(counts, initial=0)], most)

    @property
    def times(self) -> Tensor | None:
        """Times of the first batch; None if seeds have their own, or none."""
        return self.requests[0].time

    def numel(self) -> int:
        """Number of ends."""
        return self.begins[-1]
