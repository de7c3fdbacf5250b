"""`ClientGraph`: a partitioned graph on a client, which holds no part and sends requests to servers."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.edge_queries import PairExchange
from pyg_direct.distributed.frontier_exchange import FrontierExchange
from pyg_direct.distributed.graph_part import PartTopo, PlacedPart, Table, word_dtype
from pyg_direct.distributed.part_plan import PartPlan
from pyg_direct.distributed.partitioning.manifest import Book, EdgeEntry, Manifest, NodeEntry, check_same
from pyg_direct.distributed.row_exchange import Asked as RowsAsked, Parcel, RowExchange, Wanted
from pyg_direct.distributed.server.part_server import as_tensor
from pyg_direct.errors import ArgumentError
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.object_text import one_line, show_count, show_sizes
from pyg_direct.ops.sampling.join_remote_edges import Asked, Layout, join_edges
from pyg_direct.ops.sampling.sample_hetero import Picked, Rows
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.threads import Pool
from pyg_direct.sampling.seeds import Excluded
from pyg_direct.typing import Device


class Servers(Protocol):
    """Interface of the servers, one per part."""

    size: int

    def ask(self, method: str, questions: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Send questions to the servers of these parts, all at once; wait for and return all answers."""


class _Alone:
    """Stand-in for a communicator: a client runs alone, one task after the other."""

    captured = False

    def __init__(self, device: torch.device, number: int, count: int) -> None:
        self.device, self.rank, self.size = device, number, count
        self.sent: Counter[str] = Counter()
        self._is_closed = False
        self._worker: threading.Thread | None = None
        self._pool = Pool(1, "pyg_direct_client", self._note_worker)
        self._followed: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self, steps: Any) -> None:
        self._followed[steps] = None

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._is_closed:
            raise ArgumentError("the graph is closed, and so is its way to servers")
        # Pending work on the caller's stream must complete first.
        waits = self._stream is not None and not torch.cuda.is_current_stream_capturing()
        event = torch.cuda.current_stream(self.device).record_event() if waits else None
        return self._pool.submit(self._do, event, fn, *args)

    def _do(self, event: Any, fn: Callable[..., Any], *args: Any) -> Any:
        if self._stream is None:
            return fn(*args)
        # A thread has its own current device and stream.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if event is not None:
                event.wait()
            result = fn(*args)
            self._stream.synchronize()
        return result

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        # In turn with prefetched batches: a plan makes one batch at a time.
        return fn(*args) if threading.current_thread() is self._worker else self.submit(fn, *args).result()

    def _note_worker(self) -> None:
        self._worker = threading.current_thread()

    def agree(self, value: int) -> list[int]:
        return [value]

    def widen(self, width: int) -> None:
        """Do nothing: there is no exchange."""

    def open_segments(self) -> None:
        """Return None: there is no exchange."""

    def close(self) -> None:
        for steps in list(self._followed):
            steps.cut()
        self._is_closed = True
        self._pool.close()


