"""Samplers with keys: the interface between our loaders and our samplers, beyond PyG's.

`to_output` and `to_general_output` give samples PyG's form. `Drawn` is the output of a general sampler on its way
through a pipeline.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, SamplerOutput

from pyg_direct.errors import ArgumentError, ArgumentTypeError, warn_unused
from pyg_direct.graph.hetero_topo import LINKS, NODES, EdgeType
from pyg_direct.sampling.hetero_sample import GeneralSample
from pyg_direct.sampling.random_key import call_key
from pyg_direct.sampling.sampling_options import Sample
from pyg_direct.typing import Device

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput
# Steps of sampling that a user's subclass or a patch may override.
_STEPS = (
    "sample_from_nodes",
    "sample_from_edges",
    "submit_together",
    "submit_links_together",
    "submit_from_nodes",
    "submit_from_edges",
    "edge_permutation",
    "_sample",
    "_open_links",
    "_negatives",
    "open_plan",
    "_make_plan",
    "_next_key",
)
# Attributes of samplers that left a GPU in this worker process: it cannot free the memory of its parent.
_LEFT: list[dict[str, Any]] = []
# Per thread: the key of the requested batch, and how often it was taken.
_ASKED = threading.local()


class OwnSampler(BaseSampler):  # type: ignore[misc]
    """Base of samplers on `device`; draws are functions of a key, and results have final edge ids."""

    device: torch.device
    seed: int | None
    _num_calls: int
    _chooses_device: bool
    edge_permutation = None
    # `forward`: edges lead to the expanded nodes.
    sample_direction = "forward"
    # Reads the steps that the nearest base class of the package has, and its steps.
    _read_steps: Any = attrgetter("sample_from_nodes")
    _own_steps: Any = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.partition(".")[0] == "pyg_direct":
            # In one call, several times a batch.
            cls._read_steps = attrgetter(*[name for name in _STEPS if hasattr(cls, name)])
            cls._own_steps = cls._read_steps(cls)

    @property
    def num_nodes(self) -> int | dict[str, int]:
        """Number of nodes, by type in a graph with types."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Read the graph again, so that edits take effect."""
        raise NotImplementedError

    def change_data(self, data: Any) -> None:
        """Sample from another graph.

        Args:
            data: The graph, as of the constructor.
        """
        self.data = data

    def _open_topology(self) -> Any:
        """Open the topology, which ranks rows for caches."""
        raise NotImplementedError

    def summarise(self) -> str:
        """Describe the topology in a line, for reports."""
        return f"topology: {self._open_topology()}"

    def _leave_gpu_in_worker(self) -> None:
        """Sample on the CPU in a worker of a PyG loader, which cannot use its parent's GPU; draws do not change."""
        if self.device.type == "cuda" and torch.utils.data.get_worker_info() is not None:
            _LEFT.append(dict(self.__dict__))
            self.device, self._chooses_device = torch.device("cpu"), False
            self._forget_plans()

    def _forget_plans(self) -> None:
        """Forget everything that is placed on the device, whose successor is the CPU."""
        raise NotImplementedError

    def _next_key(self) -> int:
        """Return the key of the batch that a loader requests, or of the next call outside an epoch."""
        key = take_key()
        if key is not None:
            return key
        self._num_calls += 1
        return call_key(self.seed, self._num_calls - 1)


def is_own(sampler: Any, kind: type[OwnSampler] | None = None) -> bool:
    """Check if a sampler overrides no step of a class of ours, by default its nearest base class in the package.

    Samples of other samplers are not trusted: their ids and their order are checked.
    """
    if not isinstance(sampler, OwnSampler if kind is None else kind):
        return False
    cls: Any = type(sampler)
    base = cls if kind is None else kind
    return bool(base._read_steps(cls) == base._own_steps) and sampler.__dict__.keys().isdisjoint(_STEPS)


def take_key() -> int | None:
    """Take the key of the thread's batch, a new one for each call; None outside of `under_key`."""
    key: int | None = getattr(_ASKED, "key", None)
    if key is None:
        return None
    _ASKED.times += 1
    return key if _ASKED.times == 1 else call_key(key, _ASKED.times)


