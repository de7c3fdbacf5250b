"""`DistFeature` and `PartitionInfo`: one table of rows over several hosts, after Quiver's classes of these names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from pyg_direct.distributed.graph_part import Table
from pyg_direct.distributed.partitioning.manifest import Book
from pyg_direct.distributed.row_exchange import RowExchange, Unpacker, Wanted, pack
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.features.feature import Feature
from pyg_direct.object_text import one_line
from pyg_direct.ops.argument_checks import as_ids, check_ids
from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.runtime.comm.formation import failures_told
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.launch import current_stream

_KIND, _NAME = "nodes", "rows"
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass
class PartitionInfo:
    """Owner of the rows of each node, after Quiver's class of that name.

    Attributes:
        device: Index of the GPU that results are on, or a device. None is the device of a given `Feature`, otherwise
            the current GPU if there is one, otherwise the CPU.
        host: This host, from 0.
        hosts: Number of hosts.
        global2host: Host of each node, integers `[N]`.
        replicate: Nodes of other hosts of which this host keeps copies, int64 `[R]`.

    Example:
        >>> info = PartitionInfo("cpu", host=0, hosts=2, global2host=torch.tensor([0, 0, 1, 1]))
        >>> (info.global2host == info.host).tolist()  # the nodes whose rows this host has
        [True, True, False, False]
    """

    device: Any
    host: int
    hosts: int
    global2host: Tensor
    replicate: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("host", "hosts"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, Integral):
                raise ArgumentTypeError(f"{name} must be an integer, got {number!r}")
        for name in ("global2host", "replicate"):
            nodes = getattr(self, name)
            if not isinstance(nodes, Tensor) and (name == "global2host" or nodes is not None):
                raise ArgumentTypeError(f"{name} must be a tensor, got {type(nodes).__name__}")
        if not 0 <= self.host < self.hosts:
            raise ArgumentError(f"host must lie in [0, {self.hosts}), got {self.host}")
        self.book = Book.by_table(self.global2host.cpu(), self.hosts)
        if self.replicate is not None:
            self.replicate = check_ids("replicate", self.replicate.cpu(), self.book.num_nodes).long()

    @property
    def own(self) -> Tensor:
        """The nodes of this host, ascending, int64 `[n]`; rows of its feature are in this order."""
        return (self.book.owners(torch.arange(self.book.num_nodes, device="cpu")) == self.host).nonzero().view(-1)


class _Holding:
    """Rows of one host, in the form that `RowExchange` reads."""

    def __init__(self, info: PartitionInfo, rows: Tensor, device: torch.device) -> None:
        self.device, self.part, self.num_parts = device, info.host, info.hosts
        self.books, self.word_dtype = {_KIND: info.book}, torch.int64
        self.times: dict[str, Tensor] = {}
        self.tables: dict[Any, Table] = {_KIND: Table(info.own.to(device), {_NAME: rows})}

    def owners(self, kind: str, ids: Tensor) -> Tensor:
        """Return the host of each node."""
        return self.books[kind].owners(ids)


class DistFeature:
    """Rows of all hosts by node id, after Quiver's class of that name. Its calls are collective.

    Args:
        feature: The rows of this host's nodes, ascending by id: a tensor `[n, ...]` of any dtype, or a filled
            `Feature`. A tensor is kept whole on the device and can be written by `put` (in place, if it is there
            already).
        info: The owner of each row.
        comm: A `Communicator` or a `DistGraph` for the exchange; None makes a communicator on the default group.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one process
        >>> info = PartitionInfo("cpu", host=0, hosts=1, global2host=torch.zeros(4, dtype=torch.int64))
        >>> DistFeature(torch.arange(8.0).view(4, 2), info)[torch.tensor([3, 0])].tolist()
        [[6.0, 7.0], [0.0, 1.0]]
        >>> dist.destroy_process_group()
    """

    def __init__(self, feature: Tensor | Feature, info: PartitionInfo, comm: Any = None) -> None:
        with failures_told() if comm is None else nullcontext():
            if not isinstance(feature, (Tensor, Feature)):
                raise ArgumentTypeError(f"feature must be a tensor or a Feature, got {type(feature).__name__}")
            if not isinstance(info, PartitionInfo):
                raise ArgumentTypeError(f"info must be a PartitionInfo, got {type(info).__name__}")
            self._table: Tensor | None = None
            if isinstance(feature, Tensor):
                # Whole on the device, so that rows can be written.
                self._table = feature.detach().to(resolve_device(info.device)).contiguous()
                feature = Feature(device=info.device).from_cpu_tensor(self._table)
            if feature.shape[0] != info.own.numel():
                raise ArgumentError(f"feature must have a row for each of the {info.own.numel()} nodes of host "
                                    f"{info.host}, got {feature.shape[0]}")  # fmt: skip
            device = feature.device
            if info.device is not None and resolve_device(info.device) != device:
                raise ArgumentError(f"info must name the device of the feature, {device}, got {info.device!r}")
        comm = Communicator(device=device) if comm is None else getattr(comm, "communicator", comm)
        if not isinstance(comm, Communicator):
            raise ArgumentTypeError(f"comm must be a Communicator or a DistGraph, got {type(comm).__name__}")
        if (comm.rank, comm.size) != (info.host, info.hosts):
            raise ArgumentError(f"info must be of host {comm.rank} of {comm.size}, got {info.host} of {info.hosts}")
        self.info, self._feature, self._comm = info, feature, comm
        none = torch.empty((0, *feature.shape[1:]), dtype=feature.dtype, device="cpu")
        holding: Any = _Holding(info, none, device)
        self._holding = holding
        self._rows = RowExchange(holding, comm, {_KIND: {_NAME: feature}})
        self._keep()

    def _keep(self) -> None:
        if self.info.replicate is not None or self.info.hosts > 1:
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            ids = none if self.info.replicate is None else self.info.replicate
            self._comm.run(self._rows.keep, {_KIND: ids})

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole table, `[N, ...]`."""
        return torch.Size((self.info.book.num_nodes, *self._feature.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self._feature.dtype

    def size(self, dim: int) -> int:
        """Length of the table along `dim`.

        Args:
            dim: Number of a dimension.
        """
        return self.shape[dim]

    def __getitem__(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Read rows of nodes of all hosts; every host calls it, with its own ids."""
        ids = check_ids("ids", as_ids("ids", ids), self.info.book.num_nodes).long().to(self._holding.device)
        rows: Tensor = self._comm.run(self._fetch, ids)
        if rows.is_cuda:
            # The rows were allocated on the stream of the exchange.
            rows.record_stream(current_stream(rows.device.index))
        return rows

    def _fetch(self, ids: Tensor) -> Tensor:
        if self.info.hosts == 1:
            # Ids are positions.
            return self._rows.features[_KIND][_NAME].read(ids)
        return self._rows.fetch([Wanted(_KIND, ids)])[0][_NAME]

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """Write rows of nodes of any host, such as updated embeddings; every host calls it, with its own ids.

        If several hosts write one row, the highest host's value stays; if one host writes it twice, its last value.

        Args:
            ids: int64 `[n]`.
            rows: `[n, ...]`, in the dtype of the table.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        if self._table is None:
            raise ArgumentError("rows can be written where feature was a tensor, got a Feature, which is read only")
        ids = check_ids("ids", ids, self.info.book.num_nodes).long().to(self._holding.device)
        if rows.shape != (ids.numel(), *self.shape[1:]) or rows.dtype != self.dtype:
            raise ArgumentError(f"rows must have shape {(ids.numel(), *self.shape[1:])} and dtype {self.dtype}, got "
                                f"{tuple(rows.shape)} and {rows.dtype}")  # fmt: skip
        self._comm.run(self._write, ids, rows.detach().to(ids.device))

    def _write(self, ids: Tensor, rows: Tensor) -> None:
        assert self._table is not None
        owners, messages = self.info.book.owners(ids), []
        for host in range(self.info.hosts):
            chosen = (owners == host).nonzero().view(-1)
            count = torch.tensor([chosen.numel()], device=ids.device)
            messages.append(pack([count, ids[chosen], rows[chosen]]))
        table = self._holding.tables[_KIND]
        for message in self._comm.exchange(messages, "updates"):
            unpacker = Unpacker(message)
            num_rows = int(unpacker.take(torch.int64, 1))
            places, status = table.locate(unpacker.take(torch.int64, num_rows))
            if int(status) < 0:
                raise IdError("ids must be held by this part, got others")
            new = unpacker.take(self.dtype, num_rows, *self.shape[1:])
            # The last write to each row; the device leaves the order of repeated positions undefined.
            last = torch.zeros(table.ids.numel(), dtype=torch.int64, device=ids.device)
            last.scatter_reduce_(0, places, torch.arange(num_rows, device=ids.device), "amax", include_self=False)
            kept = (last[places] == torch.arange(num_rows, device=ids.device)).nonzero().view(-1)
            # Torch supports indexed writes only in dtypes that it computes with.
            unit = _SIGNED.get(self.dtype, self.dtype)
            self._table.view(unit)[places[kept]] = new.view(unit)[kept]
        self._keep()

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield f"{list(self.shape)} of {self.dtype}"
        yield f"host {self.info.host} of {self.info.hosts}"