class _NoPart:
    """Stand-in for a part: all nodes belong to servers."""

    def __init__(self, servers: Servers, device: torch.device) -> None:
        facts = servers.ask("describe", {0: ()})[0]
        self.row_types = dict(facts.pop("row_types"))
        nodes = [NodeEntry(**entry) for entry in facts.pop("nodes")]
        edges = [EdgeEntry(**entry) for entry in facts.pop("edges")]
        self.manifest = Manifest(nodes=nodes, edges=edges, **facts)
        if self.manifest.num_parts != servers.size:
            raise ArgumentError(
                f"servers must be one for each of the {self.manifest.num_parts} parts, got {servers.size}"
            )
        numbers = servers.ask("identify", dict.fromkeys(range(servers.size), ()))
        check_same([numbers[part] for part in range(servers.size)], "part")
        tables = servers.ask("books", {0: ()})[0]
        self.books = {}
        for entry in nodes:
            bounds = entry.book.get("bounds")
            table = tables.get(entry.name)
            self.books[entry.name] = Book(
                entry.num_nodes, self.manifest.num_parts,
                None if bounds is None else torch.tensor(bounds, device="cpu"),
                None if table is None else torch.from_numpy(np.array(table)))  # fmt: skip
        self.device, self.part, self.num_parts = device, -1, servers.size
        none = torch.empty(0, dtype=torch.int64, device=device)
        self.tables: dict[Any, Table] = {kind: Table(none, {}) for kind in self.row_types}
        self.times: dict[str, Tensor] = {}
        self.word_dtype = word_dtype(self.manifest)
        # Starts of a part without nodes.
        self.own_starts = np.zeros(len(nodes), np.int64)

    # A client holds no rows.
    num_bytes = 0

    def owners(self, kind: str, ids: Tensor) -> Tensor:
        return self.books[kind].owners(ids)

    def place(self, *, timed: bool = False, weighted: bool = False) -> PlacedPart:
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        rows = Rows(none, none, none, none, none, none.float(), none.double())
        return PlacedPart(PartTopo(self.manifest, timed, weighted), rows, self.device)


class _Shape:
    """Dtype and shape of remote rows, without the rows."""

    def __init__(self, dtype: str, shape: list[int], device: torch.device) -> None:
        self.dtype, self.shape, self._device = getattr(torch, dtype), torch.Size([0, *shape]), device

    def read(self, places: Tensor) -> Tensor:
        return torch.empty((0, *self.shape[1:]), dtype=self.dtype, device=self._device)

    def __repr__(self) -> str:
        return f"rows of {self.dtype} {tuple(self.shape[1:])} on servers"


class _ClientFrontiers(FrontierExchange):
    """Exchange of frontiers with servers, which pick the edges.

    Args:
        how: Recipe of the plan in a dict, and whether it samples by times and by weights.
    """

    # A question is about one batch.
    most_batches = 1

    def __init__(self, part: Any, placed: Any, plan: Any, communicator: Any, *, servers: Servers,
                 how: tuple[dict[str, Any], bool, bool]) -> None:  # fmt: skip
        super().__init__(part, placed, plan, communicator)
        self._servers, self._how = servers, how

    def find_excluded(self, excluded: Sequence[Excluded]) -> Any:
        # Sent with each question, since a server keeps no state.
        return [message.cpu().numpy() for message in self.list_excluded(excluded)]

    def _ask(self, asked: Asked, message: Tensor, bounds: Tensor, keys: np.ndarray, hop: int, excluded: Any) -> Picked:
        num_types, wire = len(self._placed.topo.node_types), self.picker.wire(hop)
        counts = np.diff(np.array(bounds.tolist(), np.int64)).reshape(-1, num_types)
        asked = asked._replace(counts=counts)
        sizes = (counts.sum(1) * self.picker.words.num_bytes).tolist()
        questions = {part: (*self._how, int(keys[0]), hop, own.tolist(), nodes.cpu().numpy(),
                            None if excluded is None else excluded[part])
                     for part, (own, nodes) in enumerate(zip(counts, message.split(sizes), strict=True))
                     if nodes.numel()}  # fmt: skip
        answers = self._servers.ask("pick", questions)
        num_edges = np.array([answers[part][0] if part in answers else 0 for part in range(len(counts))], np.int64)
        layout = Layout.of(asked.num_items, num_edges, wire)
        joined = torch.empty(int(layout.sizes.sum()), dtype=torch.uint8, device=message.device)
        for part, piece in enumerate(joined.split(layout.sizes.tolist())):
            if part in answers:
                piece.copy_(as_tensor(answers[part][1]))
        return join_edges(asked, layout, wire, joined)