@contextmanager
def under_key(key: int) -> Iterator[None]:
    """Draw by a key in all of our samplers that this thread calls in this block."""
    before = getattr(_ASKED, "key", None), getattr(_ASKED, "times", 0)
    _ASKED.key, _ASKED.times = key, 0
    try:
        yield
    finally:
        _ASKED.key, _ASKED.times = before


def ask(sampler: Any, method: str, key: int | None, *args: Any, **kwargs: Any) -> Any:
    """Call a sampler's method on seeds or links; samplers of ours that it calls draw under the key too."""
    sample = getattr(sampler, method)
    if key is None:
        return sample(*args, **kwargs)
    if is_own(sampler):
        return sample(*args, key=key, **kwargs)
    # A method that a user's class overrides may take only PyG's arguments.
    if isinstance(sampler, OwnSampler) and _takes_key(getattr(sample, "__func__", sample)):
        kwargs["key"] = key
    with under_key(key):
        return sample(*args, **kwargs)


@functools.lru_cache(maxsize=64)
def _takes_key(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "key" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def check_sampler(name: str, sampler: Any, method: str) -> None:
    """Raise unless a sampler, an argument of this name, has the method `method`."""
    if not callable(getattr(sampler, method, None)):
        raise ArgumentTypeError(f"{name} must have {method}, as PyG's BaseSampler, got {type(sampler).__name__}")


# Defaults of arguments of samplers.
_DEFAULTS = {"replace": False, "subgraph_type": "directional", "disjoint": False, "temporal_strategy": "uniform",
             "is_sorted": False, "directed": True, "time_comparison": "<=", "sampling": "uniform",
             "layer_dependency": False}  # fmt: skip


def check_is_used(sampler: Any, own: Mapping[str, Any], of_pyg: Mapping[str, Any]) -> None:
    """Refuse sampling options beside a sampler, which has its own. PyG ignores its own options there: these only warn.

    Args:
        sampler: The sampler given; None if the loader makes one from these options.
        own, of_pyg: Options that PyG does not have, and options that PyG has, by name.
    """
    if sampler is None:
        return
    for name, value in own.items():
        if value != _DEFAULTS.get(name):
            raise ArgumentError(f"{name}={value!r} needs neighbor_sampler=None: it belongs to the sampler, if one is "
                                "given")  # fmt: skip
    unused = {name: value for name, value in of_pyg.items()
              if getattr(value, "value", value) != _DEFAULTS.get(name)}  # fmt: skip
    warn_unused(unused, "they belong to neighbor_sampler, which is given")


def device_for(device: Device, sampler: Any) -> Device:
    """Return `device`, or the device of a sampler of ours if `device` is None."""
    return sampler.device if device is None and isinstance(sampler, OwnSampler) else device


def to_output(sample: Sample, input_id: Tensor | None = None) -> SamplerOutput:
    """Give a uniform sample PyG's form."""
    out = SamplerOutput(node=sample.n_id, row=sample.edge_index[0], col=sample.edge_index[1], edge=sample.e_id,
                        num_sampled_nodes=sample.num_sampled_nodes, num_sampled_edges=sample.num_sampled_edges,
                        metadata=(input_id, None))  # fmt: skip
    out.max_degree = sample.max_degree
    return out


def check_output(out: Any) -> SamplerOutput:
    """Check that a user's transform returned PyG's form."""
    if not isinstance(out, SamplerOutput):
        raise ArgumentTypeError(f"transform_sampler_output must return a SamplerOutput, got {type(out).__name__}")
    return out


class PackedOutput(HeteroSamplerOutput):  # type: ignore[misc]
    """A `GeneralSample` in PyG's form, whose `row` and `col` are made at the first read."""

    def __init__(self, sample: GeneralSample) -> None:
        self._sample: GeneralSample = sample
        self._ends: tuple[Any, Any] | None = None
        self.max_degree, self.node_rows = sample.max_degree, sample.rows
        super().__init__(sample.node, None, None, sample.edge, sample.batch, sample.num_sampled_nodes,
                         sample.num_sampled_edges)  # fmt: skip

    def __reduce__(self) -> Any:
        # Pickled as PyG's class, with all tensors made.
        more = {name: value for name, value in self.__dict__.items() if name not in ("_sample", "_ends")}
        return HeteroSamplerOutput, (self.node, self.row, self.col, self.edge), more

    def __copy__(self) -> PackedOutput:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    @property
    def packed(self) -> GeneralSample | None:
        """The sample, if its types share memory and `row` and `col` were not read: the reader may have changed them."""
        return self._sample if self._ends is None and self._sample.memory else None

    def _open(self) -> tuple[Any, Any]:
        if self._ends is None:
            self._ends = self._sample.row, self._sample.col
        return self._ends

    @property
    def row(self) -> dict[EdgeType, Tensor]:
        """Local ids of sources, int64 `[E']` by relation."""
        return self._open()[0]  # type: ignore[no-any-return]

    @row.setter
    def row(self, row: Any) -> None:
        if row is not None:
            self._ends = row, self._open()[1]

    @property
    def col(self) -> dict[EdgeType, Tensor]:
        """Local ids of targets, int64 `[E']` by relation."""
        return self._open()[1]  # type: ignore[no-any-return]

    @col.setter
    def col(self, col: Any) -> None:
        if col is not None:
            self._ends = self._open()[0], col


def to_general_output(sample: GeneralSample, is_hetero: bool) -> SamplerOutput | HeteroSamplerOutput:
    """Give any sample PyG's form."""
    if is_hetero:
        return PackedOutput(sample)
    nodes, edges = sample.num_sampled_nodes, sample.num_sampled_edges
    out = SamplerOutput(
        sample.node[NODES], *sample.edge_index[LINKS].unbind(), sample.edge[LINKS],
        None if sample.batch is None else sample.batch[NODES], None if nodes is None else nodes[NODES],
        None if edges is None else edges[LINKS],
    )  # fmt: skip
    # In a graph in parts, the rows of an edge lie with one of its ends.
    out.sampled, out.max_degree, out.node_rows = sample.sampled, sample.max_degree, sample.rows
    out.pair = sample.edge_index[LINKS]
    return out


def move_output(out: Output, device: torch.device) -> Output:
    """Give the output of a batch that was sampled with others memory of its own, on a device."""
    if isinstance(out, HeteroSamplerOutput):
        node, row, col = ({kind: ids.to(device, copy=True) for kind, ids in part.items()}
                          for part in (out.node, out.row, out.col))  # fmt: skip
        edge, batch = (
            None
            if part is None
            else {kind: None if ids is None else ids.to(device, copy=True) for kind, ids in part.items()}
            for part in (out.edge, out.batch)
        )
        moved = HeteroSamplerOutput(node, row, col, edge, batch, out.num_sampled_nodes, out.num_sampled_edges)
    else:
        pair = torch.stack([out.row, out.col]).to(device)
        edge, batch = (None if part is None else part.to(device, copy=True) for part in (out.edge, out.batch))
        moved = SamplerOutput(out.node.to(device, copy=True), *pair.unbind(), edge, batch, out.num_sampled_nodes,
                              out.num_sampled_edges)  # fmt: skip
        moved.sampled, moved.node_rows, moved.pair = None, None, pair
    moved.max_degree = out.max_degree
    if out.metadata is not None:
        # Seeds stay where they are.
        moved.metadata = out.metadata[0], *(part.to(device) if isinstance(part, Tensor) else part
                                            for part in out.metadata[1:])  # fmt: skip
    return moved


class Drawn:
    """Output of a sampler on its way through a pipeline."""

    def __init__(self, out: Output) -> None:
        self.out = out

    def finish(self) -> Drawn:
        """Return the output itself: it is complete."""
        return self

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Mark the sample as used on `stream` for torch's allocator."""
        for value in self.tensors():
            if value.is_cuda:
                value.record_stream(stream)

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the tensors of the sample, or over the memory that they share."""
        out = self.out
        packed = out.packed if isinstance(out, PackedOutput) else None
        if packed is None:
            own: tuple[Any, ...] = (out.node, out.row, out.col, out.edge, out.batch)
        else:
            own = (*packed.memory, None if out.batch is packed.batch else out.batch)
        for part in (*own, *(out.metadata or ())):
            for value in part.values() if isinstance(part, Mapping) else (part,):
                if isinstance(value, Tensor):
                    yield value
