"""`PartServer`: the server of one part of a graph; it keeps no state between answers."""

from __future__ import annotations

import contextlib
import platform
import threading
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property, partial
from os import PathLike
from typing import Any

import numpy as np
import torch

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.distributed.edge_queries import PairExchange
from pyg_direct.distributed.frontier_exchange import Picker
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.row_exchange import Parcel, RowExchange
from pyg_direct.distributed.server.local_channel import Channel, go_over
from pyg_direct.errors import IdError, PartitionError
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.object_text import one_line, show_count
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe

# Frequent questions, which use a channel if there is one.
QUESTIONS = ("pick", "read", "find")
# Seconds that the exit of a program waits for a pending answer.
_END = 5.0


class PartServer:
    """Server that picks edges and reads rows of one part. Equal questions get equal answers, so that they can be
    repeated.

    Args:
        folder, part, check: See `GraphPart`.
        num_threads: Threads of its CPU loops; None for all.
    """

    def __init__(self, folder: str | PathLike[str], part: int, device: str = "cpu", check: str | None = "size",
                 num_threads: int | None = None) -> None:  # fmt: skip
        self._open = partial(GraphPart, folder, part, device=torch.device(device), check=check)
        self._pickers: dict[str, Picker] = {}
        self._num_threads = num_threads
        # Each client on this host has a thread, which answers one question at a time.
        self._turn = threading.Lock()
        self._clients: dict[threading.Thread, Channel] = {}
        # A thread that is in torch at Python's exit would abort the process.
        self._finish = weakref.finalize(self, _part_with, self._clients)

    @one_line
    def __repr__(self) -> Iterator[str]:
        # Not the graph itself, which is read when it is first asked.
        folder, part = self._open.args
        yield f"part {part}"
        yield repr(str(folder))
        yield str(self._open.keywords["device"])
        yield show_count(len(self._clients), "client")

    def meet(self, host: str, path: str) -> bool:
        """Answer a client of the same host over shared memory, in a background thread; return True if it connected."""
        channel = go_over(host, path)
        if channel is not None:
            thread = threading.Thread(target=self._attend, args=(channel,), name="pyg_direct_client", daemon=True)
            self._clients[thread] = channel
            thread.start()
        return channel is not None

    def _attend(self, channel: Channel) -> None:
        """Answer questions with (True if there is an answer, the answer) until the client is gone."""
        with contextlib.suppress(OSError):
            while True:
                method, question = channel.receive()
                try:
                    answer = getattr(self, method)(*question) if method in QUESTIONS else None
                except Exception:
                    # The client repeats the question through Ray, which raises the full error there.
                    answer = None
                channel.send((answer is not None, answer))
        channel.close()
        self._clients.pop(threading.current_thread(), None)

    def describe(self) -> dict[str, Any]:
        """Return the manifest, without the list of files, and dtypes and shapes of rows by kind and attribute."""
        with self._working():
            rows = {
                kind: {
                    name: (str(feature.dtype).removeprefix("torch."), list(feature.shape[1:]))
                    for name, feature in features.items()
                }
                for kind, features in self._rows.features.items()
            }
        return {**asdict(self._part.manifest), "files": {}, "row_types": list(rows.items())}

    def identify(self) -> int:
        """Identify the partition, see `Manifest.identify`."""
        with self._working():
            return self._part.manifest.identify()

    def books(self) -> dict[str, np.ndarray]:
        """Return the part of each node, for types with a table."""
        with self._working():
            return {kind: book.table.numpy() for kind, book in self._part.books.items() if book.table is not None}

    def pick(self, recipe: dict[str, Any], timed: bool, weighted: bool, key: int, hop: int, counts: list[int],
             message: np.ndarray, excluded: np.ndarray | None = None) -> tuple[int, np.ndarray]:  # fmt: skip
        """Pick requested edges: (number of edges, the edges in bytes).

        Args:
            hop: See `Picker.pick`.
            message: The nodes in bytes (`Words`), uint8.
            excluded: Pairs whose edges are excluded (`Picker.find_excluded`), uint8; None for none.
        """
        with self._working():
            return self._pick((recipe, timed, weighted), key, hop, counts, message, excluded)

    def _pick(self, how: tuple[dict[str, Any], bool, bool], key: int, hop: int, counts: list[int], message: np.ndarray,
              excluded: np.ndarray | None) -> tuple[int, np.ndarray]:  # fmt: skip
        recipe, timed, weighted = how
        name = repr(how)
        placed = self._part.place(timed=timed, weighted=weighted)
        if name not in self._pickers:
            topology: Any = placed
            plan = GeneralPlan(topology, GeneralRecipe(**recipe))
            self._pickers[name] = Picker(self._part, placed, plan)
        picker = self._pickers[name]
        nodes = as_tensor(message).to(self._part.device)
        left_out = None
        if excluded is not None:
            left_out = picker.find_excluded([as_tensor(excluded).to(self._part.device)])
        found = picker.pick(nodes, np.array([counts], np.int64), np.array([key], np.uint64), hop, left_out)
        num_edges = int(found.count_edges())
        if int(found.status) < 0:
            raise IdError("ids must be held by this part, got others")
        return num_edges, picker.pack(found, np.array([num_edges]), picker.wire(hop))[0].cpu().numpy()

    def read(self, kinds: list[tuple[Any, list[str]]], counts: list[int], ids: np.ndarray) -> np.ndarray:
        """Read rows in bytes (`Parcel`) of ids, int32 or int64, with their number for each kind."""
        with self._working():
            own = as_tensor(ids).to(self._part.device).long()
            rows, status = self._rows.answer(own, np.array([counts], np.int64), Parcel.of(kinds, self._rows.features))
        if int(status) < 0:
            raise IdError("ids must be held by this part, got others")
        return rows.cpu().numpy()

    def find(self, edge_type: EdgeType, message: np.ndarray) -> np.ndarray:
        """Return, as bytes, which of the given pairs are edges; see `PairExchange.answer`."""
        with self._working():
            return self._pairs.answer(edge_type, as_tensor(message).to(self._part.device)).cpu().numpy()

    def weigh(self, edge_type: EdgeType) -> tuple[int, int]:
        """Weigh this part's edges of a relation, to find out if all edges go both ways; see `Balance`."""
        with self._working():
            num_edges, difference = self._pairs.weigh_own(edge_type)
            return num_edges, difference

    @cached_property
    def _part(self) -> GraphPart:
        # Opened by the first question, and tried again by each one: an actor whose constructor fails on a restart never
        # answers, and Ray gives its name to no other actor.
        try:
            return self._open()
        except PartitionError as error:
            # Each host may have its own files.
            raise PartitionError(f"{error} (on {platform.node()})") from error

    @cached_property
    def _rows(self) -> RowExchange:
        return RowExchange(self._part, None)

    @cached_property
    def _pairs(self) -> PairExchange:
        return PairExchange(self._part, None)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with self._turn:
            if self._num_threads is not None:
                set_cpu_threads(self._num_threads)
            yield


def _part_with(clients: dict[threading.Thread, Channel]) -> None:
    """End the threads that answer clients."""
    threads = list(clients.items())
    for _, channel in threads:
        channel.close()
    for thread, _ in threads:
        thread.join(_END)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Make a tensor over a read-only array, for example from shared memory."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Readable(array)))


class _Readable:
    """Wrapper that declares an array writable, as torch requires."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        about = array.__array_interface__
        self.__array_interface__ = {**about, "data": (about["data"][0], False)}
