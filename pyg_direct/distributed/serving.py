"""`PartServer`: one part of a graph that answers clients; it keeps nothing between two answers."""

from __future__ import annotations

from dataclasses import asdict
from os import PathLike
from typing import Any

import numpy as np
import torch

from pyg_direct.distributed.owner import Picker, Request
from pyg_direct.distributed.pairs import PairExchange
from pyg_direct.distributed.part import GraphPart
from pyg_direct.distributed.rows import RowExchange
from pyg_direct.graph.relation import EdgeType
from pyg_direct.kernels.jit import set_cpu_threads
from pyg_direct.sampling.general import GeneralPlan
from pyg_direct.sampling.options import GeneralRecipe


class PartServer:
    """Picks edges and reads rows of one part. Equal questions get equal answers, so that any may be asked again.

    Args:
        folder, part, check: See `GraphPart`.
        device: Where the part lies.
        num_threads: Threads of its loops on the CPU; None for all.
    """

    def __init__(self, folder: str | PathLike[str], part: int, device: str = "cpu", check: str | None = "size",
                 num_threads: int | None = None) -> None:  # fmt: skip
        self._part = GraphPart(folder, part, device=torch.device(device), check=check)
        self._rows, self._pairs = RowExchange(self._part, None), PairExchange(self._part, None)
        self._pickers: dict[str, Picker] = {}
        self._num_threads = num_threads

    def describe(self) -> dict[str, Any]:
        """The manifest, without the list of files, and dtypes and shapes of rows by kind and attribute."""
        rows = {
            kind: {
                name: (str(feature.dtype).removeprefix("torch."), list(feature.shape[1:]))
                for name, feature in features.items()
            }
            for kind, features in self._rows.features.items()
        }
        return {**asdict(self._part.manifest), "files": {}, "row_types": list(rows.items())}

    def books(self) -> dict[str, np.ndarray]:
        """Part of each node, for the types that a table tells of."""
        return {kind: book.table.numpy() for kind, book in self._part.books.items() if book.table is not None}

    def pick(self, recipe: dict[str, Any], timed: bool, weighted: bool, dtypes: list[str], message: np.ndarray
             ) -> np.ndarray:  # fmt: skip
        """Edges for a request in bytes, in bytes.

        Args:
            recipe: Fields of a `GeneralRecipe`.
            timed, weighted: Whether times and weights decide.
            dtypes: Of node ids, counts, neighbors and edge ids on the wire.
            message: A `Request`, uint8.
        """
        self._use_threads()
        key = repr((recipe, timed, weighted))
        placed = self._part.place(timed=timed, weighted=weighted)
        if key not in self._pickers:
            topology: Any = placed
            self._pickers[key] = Picker.of(self._part, placed, GeneralPlan(topology, GeneralRecipe(**recipe)))
        topo = placed.topo
        id_dtype, *answer = (getattr(torch, name) for name in dtypes)
        bytes_there = _tensor(message, self._part.device)
        request = Request.unpack(bytes_there, len(topo.edge_types), len(topo.node_types), id_dtype)
        assert request is not None
        return self._pickers[key].answer(request).pack(tuple(answer)).cpu().numpy()  # type: ignore[arg-type]

    def read(self, kinds: list[tuple[Any, list[str]]], message: np.ndarray) -> np.ndarray:
        """Rows for ids in bytes, in bytes; see `RowExchange.answer`."""
        self._use_threads()
        return self._rows.answer(_tensor(message, self._part.device), kinds).cpu().numpy()

    def find(self, edge_type: EdgeType, message: np.ndarray) -> np.ndarray:
        """Which pairs in bytes are edges, in bytes; see `PairExchange.answer`."""
        self._use_threads()
        return self._pairs.answer(edge_type, _tensor(message, self._part.device)).cpu().numpy()

    def _use_threads(self) -> None:
        if self._num_threads is not None:
            set_cpu_threads(self._num_threads)


def _tensor(message: np.ndarray, device: torch.device) -> torch.Tensor:
    # What came through shared memory is read only.
    return torch.from_numpy(np.array(message)).to(device)
