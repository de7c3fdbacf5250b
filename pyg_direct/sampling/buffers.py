"""What a plan on a GPU works in: scratch that all plans of a topology share, and slots that hold a batch each."""

from __future__ import annotations

import contextlib
import threading
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from pyg_direct.graph.placed import PlacedTopology
from pyg_direct.kernels.bitmap import GROUP_WORDS
from pyg_direct.kernels.state import BAD_SEED, HEADER, NO_POSITION, STATE
from pyg_direct.ops.launch import full_grid
from pyg_direct.ops.relabel import num_words
from pyg_direct.runtime.driver import tolerate_captures
from pyg_direct.runtime.graph import CapturedGraph
from pyg_direct.runtime.stream import current_stream

# Share of GPU memory that a table of local ids by node may take; a ranked bitmap, a sixteenth of it, serves above.
_TABLE_SHARE = 1 / 32
# Nodes up to which every hop reads the whole bitmap: flags would cost more than they save.
_SCAN_NODES = 1 << 27


class Scratch:
    """Memory by the number of nodes, used by one batch after the other.

    Attributes:
        seen, fresh: Bitmaps, uint32 `[W]`, empty between batches.
        local_of_node: Local ids, int32 `[N]`, or `[0]` where the ranked bitmap serves instead.
        touched: A flag, uint8, for each group of words of `fresh`; `[0]` for few nodes, all of whose groups are read.
        ranks: int32 `[W]`, or `[0]` where the table serves.
        block_sums: int64, one for each block of a full grid.
    """

    def __init__(self, topology: PlacedTopology) -> None:
        device, words = topology.device, num_words(topology.num_nodes)
        groups = -(-words // GROUP_WORDS) if topology.num_nodes > _SCAN_NODES else 0
        has_table = 4 * topology.num_nodes <= _TABLE_SHARE * _total_bytes(device)
        self.seen = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.fresh = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.touched = torch.zeros(groups, dtype=torch.uint8, device=device)
        self.local_of_node = torch.empty(topology.num_nodes if has_table else 0, dtype=torch.int32, device=device)
        self.ranks = torch.empty(0 if has_table else words, dtype=torch.int32, device=device)
        self.block_sums = torch.empty(full_grid(self.seen), dtype=torch.int64, device=device)
        # Plans of several threads take turns, and batches of several streams wait for each other.
        self.lock = threading.RLock()
        self._last: tuple[int, torch.cuda.Event] | None = None
        self._topology: PlacedTopology | None = None

    @classmethod
    def of(cls, topology: PlacedTopology) -> Scratch:
        """The scratch of a topology, made once."""
        with _SCRATCH_LOCK:
            known = _SCRATCH.get(id(topology))
            if known is None:
                known = _SCRATCH[id(topology)] = cls(topology)
                # So that its id stays its own as long as the scratch lives.
                known._topology = topology
            return known

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return _count_bytes(self)

    def wait(self, stream: int) -> None:
        """Let `stream`, the current one, come after the last batch."""
        if self._last is not None and self._last[0] != stream:
            self._last[1].wait()

    def note(self, stream: int, done: torch.cuda.Event) -> None:
        """Remember the last batch."""
        self._last = stream, done


_SCRATCH: WeakValueDictionary[int, Scratch] = WeakValueDictionary()
_SCRATCH_LOCK = threading.Lock()


class Slot:
    """Arrays of fixed capacity that hold one batch, and the graph that fills them.

    Attributes:
        num_seeds, num_edges: The capacity.
        inbox, outbox: Page-locked words that the kernels read first and write last.
        sized, exported: Events after the graph, and after the batch has left for tensors of its own.
        locals_of_rank: Local ids by rank, int32, where the scratch has no table.
    """

    def __init__(self, topology: PlacedTopology, num_seeds: int, num_edges: int, ranked: bool) -> None:
        device, index_dtype = topology.device, topology.indices.dtype
        on_gpu = device.type == "cuda"
        num_nodes = num_seeds + min(num_edges, topology.num_nodes)
        self.num_seeds, self.num_edges = num_seeds, num_edges
        self.inbox = torch.zeros(HEADER + num_seeds, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self.outbox = torch.zeros(STATE, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self.arrived = torch.empty(num_seeds, dtype=torch.int64, device=device)
        self.state = torch.zeros(STATE, dtype=torch.int64, device=device)
        self.state[BAD_SEED] = NO_POSITION
        self.nodes = torch.empty(num_nodes, dtype=index_dtype, device=device)
        self.sources = torch.empty(num_edges, dtype=index_dtype, device=device)
        self.ids = torch.empty(num_edges, dtype=topology.edge_ids.dtype, device=device)
        self.targets = torch.empty(num_edges, dtype=torch.int32, device=device)
        self.locals_of_rank = torch.empty(num_nodes if ranked else 0, dtype=torch.int32, device=device)
        # NumPy views: writing a few words through torch costs microseconds.
        self.inbox_words: np.ndarray = self.inbox.numpy()
        self.outbox_words: np.ndarray = self.outbox.numpy()
        self.graph: CapturedGraph | None = None
        self.sized = torch.cuda.Event() if on_gpu else None
        self.exported = torch.cuda.Event() if on_gpu else None
        self._exported_on: int | None = None

    def wait(self, stream: int) -> None:
        """Let `stream`, the current one, come after the export of the batch before."""
        if self._exported_on is not None and self._exported_on != stream:
            assert self.exported is not None
            current_stream(self.state.get_device()).wait_event(self.exported)

    def note_export(self) -> None:
        """Remember that the batch leaves on the current stream."""
        if self.exported is not None:
            stream = current_stream(self.state.get_device())
            self.exported.record(stream)
            self._exported_on = stream.cuda_stream

    @staticmethod
    def count_bytes(topology: PlacedTopology, num_seeds: int, num_edges: int) -> int:
        """About the bytes that a slot of this capacity takes."""
        edge_bytes = topology.indices.element_size() + topology.edge_ids.element_size() + 4
        node_bytes = topology.indices.element_size() + 4
        return edge_bytes * num_edges + node_bytes * (num_seeds + min(num_edges, topology.num_nodes)) + 8 * num_seeds

    def __del__(self) -> None:
        # The graph reads and writes page-locked memory that the allocator would hand on at once: a batch that nobody
        # waited for must be over first.
        for event in (getattr(self, "sized", None), getattr(self, "exported", None)):
            if event is not None:
                with contextlib.suppress(Exception), tolerate_captures():
                    event.synchronize()

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return _count_bytes(self)


def _count_bytes(holder: object) -> int:
    return sum(
        t.numel() * t.element_size() for t in vars(holder).values() if isinstance(t, Tensor) and not t.is_pinned()
    )


def _total_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        # The simulator's GPU has no limit.
        return 2**62
    return torch.cuda.get_device_properties(device).total_memory
