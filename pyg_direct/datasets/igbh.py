"""Graph with types in the shape of IGBH-Full of the Illinois Graph Benchmark, in memory or in files.

Every node of every type has a class, and an edge is mostly drawn inside a class. So features and neighbors of all
types carry the class. Every chunk of rows or edges is a function of the seed and its number, without a table of all
nodes. So a graph larger than memory is written chunk by chunk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_direct.cache_folder import write_whole
from pyg_direct.datasets import synthetic
from pyg_direct.datasets.dataset import (
    check_float_dtype,
    check_fraction,
    check_int,
    check_not_negative,
    check_positive,
    make_generator,
)
from pyg_direct.errors import ArgumentError, FileError
from pyg_direct.features.row_files import RowFile, save_pieces
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.host_memory import use_large_pages


class Relation(NamedTuple):
    """Relation of a graph at scale 1.

    Attributes:
        source, name, target: As in PyG; `rev_` is put before the name of the reverse relation.
        num_edges: Edges.
        source_hub, target_hub: Largest expected degree of each end, in mean degrees; a `source_hub` of 0 stands for
            one edge of each of so many sources.
        is_reversed: The reverse relation is there too.
    """

    source: str
    name: str
    target: str
    num_edges: int
    source_hub: float
    target_hub: float
    is_reversed: bool = True


# Nodes, and edges of the first four relations, as published (Khatua et al., KDD 2023); the number of papers with a
# journal or a conference is not, and is the share of the Microsoft Academic Graph. Hubs are rough.
NODES = {"paper": 269_346_174, "author": 277_220_883, "institute": 26_918, "fos": 712_960, "journal": 49_052,
         "conference": 4_547}  # fmt: skip
RELATIONS = (
    Relation("paper", "cites", "paper", 3_996_442_004, 50, 2000, is_reversed=False),
    Relation("paper", "written_by", "author", 716_761_549, 10, 300),
    Relation("paper", "topic", "fos", 1_050_280_600, 5, 5000),
    Relation("author", "affiliated_to", "institute", 48_521_486, 0, 50),
    Relation("paper", "published", "journal", 90_000_000, 0, 100),
    Relation("paper", "venue", "conference", 5_000_000, 0, 20),
)
# Labeled papers of MLPerf Training that are trained on and evaluated.
_TRAIN, _VAL = 94_600_000 / 269_346_174, 788_379 / 269_346_174
_FACTS = "igbh.json"
_UNFINISHED = "igbh.unfinished.json"
# Numbers of nodes that are classified at a time.
_CHUNK_NODES = 1 << 18


def permute_ids(ids: Tensor, count: int, purpose: str, *, is_inverse: bool = False) -> Tensor:
    """Apply a pseudorandom permutation of [0, count) to ids, int64 `[n]`, without a table of it.

    Halves of the bits of an id are mixed in turn (a Feistel network). An id that leaves the range is permuted again
    until it is back (cycle walking), on average at most once.

    Args:
        ids: Ids in [0, count), on any device.
        count: N, at most 2^62.
        purpose: Name of the permutation.
        is_inverse: Apply the inverse permutation.
    """
    digest = hashlib.blake2b(purpose.encode(), digest_size=24).digest()
    keys = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 24, 4)]
    low = max(2, (count - 1).bit_length()) // 2
    high_mask, low_mask = (1 << (max(2, (count - 1).bit_length()) - low)) - 1, (1 << low) - 1
    rounds = list(enumerate(keys))

    def step(value: Tensor) -> Tensor:
        high, rest = value >> low, value & low_mask
        for number, key in reversed(rounds) if is_inverse else rounds:
            if number % 2:
                rest = rest ^ (_mix(high, key) & low_mask)
            else:
                high = high ^ (_mix(rest, key) & high_mask)
        return (high << low) | rest

    out = step(ids)
    while len(outside := (out >= count).nonzero().view(-1)):
        out[outside] = step(out[outside])
    return out


def _mix(value: Tensor, key: int) -> Tensor:
    """Mix values below 2^31 with a key of 32 bits; no product leaves int64."""
    value = (value * 0x9E3779B1 + key) & 0xFFFFFFFF
    value = (value ^ (value >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    value = (value ^ (value >> 12)) * 0x297A2D39 & 0xFFFFFFFF
    return value ^ (value >> 15)


@dataclass(frozen=True)
class _Recipe:
    """Arguments of a graph, and its chunks: each is a function of these arguments and of its number."""

    scale: float
    num_features: int
    num_classes: int
    seed: int
    homophily: float
    feature_signal: float
    dtype: torch.dtype
    device: torch.device
    _centroids: dict[str, Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def check(cls, scale: Any, num_features: Any, num_classes: Any, seed: Any, homophily: Any, feature_signal: Any,
              dtype: Any, device: Any) -> _Recipe:  # fmt: skip
        return cls(check_positive("scale", scale), check_int("num_features", num_features, least=1),
                   check_int("num_classes", num_classes, least=1), check_int("seed", seed, least=0),
                   check_fraction("homophily", homophily), check_not_negative("feature_signal", feature_signal),
                   check_float_dtype("dtype", dtype), resolve_device(device))  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Return the arguments that decide the bytes of files, for JSON."""
        found = {**asdict(self), "dtype": str(self.dtype), "device": self.device.type, "version": 1}
        del found["_centroids"]
        return found

    def count(self, kind: str) -> int:
        """Number of nodes of a type."""
        return max(1, int(NODES[kind] * self.scale))

    def count_edges(self, relation: Relation) -> int:
        """Number of edges of a relation."""
        count = max(1, int(relation.num_edges * self.scale))
        return min(count, self.count(relation.source)) if relation.source_hub == 0 else count

    def _permute(self, ids: Tensor, kind: str, purpose: str, **options: bool) -> Tensor:
        return permute_ids(ids, self.count(kind), f"{self.seed}/{purpose} of {kind}", **options)

    def _starts(self, kind: str) -> Tensor:
        return synthetic.divide_slots(self.count(kind), self.num_classes).to(self.device)

    def draw_classes(self, kind: str, ids: Tensor) -> Tensor:
        """Return the class of each node, int64 `[n]`."""
        slots = self._permute(ids, kind, "nodes", is_inverse=True)
        return torch.bucketize(slots.double(), self._starts(kind)[1:-1], right=True)

    def draw_part(self, part: str, ids: Tensor) -> Tensor:
        """Return the papers among `ids` of a part, "train" or "val", in their order."""
        place, (begin, end) = self._permute(ids, "paper", "split", is_inverse=True), self.span_part(part)
        return ids[(place >= begin) & (place < end)]

    def span_part(self, part: str) -> tuple[int, int]:
        """Return first and end position of a part in the shuffled papers."""
        train = round(_TRAIN * self.count("paper"))
        return (0, train) if part == "train" else (train, train + round(_VAL * self.count("paper")))

    def draw_rows(self, kind: str, number: int) -> Tensor:
        """Return chunk `number` of the rows of a type, `[n, F]`: the centroid of the class, plus normal noise."""
        size = max(1, synthetic.CHUNK_VALUES // self.num_features)
        ids = torch.arange(number * size, min((number + 1) * size, self.count(kind)), device=self.device)
        if kind not in self._centroids:
            generator = make_generator(self.seed, f"centroids of {kind}", torch.device("cpu"))
            drawn = torch.randn(self.num_classes, self.num_features, generator=generator, device="cpu")
            self._centroids[kind] = (self.feature_signal * drawn / drawn.norm(dim=1, keepdim=True)).to(self.device)
        generator = make_generator(self.seed, f"rows of {kind} {number}", self.device)
        noise = torch.randn(len(ids), self.num_features, generator=generator, device=self.device)
        return noise.add_(self._centroids[kind][self.draw_classes(kind, ids)]).to(self.dtype)

    def count_chunks(self, count: int, size: int | None = None) -> int:
        """Number of chunks of `count` edges, or of nodes if `size` is given."""
        return -(-count // (size or self.chunk_edges))

    @property
    def chunk_edges(self) -> int:
        """Edges of a chunk."""
        return synthetic.CHUNK_EDGES["cpu" if self.device.type == "cpu" else "cuda"]

    def draw_edges(self, relation: Relation, number: int) -> tuple[Tensor, Tensor]:
        """Return sources and targets of chunk `number` of the edges of a relation, int64 `[n]` each."""
        begin = number * self.chunk_edges
        count = min(self.chunk_edges, self.count_edges(relation) - begin)
        generator = make_generator(self.seed, f"edges of {relation.name} {number}", self.device)
        position, other, stay = torch.rand(3, count, dtype=torch.float64, generator=generator, device=self.device)
        starts, ends = self._starts(relation.source), self._starts(relation.target)
        if relation.source_hub == 0:
            slot = self._permute(torch.arange(begin, begin + count, device=self.device), relation.source, relation.name)
            place = torch.bucketize(slot.double(), starts[1:-1], right=True)
        else:
            position.mul_(self.count(relation.source))
            place = torch.bucketize(position, starts[1:-1], right=True)
            slot = synthetic.skew_position(position, starts[place], starts[place + 1], relation.source_hub)
        first, last = ends[place], ends[place + 1]
        # A class may have no node of a small type.
        position = torch.where((stay < self.homophily) & (first < last), first + other * (last - first),
                               other * self.count(relation.target))  # fmt: skip
        place = torch.bucketize(position, ends[1:-1], right=True)
        target = synthetic.skew_position(position, ends[place], ends[place + 1], relation.target_hub)
        return (self._permute(slot, relation.source, "nodes"), self._permute(target, relation.target, "nodes"))

    def draw_end(self, relation: Relation, end: int, number: int) -> Tensor:
        """Return sources (0) or targets (1) of a chunk of edges, int32 `[n]`."""
        return self.draw_edges(relation, number)[end].int()

    def chunks_of_rows(self, kind: str) -> range:
        """Numbers of the chunks of rows of a type."""
        return range(self.count_chunks(self.count(kind), max(1, synthetic.CHUNK_VALUES // self.num_features)))

    def chunks_of_nodes(self, kind: str) -> Iterator[Tensor]:
        """Return ids of the nodes of a type, chunk by chunk."""
        for begin in range(0, self.count(kind), _CHUNK_NODES):
            yield torch.arange(begin, min(begin + _CHUNK_NODES, self.count(kind)), device=self.device)


def synthetic_igbh(
    scale: float = 1 / 1024,
    *,
    num_features: int = 1024,
    num_classes: int = 2983,
    seed: int = 0,
    device: str | int | torch.device | None = "cpu",
    homophily: float = 0.5,
    feature_signal: float = 4.0,
    dtype: torch.dtype = torch.float16,
    topology_only: bool = False,
) -> HeteroData:
    """Draw a graph shaped like IGBH-Full, `scale` times its size: 547 million nodes of six types, 5.8 billion edges.

    Papers cite papers, and have authors, topics, journals and conferences; authors have institutes. All relations but
    citations are there in both directions. Journals and conferences are as frequent as in the Microsoft Academic Graph.
    Everything follows from `seed`: equal arguments on one device type give equal graphs. `write_igbh` writes the same
    graph to files, out of core.

    Args:
        scale: Factor on nodes and edges, above 0.
        num_features: F, of every type.
        num_classes: Number of classes of papers.
        seed: Any integer of at least 0.
        device: The device that draws and holds the graph; None is the current GPU, or the CPU if there is no GPU.
        homophily: Probability in [0, 1] that an edge is drawn inside a class.
        feature_signal: Distance of a class's centroid from the origin, in standard deviations of the noise.
        dtype: Dtype of the features, such as torch.float16 or torch.float8_e4m3fn.
        topology_only: Leave `x` of every type out.

    Returns:
        `x` `[N, F]` of every type, `edge_index` int64 `[2, E]` of 11 relations, and of papers `y` int64 `[N]`,
        `train_idx` and `val_idx` int64.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ArgumentError: An argument lies outside its rule.
        DeviceError: `device` is a GPU that this machine lacks.

    Example:
        >>> data = synthetic_igbh(1e-6, num_features=4, num_classes=3)
        >>> data["paper"].x.shape, len(data.edge_types)
        (torch.Size([269, 4]), 11)
    """
    recipe = _Recipe.check(scale, num_features, num_classes, seed, homophily, feature_signal, dtype, device)
    data = HeteroData()
    for kind in NODES:
        data[kind].num_nodes = recipe.count(kind)
        if kind == "paper":
            ids = list(recipe.chunks_of_nodes(kind))
            data[kind].y = torch.cat([recipe.draw_classes(kind, some) for some in ids])
            for part in ("train", "val"):
                data[kind][f"{part}_idx"] = torch.cat([recipe.draw_part(part, some) for some in ids])
        if not topology_only:
            x = use_large_pages(torch.empty(recipe.count(kind), num_features, dtype=dtype, device=recipe.device))
            begin = 0
            for number in recipe.chunks_of_rows(kind):
                rows = recipe.draw_rows(kind, number)
                x[begin : begin + len(rows)] = rows
                begin += len(rows)
            data[kind].x = x
    for relation in RELATIONS:
        source, name, target = relation[:3]
        count = recipe.count_edges(relation)
        edges = use_large_pages(torch.empty(2, count, dtype=torch.int64, device=recipe.device))
        for number in range(recipe.count_chunks(count)):
            begin = number * recipe.chunk_edges
            sources, targets = recipe.draw_edges(relation, number)
            edges[0, begin : begin + len(sources)], edges[1, begin : begin + len(targets)] = sources, targets
        data[source, name, target].edge_index = edges
        if relation.is_reversed:
            data[target, f"rev_{name}", source].edge_index = edges.flip(0)
    return data


def write_igbh(
    folder: str | os.PathLike[str],
    scale: float = 1 / 1024,
    *,
    num_features: int = 1024,
    num_classes: int = 2983,
    seed: int = 0,
    device: str | int | torch.device | None = "cpu",
    homophily: float = 0.5,
    feature_signal: float = 4.0,
    dtype: torch.dtype = torch.float16,
    threads: int = 1,
) -> Path:
    """Write the graph of `synthetic_igbh` to a folder, out of core; returns the folder.

    Host memory holds some chunks for each thread, whatever the scale; files have equal bytes for any number of
    threads. Every file appears whole or not at all. An interrupted call continues with the first file that is missing.
    A folder that is finished is left as it is. IGBH-Full takes 1.2 TB in float16.

    Files are `TYPE/x.npy` (`x.safetensors` if NumPy lacks the dtype), `paper/y.npy`, `paper/train_idx.npy`,
    `paper/val_idx.npy`, and `SOURCE__NAME__TARGET/edge_index.npy`, int32 `[2, E]`. `pyg-direct partition` and
    `Feature.from_file` read them; `load_igbh` opens them together.

    Args:
        folder: The folder; it is created if it is missing.
        scale, num_features, num_classes, seed, device, homophily, feature_signal, dtype: As of `synthetic_igbh`.
        threads: Chunks that are drawn at a time.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ArgumentError: An argument lies outside its rule, or the folder has a graph of other arguments.
        DeviceError: `device` is a GPU that this machine lacks.
        FileError: There is no room on the disk, or no right to write there.

    Example:
        >>> folder = write_igbh("igbh", 1e-6, num_features=4, num_classes=3)
        >>> load_igbh(folder)["paper"].x.shape
        torch.Size([269, 4])
    """
    recipe = _Recipe.check(scale, num_features, num_classes, seed, homophily, feature_signal, dtype, device)
    threads, path, facts = check_int("threads", threads, least=1), Path(folder), recipe.facts()
    for name in (_FACTS, _UNFINISHED):
        if (path / name).exists() and (found := _read_facts(path / name)) != facts:
            raise ArgumentError(f"folder must be new, or have a graph of the same arguments, got {str(path)!r} with "
                                f"{found}; name another folder, or delete this one")  # fmt: skip
    if (path / _FACTS).exists():
        return path
    tables = list(_list_tables(recipe, path))
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_whole(path / _UNFINISHED, json.dumps(facts))
        for file, shape, kind, chunks in tables:
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                save_pieces(file, torch.empty(shape, dtype=kind, device="meta"), _draw_ahead(chunks, threads))
        os.replace(path / _UNFINISHED, path / _FACTS)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"folder={str(path)!r} could not be written: {error}; the same call continues") from error
    return path


# File, shape, dtype, and functions that draw its chunks in order.
_Table = tuple[Path, tuple[int, ...], torch.dtype, Iterator[Callable[[], Tensor]]]


def _list_tables(recipe: _Recipe, folder: Path) -> Iterator[_Table]:
    """List the files of a graph; a chunk is drawn when its function is called."""
    draws: Iterator[Callable[[], Tensor]]
    for kind in NODES:
        shape = recipe.count(kind), recipe.num_features
        draws = map(partial(partial, recipe.draw_rows, kind), recipe.chunks_of_rows(kind))
        yield _rows_file(folder / kind, recipe.dtype), shape, recipe.dtype, draws
    ids = partial(recipe.chunks_of_nodes, "paper")
    draws = map(partial(partial, recipe.draw_classes, "paper"), ids())
    yield folder / "paper" / "y.npy", (recipe.count("paper"),), torch.int64, draws
    for part in ("train", "val"):
        begin, end = recipe.span_part(part)
        draws = map(partial(partial, recipe.draw_part, part), ids())
        yield folder / "paper" / f"{part}_idx.npy", (end - begin,), torch.int64, draws
    for relation in RELATIONS:
        for is_reverse in (False, True) if relation.is_reversed else (False,):
            draws = _draw_ends(recipe, relation, (1, 0) if is_reverse else (0, 1))
            yield (_edges_file(folder, relation, is_reverse), (2, recipe.count_edges(relation)), torch.int32, draws)


def _draw_ends(recipe: _Recipe, relation: Relation, ends: tuple[int, int]) -> Iterator[Callable[[], Tensor]]:
    """List draws of one end of all edges, then of the other: so they follow each other in the file.

    Every chunk is drawn twice, as both ends of all edges may not fit memory.
    """
    for end in ends:
        for number in range(recipe.count_chunks(recipe.count_edges(relation))):
            yield partial(recipe.draw_end, relation, end, number)


def _draw_ahead(chunks: Iterator[Callable[[], Tensor]], threads: int) -> Iterator[Tensor]:
    """Draw chunks in order, by several threads, at most one for each thread ahead."""
    if threads == 1:
        yield from (draw().cpu().contiguous() for draw in chunks)
        return
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[Tensor]] = deque(pool.submit(draw) for draw in islice(chunks, threads))
        while pending:
            done = pending.popleft().result().cpu().contiguous()
            pending.extend(pool.submit(draw) for draw in islice(chunks, 1))
            yield done


def _rows_file(folder: Path, dtype: torch.dtype) -> Path:
    """Return the file of rows in a type's folder: `.npy` if NumPy has the dtype."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return folder / "x.safetensors"
    return folder / "x.npy"


def _edges_file(folder: Path, relation: Relation, is_reverse: bool) -> Path:
    source, name, target = relation[:3]
    kind = (target, f"rev_{name}", source) if is_reverse else (source, name, target)
    return folder / "__".join(kind) / "edge_index.npy"


def _read_facts(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {error}; delete its folder and write it again") from error


def load_igbh(folder: str | os.PathLike[str]) -> HeteroData:
    """Open a graph of `write_igbh`; its tensors are maps of the files, of which only what is used is read.

    Loaders read the maps into GPU or host memory. To leave rows in their files, put `Feature.from_file` of
    `TYPE/x.npy` into a `FeatureStore`, as `examples/igbh_rgat.py` does.

    Args:
        folder: The folder of `write_igbh`.

    Returns:
        The graph as of `synthetic_igbh`, but with `edge_index` int32 `[2, E]`. Its tensors must not be written to.

    Raises:
        FileError: The folder has no finished graph, or one of its files is missing or damaged.
        ArgumentError, ArgumentTypeError: A file has another layout than `write_igbh` gives it.

    Example:
        >>> folder = write_igbh("igbh", 1e-6, num_features=4, num_classes=3)
        >>> load_igbh(folder)["paper", "cites", "paper"].edge_index.shape
        torch.Size([2, 3996])
    """
    path = Path(folder)
    if not (path / _FACTS).exists():
        raise FileError(f"folder must have a graph that write_igbh finished, got {str(path)!r} without {_FACTS}")
    facts = _read_facts(path / _FACTS)
    dtype, data = getattr(torch, facts["dtype"].removeprefix("torch.")), HeteroData()
    for kind in NODES:
        data[kind].x = RowFile(_rows_file(path / kind, dtype)).rows
        for name in ("y", "train_idx", "val_idx") if kind == "paper" else ():
            data[kind][name] = RowFile(path / kind / f"{name}.npy").rows
    for relation in RELATIONS:
        for is_reverse in (False, True) if relation.is_reversed else (False,):
            file = _edges_file(path, relation, is_reverse)
            data[tuple(file.parent.name.split("__"))].edge_index = RowFile(file).rows
    return data
