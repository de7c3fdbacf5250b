"""`LastNeighborLoader` and `TGNMemory`: PyG's classes for temporal graph networks (Rossi et al., 2020), without Python
for each node.

PyG keeps the events of a node's latest batch in dictionaries with tensors for each node, and joins them for each batch.
Here they lie in a log on the device of the memory. With PyG's `LastAggregator` and `IdentityMessage`, only the message
that counts is computed for a node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models.tgn import (
    IdentityMessage as IdentityMessage,
    LastAggregator as LastAggregator,
    LastNeighborLoader as PygLastNeighborLoader,
    MeanAggregator as MeanAggregator,
    TGNMemory as PygTGNMemory,
    TimeEncoder as TimeEncoder,
)
from torch_geometric.utils import scatter
from torch_geometric.utils._scatter import scatter_argmax

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.loader.base_loader import SavedAsPyg
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.argument_checks import check_count, check_ids, check_integers, in_short
from pyg_direct.ops.keep_last_events import LastNeighbors, MessageLog, check_events, insert_events, read_rows
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.progress import announce
from pyg_direct.runtime.cuda.device import resolve_device

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


class LastNeighborLoader(SavedAsPyg, PygLastNeighborLoader):  # type: ignore[misc]
    """Latest neighbors of each node in a growing graph of events, on one device, after PyG's class of that name.

    Kernels write and read the rows; a call waits for a GPU once. If a node has more than `size` events in one
    `insert`, the last ones stay. PyG then keeps `size` of them that depend on torch's sort, which is not stable.

    Args:
        num_nodes: N.
        size: Neighbors to keep of each node.
        device: Device of the rows; None is torch's default device, as in PyG.

    Attributes:
        neighbors: The other nodes of the latest events, int64 `[N, size]`, the latest first.
        e_id: Numbers of these events, int64 `[N, size]`; -1 after the last one.
        cur_e_id: Number of the next event.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
        DeviceError: `device` is a GPU that does not exist.

    Example:
        >>> loader = LastNeighborLoader(num_nodes=4, size=2)
        >>> loader.insert(torch.tensor([0, 0]), torch.tensor([2, 3]))
        >>> n_id, edge_index, e_id = loader(torch.tensor([0]))
        >>> n_id.tolist(), edge_index.tolist(), e_id.tolist()
        ([0, 2, 3], [[2, 1], [0, 0]], [1, 0])
    """

    _BEYOND_PYG = frozenset({"_state"})

    def __init__(self, num_nodes: int, size: int, device: Any = None) -> None:
        self.size = check_count("size", size)
        rows = LastNeighbors.open(check_count("num_nodes", num_nodes), self.size,
                                  torch.get_default_device() if device is None else resolve_device(device))  # fmt: skip
        self.neighbors, self.e_id, self._state = rows
        self._assoc = self.neighbors.new_empty(num_nodes)
        self.reset_state()

    def __call__(self, n_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return nodes with their latest neighbors.

        Args:
            n_id: Nodes, int64 or int32 `[n]`, on the device of the rows.

        Returns:
            The nodes and their neighbors, ascending, int64 `[U]`; edges from neighbors to nodes, as places in these,
            int64 `[2, E]`; the numbers of their events, int64 `[E]`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value; on a GPU also for an id of an
                earlier `insert`.
        """
        return read_rows(self._rows(), n_id)

    def insert(self, src: Tensor, dst: Tensor) -> None:
        """Add events, which are later than all before.

        Args:
            src, dst: Ends of the events, int64 or int32 `[B]`, on the device of the rows.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value; ids on a GPU are reported by the
                next call.
        """
        insert_events(self._rows(), src, dst, self.cur_e_id)
        self.cur_e_id += src.numel()

    def reset_state(self) -> None:
        """Drop all events."""
        self.cur_e_id = 0
        self.e_id.fill_(-1)
        self._state.zero_()

    def _rows(self) -> LastNeighbors:
        return LastNeighbors(self.neighbors, self.e_id, self._state)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(len(self.e_id), "node")
        yield f"size={self.size}"
        yield show_count(self.cur_e_id, "event")
        yield str(self.e_id.device)