class _ClientRows(RowExchange):
    """Rows fetched from the servers."""

    def __init__(self, part: Any, communicator: Any, servers: Servers) -> None:
        shapes: Any = {kind: {name: _Shape(dtype, shape, part.device) for name, (dtype, shape) in own.items()}
                       for kind, own in part.row_types.items()}  # fmt: skip
        super().__init__(part, None, shapes)
        self._servers, self._alone = servers, communicator

    def _exchange(self, wanted: Sequence[Wanted], parcel: Parcel) -> tuple[RowsAsked, list[Tensor]]:
        ids, order, bounds = self._group(wanted)
        counts = np.diff(np.array(bounds.tolist(), np.int64)).reshape(-1, len(wanted))
        asked, dtype = RowsAsked(ids, order, counts), self._part.word_dtype
        sent = ids[order].to(dtype).cpu().split(counts.sum(1).tolist())
        questions = {part: (parcel.kinds, own.tolist(), nodes.numpy())
                     for part, (own, nodes) in enumerate(zip(counts, sent, strict=True)) if nodes.numel()}  # fmt: skip
        answers = self._servers.ask("read", questions)
        self._alone.sent["rows"] += sum(answer.size for answer in answers.values())
        none = torch.empty(0, dtype=torch.uint8, device=ids.device)
        return asked, [as_tensor(answers[part]).to(ids.device) if part in answers else none
                       for part in range(len(counts) - 1)]  # fmt: skip


class _ClientPairs(PairExchange):
    """Queries of edges to the servers."""

    def __init__(self, part: Any, communicator: Any, servers: Servers) -> None:
        super().__init__(part, communicator)
        self._servers = servers

    def _collect_balances(self, edge_type: EdgeType) -> list[tuple[int, int]]:
        return list(self._servers.ask("weigh", dict.fromkeys(range(self._servers.size), (edge_type,))).values())

    def _swap(self, edge_type: EdgeType, messages: list[Tensor]) -> list[Tensor]:
        questions = {part: (edge_type, message.cpu().numpy()) for part, message in enumerate(messages)
                     if message.numel()}  # fmt: skip
        answers = self._servers.ask("find", questions)
        return [as_tensor(answers[part]).to(message.device) if part in answers else message
                for part, message in enumerate(messages)]  # fmt: skip


class ClientGraph(DistGraph):
    """A partitioned graph whose parts lie on servers; replaces a `DistGraph` in its loaders.

    A client makes its batches from the servers' answers: edges of a hop, rows of a batch. It requests a batch only when
    it has room for one, `prefetch` ahead of the batch in use, so that queues stay bounded. Clients are independent of
    each other, and may come and go. After a restart of a server the question is repeated. Equal questions get equal
    answers, so no batch is lost or made twice.

    Args:
        servers: The servers, for example the result of `serve` in `pyg_direct.distributed.server.ray_servers`.
        device: Device of the batches; None is the current GPU if there is one, otherwise the CPU.
        client: (number of this client, number of clients). Together the clients get the batches of one machine; their
            loaders need equal seeds.
    """

    most_batches = 1

    def __init__(self, servers: Servers, *, device: Device = None, client: tuple[int, int] = (0, 1)) -> None:
        # Not the base class's constructor, which opens a part.
        if not 0 <= client[0] < client[1]:
            raise ArgumentError(f"client must be (number, number of clients), got {client!r}")
        self.device, self._servers = resolve_device(device), servers
        alone: Any = _Alone(self.device, *client)
        part: Any = _NoPart(servers, self.device)
        self.communicator, self.part = alone, part
        self.rows = _ClientRows(part, alone, servers)
        self.pairs = _ClientPairs(part, alone, servers)

    def make_plan(self, recipe: Any, *, timed: bool, weighted: bool, with_rows: bool = False) -> PartPlan:
        """Make a plan for a recipe; batches are never captured, so `with_rows` changes nothing."""
        ask = partial(_ClientFrontiers, servers=self._servers, how=(asdict(recipe), timed, weighted))
        return PartPlan(self.part, recipe, self.communicator, timed=timed, weighted=weighted, open_frontiers=ask)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(self._servers.size, "server")
        yield show_sizes(self.num_nodes)
        yield str(self.device)
