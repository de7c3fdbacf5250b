"""`TemporalDataLoader`: successive events of a `TemporalData`, after PyG's loader of that name, on the device."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import TemporalData
from torch_geometric.loader import TemporalDataLoader as PygTemporalDataLoader
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError, warn_unused
from pyg_direct.loader.arguments import WorkerOptions, settle_workers
from pyg_direct.loader.base_loader import ALONE, EpochLoader, is_said_anew, make_batch
from pyg_direct.loader.batch_report import EpochRecord
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.memory_placement import Placed
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.object_text import show_count, show_options
from pyg_direct.ops.argument_checks import check_count, check_number, checks_keywords
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.sampling.draw_random import draw_below
from pyg_direct.profiling import show_bytes
from pyg_direct.runtime.cuda.device import budget_of, free_bytes, resolve_device
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.typing import Device


class TemporalDataLoader(EpochLoader, PygTemporalDataLoader):  # type: ignore[misc]
    """Batches of successive events, after PyG's `TemporalDataLoader`, on `device`.

    Events are cut in their given order; their times may go backwards. Without a `seed`, negatives are drawn when a
    batch is requested, from torch's generator where the events lie, as in PyG under the same `torch.manual_seed`.

    Args:
        data: Events.
        batch_size: Events per batch.
        neg_sampling_ratio: Negative destinations per event, drawn between the lowest and the highest `dst`.
        device: Device of the batches; None is the current GPU if there is one, otherwise the CPU.
        placement: Memory of the events: `cuda`, or `unified` or `pinned` for host memory, from which batches are
            copied; `auto` is GPU memory if it has room; `cpu` on a CPU.
        seed: Seed of the negatives; with it, batches are a function of seed, epoch and number, and can be prefetched.
        prefetch: Batches prepared ahead; None is 1 on a GPU, and 0 on a CPU.
        **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `drop_last`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
        DeviceError: `device` is a GPU that does not exist.

    Example:
        >>> from torch_geometric.data import TemporalData
        >>> src, dst, t = torch.tensor([[0, 1, 0], [2, 3, 3], [1, 4, 5]])
        >>> loader = TemporalDataLoader(TemporalData(src=src, dst=dst, t=t), batch_size=2, device="cpu")
        >>> [batch.n_id.tolist() for batch in loader]
        [[0, 1, 2, 3], [0, 3]]
    """

    transform = None
    transform_sampler_output = None
    # Events on the device of the batches, or None if batches are copied there; and the values that were placed.
    _placed: tuple[list[Any], TemporalData | None] | None = None

    @checks_keywords
    def __init__(self, data: TemporalData, batch_size: int = 1, neg_sampling_ratio: float = 0.0, *,
                 device: Device = None, placement: str = "auto", seed: int | None = None, prefetch: int | None = None,
                 **kwargs: Unpack[WorkerOptions]) -> None:  # fmt: skip
        if not isinstance(data, TemporalData):
            raise ArgumentTypeError(f"data must be TemporalData, got {type(data).__name__}")
        prefetch = int(resolve_device(device).type == "cuda") if prefetch is None else prefetch
        self._settle(device, placement, None, None, 1, seed, prefetch)
        check_count("batch_size", batch_size)
        _check_events(data)
        ratio = _check_ratio(neg_sampling_ratio)
        if ratio > 0 and data.num_events == 0:
            raise ArgumentError("data must have events for neg_sampling_ratio > 0, got none")
        options = settle_workers(type(self), kwargs, self.device, may_start=False)
        if options.pop("shuffle", None):
            warn_unused({"shuffle": True}, "events come in their order")
        with torch.device("cpu"):
            PygTemporalDataLoader.__init__(self, data, batch_size, ratio, **options)
        self.starts = torch.arange(len(self.dataset), device="cpu") * batch_size

    def _prepare(self) -> None:
        _check_events(self.data)
        values = list(self.data._store.values())
        if self._placed is not None and len(values) == len(self._placed[0]) \
                and all(value is known for value, known in zip(values, self._placed[0], strict=True)):  # fmt: skip
            return
        placed = None
        if all(value.device == self.device for value in self._tensors()):
            placed = self.data
        elif self.placement == "cuda" or (self.placement == "auto" and self._has_room()):
            placed = copy.copy(self.data).to(self.device)
        self._placed = values, placed

    def _has_room(self) -> bool:
        is_gpu = self.device.type == "cuda"
        return is_gpu and self._count_bytes() <= budget_of(free_bytes(self.device.index))

    def _tensors(self) -> Iterator[Tensor]:
        return (value for value in self.data._store.values() if isinstance(value, Tensor))

    def _count_bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in self._tensors())

    def _input(self) -> Tensor:
        return self.starts

    def _is_own(self) -> bool:
        return True

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> _Cut:
        return _Cut(self._cut(int(seeds.nodes[0]), None if self.seed is None else key.of_batch(number)))

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        return sample.batch

    def _cut(self, start: int, key: int | None) -> TemporalData:
        """Return the batch of events from `start` on, on the device."""
        assert self._placed is not None
        some, placed = slice(start, start + self.events_per_batch), self._placed[1]
        src, dst = self.data.src[some], self.data.dst[some]
        n_ids, extra = [src, dst], {}
        if self.neg_sampling_ratio > 0:
            n_ids.append(self._draw_negatives(dst, key))
            extra["neg_dst"] = n_ids[-1]
        extra["n_id"] = torch.cat(n_ids).unique()
        batch = (self.data if placed is None else placed)[some]
        if placed is None:
            batch = batch.apply(self._upload)
        for name, ids in extra.items():
            batch[name] = self._upload(ids)
        return batch

    def _draw_negatives(self, dst: Tensor, key: int | None) -> Tensor:
        count = round(self.neg_sampling_ratio * dst.numel())
        if key is None:
            return torch.randint(self.min_dst, self.max_dst + 1, (count,), dtype=dst.dtype, device=dst.device)
        drawn = draw_below(torch.arange(count, device=dst.device), self.max_dst - self.min_dst + 1, key=key)
        return (drawn + self.min_dst).to(dst.dtype)

    def _upload(self, value: Any) -> Any:
        return upload(value, self.device) if isinstance(value, Tensor) else value

    def __call__(self, arange: list[int]) -> TemporalData:
        """Return the batch that begins at event `arange[0]` (PyG's `collate_fn`)."""
        self._prepare()
        return self._cut(int(arange[0]), None)

    def _work_here(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None = None
                   ) -> Iterator[Any]:  # fmt: skip
        if is_said_anew(self, "__call__"):
            return (self([int(seeds.nodes[0])]) for _, seeds in batches)
        if self.prefetch and (self.seed is not None or self.neg_sampling_ratio == 0):
            return super()._work_here(key, batches, record)
        # Not ahead: draws of the model would come in another order than in PyG.
        stages = self._stages(key, record)
        return (make_batch(stages, number, seeds) for number, seeds in batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader; see `NeighborLoader.state_dict`."""
        return {**super().state_dict(), "batch_size": self.events_per_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; see `NeighborLoader.load_state_dict`.

        Args:
            state: Result of `state_dict`.

        Raises:
            ArgumentError: not a state of a loader, or a state of a loader with other batches.
        """
        size = state.get("batch_size", self.events_per_batch) if isinstance(state, dict) else None
        if size is not None and size != self.events_per_batch:
            raise ArgumentError(f"state must be of a loader of equal batches, with batch_size={self.events_per_batch}, "
                                f"got {size!r}")  # fmt: skip
        super().load_state_dict({**state, "batch_size": self.batch_size} if isinstance(state, dict) else state)

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        self._prepare()
        return [f"events: {self.data.num_events}, {show_bytes(self._count_bytes())} on {self._where()}"], {}

    def _where(self) -> str:
        assert self._placed is not None
        return "cpu" if self._placed[1] is None else str(self.device)

    def _list_parts(self) -> Iterator[str]:
        yield show_count(self.data.num_events, "event")
        yield from show_options(batch_size=self.events_per_batch, neg_sampling_ratio=self.neg_sampling_ratio or None)
        yield show_count(len(self), "batch", "batches")
        yield str(self.device)

    def _summarise_places(self) -> Iterable[Placed] | None:
        return None if self._placed is None else [Placed("events", self._count_bytes(), self._where())]


class _Cut:
    """A complete batch."""

    def __init__(self, batch: TemporalData) -> None:
        self.batch = batch

    def finish(self) -> _Cut:
        """Return itself: there is no wait."""
        return self

    def record_stream(self, stream: Any) -> None:
        """Mark the batch as used on a stream."""
        for value in self.batch._store.values():
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)


def _check_events(data: TemporalData) -> None:
    """Check that events have both ends, one of each per event."""
    for name in ("src", "dst"):
        ends = data._store.get(name)
        if not isinstance(ends, Tensor) or ends.dim() != 1:
            found = tuple(ends.shape) if isinstance(ends, Tensor) else type(ends).__name__
            raise ArgumentTypeError(f"data.{name} must be a tensor of one dimension, got {found}")
    if data.src.numel() != data.dst.numel():
        raise ArgumentError(f"data.dst must have an end for each of the {data.src.numel()} events of data.src, got "
                            f"{data.dst.numel()}")  # fmt: skip
    if data.src.device != data.dst.device:
        raise ArgumentError(f"data.dst must be on the device of data.src ({data.src.device}), got {data.dst.device}")


def _check_ratio(ratio: Any) -> float:
    """Check a number of negatives per event."""
    if not 0 <= check_number("neg_sampling_ratio", ratio) < math.inf:
        raise ArgumentError(f"neg_sampling_ratio must be finite and at least 0, got {ratio!r}")
    return float(ratio)