class MessageStore(Mapping[int, tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Events of each node's latest batch in one role, as PyG's dictionary has them: own ends, other ends, times and
    messages.
    """

    def __init__(self, log: MessageLog, role: str) -> None:
        self._log, self._role = log, role

    def __getitem__(self, node: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if isinstance(node, Tensor) or node not in range(len(self)):
            raise KeyError(node)
        role = getattr(self._log, self._role)
        rows = role.rows[int(role.begins[node]) : int(role.ends[node])]
        src, dst, t, msg = (values[rows] for values in self._log.events)
        return (src, dst, t, msg) if self._role == "as_src" else (dst, src, t, msg)

    def to_dict(self) -> dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return PyG's dictionary."""
        role, ends = getattr(self._log, self._role), ("src", "dst") if self._role == "as_src" else ("dst", "src")
        events = self._log.events
        values = [part[role.rows] for part in (*(getattr(events, end) for end in ends), events.t, events.msg)]
        bounds = zip(role.begins.tolist(), role.ends.tolist(), strict=True)
        return {node: tuple(part[begin:end] for part in values) for node, (begin, end) in enumerate(bounds)}

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self._log.num_nodes


class TGNMemory(SavedAsPyg, PygTGNMemory):  # type: ignore[misc]
    """Memory of temporal graph networks (Rossi et al., 2020), after PyG's class of that name, with its results.

    Messages wait in tensors on the device of the memory. If `raw_msg` requires a gradient, or has another dtype than
    the memory, they are left to PyG's dictionaries, which is logged once. Of equal times of a node the event with the
    larger number counts, as in PyG on a CPU. State dictionaries are PyG's.

    Args:
        num_nodes: N.
        raw_msg_dim: Values of a raw message.
        memory_dim: Values of a node's memory.
        time_dim: Values of an encoded time.
        message_module: Module that makes messages of both nodes' memory, raw messages and encoded times, with
            `out_channels`.
        aggregator_module: Module that joins the messages of a node.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator
        >>> memory = TGNMemory(4, 1, 2, 2, IdentityMessage(1, 2, 2), LastAggregator())
        >>> memory.update_state(torch.tensor([0]), torch.tensor([1]), torch.tensor([5]), torch.ones(1, 1))
        >>> memory(torch.tensor([0, 1, 2]))[1].tolist()  # times of the last updates
        [5, 5, 0]
    """

    _BEYOND_PYG = frozenset({"_log"})
    _log: MessageLog | None = None
    msg_s_store: Any
    msg_d_store: Any

    def __init__(self, num_nodes: int, raw_msg_dim: int, memory_dim: int, time_dim: int,
                 message_module: Callable[..., Tensor], aggregator_module: Callable[..., Tensor]) -> None:  # fmt: skip
        for name, value in (("num_nodes", num_nodes), ("memory_dim", memory_dim), ("time_dim", time_dim)):
            check_count(name, value)
        super().__init__(num_nodes, raw_msg_dim, memory_dim, time_dim, message_module, aggregator_module)

    def forward(self, n_id: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory of nodes, with the messages that wait in training mode, and the times of their last update.

        Args:
            n_id: Nodes, each once, int64 or int32 `[n]`, on the device of the memory.

        Returns:
            `[n, memory_dim]`, and int64 `[n]`; in training 0 for a node without a waiting message, as in PyG.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value; ids on a GPU are reported by the
                next `update_state`.
        """
        n_id = check_ids("n_id", n_id, self.num_nodes).long().to(self.memory.device)
        if self._log is not None and n_id.is_cuda and not (self.training and self._takes_last(n_id)):
            # Ids outside [0, N) do not reach torch's kernels, which would end the process's use of the GPU.
            n_id = self._log.check(n_id)
        return super().forward(n_id)  # type: ignore[no-any-return]

    def update_state(self, src: Tensor, dst: Tensor, t: Tensor, raw_msg: Tensor) -> None:
        """Note a batch of events, and bring the memory of their nodes up to date.

        In training mode the memory takes the messages of earlier batches, in evaluation also those of this batch.

        Args:
            src, dst: Ends of the events, int64 or int32 `[B]`.
            t: Their times, integers `[B]`; they may go backwards.
            raw_msg: Their messages, of the memory's dtype, `[B, raw_msg_dim]`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        src, dst = check_events(self.num_nodes, src, dst)
        self._check_messages(src.numel(), t, raw_msg)
        if self._log is not None and raw_msg.requires_grad and torch.is_grad_enabled():
            self._leave("raw_msg requires a gradient")
        elif self._log is not None and raw_msg.dtype != self.memory.dtype:
            self._leave(f"raw_msg is of {raw_msg.dtype} and the memory of {self.memory.dtype}")
        if src.numel() == 0:
            return
        log = self._log
        if log is None:
            super().update_state(src, dst, t, raw_msg)
            return
        src, dst, t, raw_msg = (values.to(self.device) for values in (src, dst, t.long(), raw_msg))
        n_id = torch.cat([src, dst]).unique()
        if n_id.is_cuda:
            self._check_on_gpu(log, n_id)
        if self.training:
            self._update_memory(n_id)
            log.insert(src, dst, t, raw_msg)
        else:
            log.insert(src, dst, t, raw_msg)
            self._update_memory(n_id)

    def _check_messages(self, count: int, t: Tensor, raw_msg: Tensor) -> None:
        for name, values, shape in (("t", t, (count,)), ("raw_msg", raw_msg, (count, self.raw_msg_dim))):
            if not isinstance(values, Tensor):
                raise ArgumentTypeError(f"{name} must be a tensor of shape {shape}, got {in_short(values)}")
            if values.shape != shape:
                raise ArgumentError(f"{name} must have shape {shape}, got {tuple(values.shape)}")
        check_integers("t", t)

    def _check_on_gpu(self, log: MessageLog, n_id: Tensor) -> None:
        """Check ascending ids, and ids of reads before, after the wait for a GPU."""
        low, high, read = torch.cat([n_id[:1], n_id[-1:], log.errors]).tolist()
        if low < 0 or high >= self.num_nodes:
            raise IdError(f"src and dst must lie in [0, {self.num_nodes}), got {low if low < 0 else high}")
        if read:
            log.errors.zero_()
            raise IdError(f"n_id must lie in [0, {self.num_nodes}), got {read}")

    def _reset_message_store(self) -> None:
        width, dtype, device = self.raw_msg_dim, self.memory.dtype, self.memory.device
        if self._log is not None and self._log.device == device and self._log.events.msg.dtype == dtype:
            self._log.clear()
            return
        self._log = log = MessageLog(self.num_nodes, width, dtype, device)
        self.msg_s_store, self.msg_d_store = MessageStore(log, "as_src"), MessageStore(log, "as_dst")

    def _leave(self, reason: str) -> None:
        """Keep messages in PyG's dictionaries until the next reset."""
        announce(f"messages of a TGNMemory are left to PyG until its next reset: {reason}")
        self.msg_s_store, self.msg_d_store = self.msg_s_store.to_dict(), self.msg_d_store.to_dict()
        self._log = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)
        if self._log is not None:
            self._log.move(self.memory.device, self.memory.dtype)
        return moved

    def _get_updated_memory(self, n_id: Tensor) -> tuple[Tensor, Tensor]:
        log = self._log
        if log is None:
            return super()._get_updated_memory(n_id)  # type: ignore[no-any-return]
        if self._takes_last(n_id):
            return self._take_last(log, n_id)
        self._assoc[n_id] = torch.arange(n_id.size(0), device=n_id.device)
        msg_s, t_s, src_s = self._make_messages(log, "as_src", n_id)
        msg_d, t_d, src_d = self._make_messages(log, "as_dst", n_id)
        idx, t = torch.cat([src_s, src_d]), torch.cat([t_s, t_d])
        aggregate = _choose_last if self._chooses_last(n_id) else self.aggr_module
        aggr = aggregate(torch.cat([msg_s, msg_d]), self._assoc[idx], t, n_id.size(0))
        last_update = scatter(t, self._assoc[idx], 0, n_id.size(0), reduce="max")
        return self.gru(aggr, self.memory[n_id]), last_update

    def _make_messages(self, log: MessageLog, name: str, n_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make all messages of nodes in a role: (messages, times, own ends)."""
        rows = log.list_events(getattr(log, name), n_id)
        ends, others = (log.events.src, log.events.dst) if name == "as_src" else (log.events.dst, log.events.src)
        src, dst, t, raw_msg = ends[rows], others[rows], log.events.t[rows], log.events.msg[rows]
        t_enc = self.time_enc((t - self.last_update[src]).to(raw_msg.dtype))
        module = self.msg_s_module if name == "as_src" else self.msg_d_module
        return module(self.memory[src], self.memory[dst], raw_msg, t_enc), t, src

    def _takes_last(self, n_id: Tensor) -> bool:
        """Check if only the latest message of each node is made: where none has a part that is learned, on a GPU.

        A CPU makes all of them, in PyG's order: it takes as long, and gradients are equal to PyG's to the last bit.
        """
        modules = self.msg_s_module, self.msg_d_module, self.time_enc
        kinds = IdentityMessage, IdentityMessage, TimeEncoder
        return self._chooses_last(n_id) and all(map(_is_plain, modules, kinds))

    def _chooses_last(self, n_id: Tensor) -> bool:
        """Check if the latest message of each node counts, on a GPU: PyG's module takes any of equal times there."""
        return runs_on_gpu(n_id) and _is_plain(self.aggr_module, LastAggregator)

    def _take_last(self, log: MessageLog, n_id: Tensor) -> tuple[Tensor, Tensor]:
        chosen = log.choose(n_id, self.last_update, n_id.numel() - 1 if _takes_stand_in() else -1)
        memory, own, other = self.memory[chosen.nodes]
        raw_msg = log.events.msg[chosen.rows.clamp(min=0)]
        t_enc = self.time_enc(chosen.elapsed.to(raw_msg.dtype))
        msg = self.msg_s_module(own, other, raw_msg, t_enc)
        aggr = torch.where((chosen.rows >= 0).unsqueeze(1), msg, msg.new_zeros(()))
        return self.gru(aggr, memory), chosen.t

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        if self._pyg_class is not None and self._log is not None:
            made[2].update({name: made[2][name].to_dict() for name in ("msg_s_store", "msg_d_store")})
        return made


def _is_plain(module: Any, kind: type) -> bool:
    """Check if a module is of that class of PyG, unchanged."""
    hooks = (getattr(module, name) for name in _HOOKS)
    return type(module) is kind and "forward" not in module.__dict__ and not any(hooks)


def _choose_last(msg: Tensor, index: Tensor, t: Tensor, dim_size: int) -> Tensor:
    """Return the latest message of each node, as PyG's `LastAggregator` on a CPU: of equal times the last one."""
    if not t.numel():
        # With a gradient, of zeros, for what makes messages.
        return msg.new_zeros(dim_size, msg.shape[1]).index_add(0, index, msg)
    latest = t.new_zeros(dim_size).scatter_reduce_(0, index, t, "amax", include_self=False)
    place = torch.where(t == latest[index], torch.arange(t.numel(), device=t.device), -1)
    chosen = index.new_full((dim_size,), dim_size - 1 if _takes_stand_in() else t.numel())
    chosen.scatter_reduce_(0, index, place, "amax", include_self=False)
    return torch.where((chosen < t.numel()).unsqueeze(1), msg[chosen.clamp(max=t.numel() - 1)], msg.new_zeros(()))


@functools.cache
def _takes_stand_in() -> bool:
    """Check if PyG's `LastAggregator` gives a node without messages another node's message.

    Without torch-scatter, PyG takes n - 1 for the number that stands for none of the messages of n nodes. So it is the
    message of that number, if there are as many.
    """
    three = torch.zeros(3, dtype=torch.int64, device="cpu")
    return bool(scatter_argmax(three, three, dim_size=2)[1] == 1)
