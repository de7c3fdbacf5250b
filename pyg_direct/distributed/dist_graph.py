"""`DistGraph`: a partitioned graph, seen from one of the processes that train on it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_direct.distributed.edge_queries import PairExchange
from pyg_direct.distributed.frontier_exchange import MOST_BATCHES
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.part_plan import PartPlan
from pyg_direct.distributed.partitioning.manifest import Manifest, check_same
from pyg_direct.distributed.partitioning.replicas import choose_replicas, read_replicas
from pyg_direct.distributed.row_exchange import TIME, RowExchange, Wanted
from pyg_direct.distributed.shared_graph import WholeGraph, WholeRows, find_obstacle
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.feature import Feature
from pyg_direct.object_text import one_line, show_sizes
from pyg_direct.ops.argument_checks import as_ids, check_flag, check_ids
from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.runtime.comm.formation import failures_told
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.launch import current_stream
from pyg_direct.runtime.host.host_memory import check_size, give_back_freed, parse_size
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe
from pyg_direct.typing import Device

_LOGGER = logging.getLogger(__name__)
# Share of the memory of the smallest GPU for the batches of a step; there are up to three steps at a time.
_STEP_SHARE = 1 / 192


class DistGraph:
    """A graph in parts on several processes: process r holds part r. All processes create it, in the same order.

    Args:
        folder: A partition with one part per process, written by `partition_graph`; each process needs its own part
            only.
        device: Device of this process that samples and holds the batches; None is the current GPU if there is one,
            otherwise the CPU.
        group: A process group whose ranks hold the parts; None for all.
        backend: `nccl` or `gloo`; by default by the device.
        check: Checks of the files: `"full"`: checksums, `"size"`: sizes, None: no check.
        device_cache_size: GPU memory for hot rows among the part's own, see `Feature`; a share refers to the part's
            rows.
        placement: Host memory for the part's own rows, see `Feature`; if processes share a graph, it is page-locked.
        replicas: Rows of other parts to copy to this process. A size, such as `"200M"`, or a share of the rows of this
            part copies the rows most frequent in the part's neighbor lists. A share may be `"20%"`, or `"200%"` for
            twice as many rows. `"plan"` reads the choice of `plan_replicas`. Otherwise ids of a node type, by type with
            types. Each process chooses its own.
        share_rows: Let processes of one host, on the CPU, read each other's rows in shared memory; then only rows of
            other hosts are exchanged. Equal in all processes.
        share_graph: `"auto"`: keep the graph in one memory that all processes read. They must use the CPUs of one host,
            or its GPUs joined by NVLink; a single process always may. Each process then samples and reads without an
            exchange; otherwise `obstacle` gives the reason. True: raise an error instead of the exchange. False:
            several processes keep their parts and exchange; `replicas` and `share_rows` are for this case. Equal in all
            processes. GPUs share out neighbors, and rows up to `device_cache_size`; host memory holds the other rows
            once. The parts are joined in host memory first, which needs room for the whole graph.
        captured: Sample by exchanges over NCCL inside captured CUDA graphs. `"auto"`: if processes exchange over
            NCCL. False: the host drives each hop. Equal in all processes.
        timeout, silence: Seconds that an exchange waits for the slowest process, and for a process that gives no sign
            of life.

    Attributes:
        part: This process's part.
        communicator: Communicator of all processes.
        rows: Rows by id, own and remote.
        pairs: Queries of edges between pairs of nodes.
        whole: The graph in one memory; None if processes exchange.
        obstacle: The reason for the exchange; None without one.

    Raises:
        PartitionError: the partition is missing, damaged or of another version.
        ArgumentError: the numbers of parts and processes differ, or an argument is wrong.
        ArgumentTypeError: an argument has the wrong type.
        DeviceError: `device` is a GPU that does not exist.
        RankError: another process failed.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one process
        >>> manifest = partition_graph("ring", torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_parts=1)
        >>> DistGraph("ring", device="cpu")
        DistGraph(part 0 of 1, 4 nodes, cpu)
        >>> dist.destroy_process_group()
    """

    whole: WholeGraph | None = None
    obstacle: str | None = None
    # Batches that one exchange makes.
    most_batches = MOST_BATCHES
    # Bytes of the batches of a step on a GPU, equal on all ranks.
    step_bytes = 0

    def __init__(self, folder: str | PathLike[str], *, device: Device = None, group: Any = None,
                 backend: str | None = None, check: str | None = "size", device_cache_size: int | str = 0,
                 placement: str = "unified", replicas: Any = None, share_rows: bool = False,
                 share_graph: bool | str = "auto", captured: bool | str = "auto", timeout: float = 600,
                 silence: float = 30) -> None:  # fmt: skip
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ArgumentTypeError(f"group must be a process group that has this process, got {group!r}")
        with failures_told(group):
            self.device = resolve_device(device)
            share_rows = check_flag("share_rows", share_rows)
            if share_rows and self.device.type != "cpu":
                raise ArgumentError(f"share_rows needs device='cpu', got {str(self.device)!r}")
            if captured not in (True, False, "auto"):
                raise ArgumentError(f"captured must be 'auto', True or False, got {captured!r}")
            if captured == "auto":
                captured = self.device.type == "cuda" and backend in (None, "nccl")
        self.communicator = Communicator(group, device=self.device, backend=backend, timeout=timeout,
                                         silence=silence, captured=bool(captured))  # fmt: skip
        try:
            self._open_all(folder, check, device_cache_size, placement, replicas, share_rows, share_graph)
        except Exception:
            # The others are informed; no thread and no group is left here.
            self.communicator.close()
            raise

    def _open_all(self, folder: str | PathLike[str], check: str | None, device_cache_size: int | str, placement: str,
                  replicas: Any, share_rows: bool, share_graph: bool | str) -> None:  # fmt: skip
        # In turn, so that an error in one process is raised in all.
        self.communicator.run(self._check, device_cache_size, placement, share_graph, share_rows, replicas)
        if self.communicator.captured:
            total = torch.cuda.get_device_properties(self.device).total_memory
            self.step_bytes = int(_STEP_SHARE * min(self.communicator.run(self.communicator.agree, total)))
        self.obstacle = self._find_obstacle(share_graph, folder)
        self.part: GraphPart = self.communicator.run(self._open, folder, check)
        self.pairs = PairExchange(self.part, self.communicator)
        if self.obstacle is None:
            self.whole = WholeGraph(self.part, self.communicator, self.device, device_cache_size, placement)
            self.rows: RowExchange | WholeRows = self.whole.rows
            return
        _LOGGER.info("processes keep their parts and exchange: %s", self.obstacle)
        features = {kind: {name: Feature(device=self.device, device_cache_size=device_cache_size,
                                         placement=placement).from_cpu_tensor(rows)
                           for name, rows in table.rows.items()}
                    for kind, table in self.part.tables.items()}  # fmt: skip
        self.rows = RowExchange(self.part, self.communicator, features)
        if share_rows:
            self.communicator.run(self.rows.read_peers)
        # Fetching replicas is an exchange: processes without replicas take part too.
        if any(self.communicator.run(self.communicator.agree, int(replicas is not None))):
            self.communicator.run(self._keep, self.rows, folder, {} if replicas is None else replicas)

    def _check(self, device_cache_size: int | str, placement: str, share_graph: bool | str, share_rows: bool,
               replicas: Any) -> None:  # fmt: skip
        # A graph in one memory of CPUs uses neither of the first two; errors in them are raised all the same.
        Feature(device=self.device, device_cache_size=device_cache_size, placement=placement)
        if isinstance(replicas, (int, float, str)) and replicas != "plan":
            # More than the part has itself: of many parts, it may keep the rows of several others.
            check_size(replicas, "replicas", most=math.inf)
        if share_graph not in (True, False, "auto"):
            raise ArgumentError(f"share_graph must be True, False or 'auto', got {share_graph!r}")
        if share_graph is True and (share_rows or replicas is not None):
            name, value = ("share_rows", share_rows) if share_rows else ("replicas", replicas)
            raise ArgumentError(f"{name} needs share_graph=False or 'auto', as nothing is exchanged in one memory, got "
                                f"{value!r}")  # fmt: skip
        ways = self.communicator.agree(4 * self.communicator.captured + 2 * bool(share_graph) + bool(share_rows))
        other = next((rank for rank, way in enumerate(ways) if way != ways[0]), None)
        if other is not None:
            raise ArgumentError("share_graph=False, share_rows and captured must be equal in all processes, got others "
                                f"on rank {other} than on rank 0")  # fmt: skip

    def _find_obstacle(self, share_graph: bool | str, folder: str | PathLike[str]) -> str | None:
        """Find the reason why the graph is not kept in one memory."""
        if self.communicator.size == 1:
            # No other process holds anything to exchange.
            return None
        obstacle = self.communicator.run(self._ask_all, folder) if share_graph else "share_graph=False"
        if share_graph is True and obstacle is not None:
            raise ArgumentError(f"share_graph=True needs processes that can keep the graph in one memory: {obstacle}")
        return obstacle

    def _ask_all(self, folder: str | PathLike[str]) -> str | None:
        """Call `find_obstacle` for the graph in a folder."""
        # Parts on GPUs would take no host memory; parts on CPUs take as much there as the whole graph.
        files = Manifest.read(folder).files.values() if self.device.type == "cuda" else []
        return find_obstacle(self.communicator, sum(known["bytes"] for known in files))

    def _open(self, folder: str | PathLike[str], check: str | None) -> GraphPart:
        # Shared memory is filled from the files of each process.
        is_filled = self.obstacle is None and self.communicator.size > 1
        part = GraphPart(folder, self.communicator.rank, device=torch.device("cpu") if is_filled else self.device,
                         check=check, map_rows=is_filled)  # fmt: skip
        if part.num_parts != self.communicator.size:
            raise ArgumentError(f"folder must hold a part for each of the {self.communicator.size} processes, got "
                                f"{part.num_parts} parts")  # fmt: skip
        check_same(self.communicator.agree(part.manifest.identify()), "rank")
        return part

    def _keep(self, rows: RowExchange, folder: str | PathLike[str], replicas: Any) -> None:
        if isinstance(replicas, str) and replicas == "plan":
            ids = read_replicas(folder, self.part.manifest, self.part.part)
        elif isinstance(replicas, (int, str)) and not isinstance(replicas, bool):
            own = sum(t.numel() * t.element_size() for kind, table in self.part.tables.items()
                      if isinstance(kind, str) for t in table.rows.values())  # fmt: skip
            ids = choose_replicas(self.part, parse_size(replicas, own, "replicas", most=math.inf))
        else:
            given = replicas if isinstance(replicas, Mapping) else {self.node_types[0]: replicas}
            ids = {kind: self._check_replicas(kind, value) for kind, value in given.items()}
        rows.keep(ids)
        # Choosing them took several times their memory.
        give_back_freed()

    def _check_replicas(self, kind: Any, ids: Any) -> Tensor:
        if kind not in self.node_types:
            raise ArgumentError(f"replicas must name known node types, got {kind!r} of {self.node_types}")
        return check_ids("replicas", as_ids("replicas", ids).cpu(), self.part.books[kind].num_nodes)

    def __getstate__(self) -> Any:
        raise ArgumentTypeError(f"a {type(self).__name__} belongs to the process that made it and cannot be sent or "
                                "copied: make one in each process")  # fmt: skip

    @property
    def rank(self) -> int:
        """The rank of this process, and the number of its part."""
        return self.communicator.rank

    @property
    def is_homogeneous(self) -> bool:
        """True if the graph has no types."""
        return self.part.manifest.is_homogeneous

    @property
    def node_types(self) -> list[str]:
        """Node types, in order."""
        return [entry.name for entry in self.part.manifest.nodes]

    @property
    def edge_types(self) -> list[tuple[str, str, str]]:
        """Relations, in order."""
        return [entry.name for entry in self.part.manifest.edges]

    @property
    def num_nodes(self) -> int | dict[str, int]:
        """Nodes of the whole graph, by type in a graph with types."""
        sizes = {entry.name: entry.num_nodes for entry in self.part.manifest.nodes}
        return sizes[self.node_types[0]] if self.is_homogeneous else sizes

    def own_nodes(self, kind: str | None = None) -> Tensor:
        """Return the nodes of this process's part, ascending, int64 `[n]` on `device`.

        Args:
            kind: Node type; None is the first, which is the only type of a graph without types.

        Raises:
            KeyError: there is no such type.
        """
        return self.part.tables[self.node_types[0] if kind is None else kind].ids.to(self.device)

    def own_rows(self, name: str, kind: str | None = None) -> Tensor:
        """Return rows of the nodes of this process's part, `[n, ...]` in their dtype on disk, in the order of
        `own_nodes`.

        They are read only: writes may not appear in batches, as copies may be elsewhere. Keep rows that change in a
        `DistFeature`.

        Args:
            name: Name of the attribute.
            kind: Node type; None is the first, which is the only type of a graph without types.

        Raises:
            KeyError: there is no such type or attribute.
        """
        return self.part.tables[self.node_types[0] if kind is None else kind].rows[name]

    def skeleton(self) -> Data | HeteroData:
        """Make a `Data` or `HeteroData` with the sizes of the whole graph, without edges and rows."""
        if self.is_homogeneous:
            return Data(num_nodes=self.num_nodes)
        data = HeteroData()
        for kind, size in self.num_nodes.items():  # type: ignore[union-attr]
            data[kind].num_nodes = size
        return data

    @property
    def num_bytes(self) -> int:
        """Bytes of the graph in this process: of its part and of copies, or its share of the one memory."""
        held = self.part.num_bytes + self.rows.kept_bytes if self.whole is None else self.whole.num_bytes
        return held

    def make_plan(self, recipe: GeneralRecipe, *, timed: bool, weighted: bool, with_rows: bool = False) -> GeneralPlan:
        """Make a plan for a recipe, equal in all processes.

        Args:
            recipe: Options of sampling.
            timed, weighted: Sample by the times and weights of the partition.
            with_rows: Let captured batches have the rows of their nodes.
        """
        if self.whole is not None:
            return GeneralPlan(self.whole.place(timed=timed, weighted=weighted, summed=recipe.replace), recipe)  # type: ignore[arg-type]
        rows = self.rows if with_rows and isinstance(self.rows, RowExchange) else None
        return PartPlan(self.part, recipe, self.communicator, timed=timed, weighted=weighted, rows=rows)

    def times_of(self, kind: str, ids: Tensor) -> Tensor:
        """Return the times of nodes of a type, int64 `[n]`; collective, unless the graph lies in one memory.

        Args:
            kind: Node type.
            ids: Nodes of any part, int64 `[n]`, on `device`.

        Raises:
            ArgumentError: a type without times.
            IdError: an id that its owner does not hold.
            RankError: another process failed or ended.
        """
        timed = [entry.name for entry in self.part.manifest.nodes if entry.time is not None]
        if kind not in timed:
            raise ArgumentError(f"kind must be a node type with times, got {kind!r} of {timed}")
        found: list[dict[str, Tensor]] = self.run_in_turn(self.rows.fetch, [Wanted(kind, ids, [TIME])])
        times = found[0][TIME]
        if times.is_cuda:
            # The times were allocated on the stream of the exchange.
            times.record_stream(current_stream(times.device.index))
        return times

    def run_in_turn(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run a function that exchanges, after the batches that are prefetched; immediately if there is no exchange.

        Args:
            fn: The function.
            *args: Its arguments.
        """
        if self.whole is not None:
            return fn(*args)
        return self.communicator.run(fn, *args)

    def close(self) -> None:
        """Take part in the pending exchanges of other processes, then end the process group; all processes call it."""
        self.communicator.close()

    def __enter__(self) -> DistGraph:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        # After an error do not wait for the other processes: they are informed.
        if kind is None or self.communicator.size == 1:
            self.close()

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield f"part {self.rank} of {self.part.num_parts}"
        yield show_sizes(self.num_nodes)
        yield str(self.device)
