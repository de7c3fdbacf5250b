"""What all loaders share: epochs that can be resumed, batches made ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count as count_from, islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.features.feature import Feature
from pyg_direct.loader.background import Background
from pyg_direct.loader.batches import Seeds, can_share, describe_batches, iterate_batches
from pyg_direct.loader.hooks import check_hooks, is_said_anew
from pyg_direct.loader.pipeline import Pipeline, take_memory
from pyg_direct.loader.placement import PLACES, announce, check_place
from pyg_direct.loader.ranks import Ranks, Share
from pyg_direct.loader.record import EpochRecord, Stages, finish_sample
from pyg_direct.loader.report import ReportedLoader
from pyg_direct.loader.slicer import find_learned, has_learned
from pyg_direct.loader.steps import Steps
from pyg_direct.loader.superbatch import SharedFetch, SharedRows, SuperBatch
from pyg_direct.runtime.device import resolve_device
from pyg_direct.runtime.mode import ordinary_tensors
from pyg_direct.runtime.size import parse_size
from pyg_direct.sampling.key import resolve_seed
from pyg_direct.typing import Device

# A batch that shares no rows with others.
ALONE: Mapping[str, SharedRows] = MappingProxyType({})
# What a loader holds of the memory of its process.
_PLACED = ("_attributes", "_general", "_placed", "_plan", "_plan_topology", "_planned", "_recorder")
_END = object()


class EpochLoader(ReportedLoader):
    """Iterates over epochs: which batch is made of what, when, and how far ahead.

    Loaders say how a batch is sampled (`_submit`) and made (`_fetch`), and what to place first (`_prepare`).
    """

    device: torch.device
    seed: int
    prefetch: int
    super_batch: int | None
    transform: Any
    transform_sampler_output: Any
    num_workers: int
    # How processes of a group keep node attributes together; see `NeighborLoader`.
    sharing: Mapping[str, str] = MappingProxyType({})
    # Whether processes whose seeds are their own, without `ranks`, still agree on the number of batches.
    _evens_out_alone = False

    def enable_cpu_affinity(self, loader_cores: Any = None) -> AbstractContextManager[Any]:
        """PyG's way to pin workers to cores; does nothing where there are no workers.

        Args:
            loader_cores: Numbers of the cores, as PyG takes them: a list, or one for each worker.
        """
        pinned: AbstractContextManager[Any] = super().enable_cpu_affinity(loader_cores)  # type: ignore[misc]
        return pinned if self.num_workers > 0 else nullcontext()

    def enable_multithreading(self, worker_threads: int | None = None) -> AbstractContextManager[Any]:
        """PyG's way to give workers threads; does nothing where there are no workers.

        Args:
            worker_threads: Threads of each worker; None is PyG's default.
        """
        threaded: AbstractContextManager[Any] = super().enable_multithreading(worker_threads)  # type: ignore[misc]
        return threaded if self.num_workers > 0 else nullcontext()

    def _settle(self, device: Device, placement: str, topology_placement: str | None, feature_cache: int | str | None,
                super_batch: int | None, seed: int | None, prefetch: int, ranks: Any = None,
                uneven: str = "pad") -> None:  # fmt: skip
        """Check and keep the arguments that PyG's loaders do not have."""
        check_hooks(self)
        topology_placement = placement if topology_placement is None else topology_placement
        for name, count, least in [("prefetch", prefetch, 0), ("super_batch", super_batch, 1)]:
            if name == "super_batch" and count is None:
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ArgumentError(f"{name} must be an integer of at least {least}, got {count!r}")
            if count >= 2**31:
                raise ArgumentError(f"{name} must be below 2**31, got {count}")
        self.device = resolve_device(device)
        # A loader that is sent takes the current GPU of the process it comes to, where nobody chose one.
        self._chooses_device = device is None
        check_place("placement", placement, self.device)
        check_place("topology_placement", topology_placement, self.device, PLACES)
        parse_size(0 if feature_cache is None else feature_cache, 0, "feature_cache")
        self.placement, self.topology_placement = placement, topology_placement
        self.feature_cache, self.prefetch, self.super_batch = feature_cache, prefetch, super_batch
        self._ranks = Ranks(ranks, uneven)
        if ranks is None and uneven != "pad" and not self._evens_out_alone:
            raise ArgumentError(f"uneven={uneven!r} needs ranks, got None: this process has all batches")
        self.seed = resolve_seed(seed)
        self._must_agree = seed is None and ranks is not None
        # The epoch that the next iteration runs and its first batch; and where the latest iteration stands.
        self._next_epoch = self._first_batch = 0
        self._standing = (0, 0)

    def _prepare(self) -> Any:
        """Place what is not placed yet; reads the graph anew."""
        raise NotImplementedError

    def _input(self) -> Tensor:
        """What the positions of an epoch pick from: the input nodes, int64 `[S]`, or something of their number."""
        raise NotImplementedError

    def _submit(self, epoch: int, number: int, seeds: Seeds) -> Any:
        """Start to sample a batch; what comes has `finish`."""
        raise NotImplementedError

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        """The batch of a sample."""
        raise NotImplementedError

    def _shared(self) -> Mapping[str, Any]:
        """Features whose rows a group of batches may read together."""
        return {}

    def _is_own(self) -> bool:
        """Whether nothing of the user's is called to make a batch."""
        return self.transform_sampler_output is None and not self._is_filtered

    @property
    def _is_filtered(self) -> bool:
        """Whether a class of the program's makes batches, by a `filter_fn` of its own, which may call ours."""
        return is_said_anew(self, "filter_fn")

    def _finish_batch(self, batch: Any) -> Any:
        """What the program's transform makes of a batch; `filter_fn` has called it already."""
        return batch if self.transform is None or self._is_filtered else self.transform(batch)

    def _work_with_workers(self, epoch: int, batches: Iterator[tuple[int, Seeds]]) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or the rest of one that was resumed."""
        share = self._share()
        with ordinary_tensors():
            self._prepare()
        if self._must_agree:
            self.seed, self._must_agree = self._ranks.agree_on_seed(self.seed, self.device), False
        epoch, first = self._next_epoch, self._first_batch // share.count
        self._next_epoch, self._first_batch = epoch + 1, 0
        self._standing = (epoch, first)
        batches = iterate_batches(self, self.seed, epoch, first, self._input(), share)  # type: ignore[arg-type]
        record = self._begin_record()
        sharded = self._find_sharded()
        if sharded:
            made = self._work_in_step(epoch, batches if record is None else record.follow(batches), record, sharded)
        elif self.num_workers > 0:  # type: ignore[attr-defined]
            made = self._work_with_workers(epoch, batches)
        else:
            made = self._work_here(epoch, batches if record is None else record.follow(batches), record)
        handed = self._iterate(epoch, first, made)
        return handed if record is None else record.hand_out(handed)

    def _share(self) -> Share:
        """Which batches are this process's."""
        if self._ranks.ranks is not None and not can_share(self):  # type: ignore[arg-type]
            raise ArgumentError("ranks needs batches that the loader itself makes, without sampler, batch_sampler or "
                                "generator, equal in every process; a DistributedSampler needs no ranks")  # fmt: skip
        return self._ranks.resolve()

    def __len__(self) -> int:
        """Batches of an epoch of this process."""
        return self._share().count_steps(super().__len__())  # type: ignore[misc]

    def _iterate(self, epoch: int, first: int, batches: Iterator[Any]) -> Iterator[Any]:
        for number in count_from(first + 1):
            if torch.is_inference_mode_enabled():
                with ordinary_tensors():
                    batch = next(batches, _END)
            else:
                batch = next(batches, _END)
            if batch is _END:
                break
            result = self._finish_batch(batch)
            # Not by the `__setattr__` of torch's loader, which looks at each name.
            self.__dict__["_standing"] = (epoch, number)
            yield result
        if self._standing[0] == epoch:
            self._standing = (epoch + 1, 0)

    def _open_group(self, epoch: int) -> Any:
        """What works on several batches at a time (see `SuperBatch`); None where each is made alone."""
        if self.super_batch in (None, 1) or self.device.type != "cuda" or not EpochLoader._is_own(self):
            return None
        shared = self._shared()
        if not shared:
            return None
        return SuperBatch(self.super_batch or 1, partial(self._submit, epoch), self._fetch, SharedFetch(shared))

    def _is_learned(self) -> bool:
        """Whether rows of batches carry a gradient to the graph, which is told once; none are read ahead then."""
        name = find_learned(getattr(self, "data", None))
        if name is not None:
            _tell_learned(f"{name} requires a gradient: its rows are read where it lies")
        return name is not None

    def _is_told_by_batches(self) -> bool:
        """Whether only a batch tells if its rows carry a gradient: they come from code that is not ours."""
        return self._is_filtered

    def _stages(self, epoch: int, record: EpochRecord | None, group: Any = None) -> Stages:
        """How the batches of an epoch, or groups of them, are made, and timed where that is wanted: the times of a
        group are those of its first batch."""
        submit, fetch = (partial(self._submit, epoch), self._fetch) if group is None else (group.submit, group.fetch)
        stages = Stages(submit, finish_sample, fetch)
        return stages if record is None else record.around(stages)

    def _find_sharded(self) -> list[Feature]:
        """Features that several processes hold a part of each, in the order in which a batch reads them."""
        features = self._list_places()[1].values() if self.sharing else ()
        sharded = [feature for feature in features if isinstance(feature, Feature) and feature.placement == "sharded"]
        if sharded and self.num_workers > 0:
            raise ArgumentError(f"num_workers must be 0 where processes hold a part of the rows each, got "
                                f"{self.num_workers}")  # fmt: skip
        return sharded

    def _work_in_step(self, epoch: int, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None,
                      sharded: list[Feature]) -> Iterator[Any]:  # fmt: skip
        """Batches of which every process makes its own at the same time, or takes part without one."""
        stored: list[Any] = [feature._spilled for feature in sharded]

        def take_part() -> None:
            for rows in stored:
                rows.read_nothing()

        make = partial(make_batch, self._stages(epoch, record))
        steps = Steps(stored[0].exchange, batches, make, take_part, 0 if self._is_learned() else self.prefetch)
        try:
            yield from steps
        finally:
            steps.close()
        if self._ranks.ranks is not None and self._ranks.uneven != "keep":
            # All have come as far: then the program may end its process group.
            steps.wait()

    def _work_here(self, epoch: int, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None = None
                   ) -> Iterator[Any]:  # fmt: skip
        batches, first, is_learned = iter(batches), [], self._is_learned()
        if self.prefetch > 0 and not is_learned and self._is_told_by_batches():
            first = [make_batch(self._stages(epoch, record), *item) for item in islice(batches, 1)]
            if any(map(has_learned, first)):
                _tell_learned("rows of a batch require a gradient: they are read")
                is_learned = True
        prefetch, group = (0, None) if is_learned else (self.prefetch, self._open_group(epoch))
        stages, work = self._stages(epoch, record, group), batches if group is None else group.group(batches)
        source: Background | Pipeline
        if self.device.type == "cpu" and prefetch > 0:
            # A function of the user's is called from one thread at a time.
            source = Background(work, partial(make_batch, stages), prefetch, None if self._is_own() else 1)
        else:
            submit, finish, fetch = stages
            prefetch = prefetch if group is None else min(prefetch, 1)
            source = Pipeline(work, submit, fetch, prefetch, self.device, finish, getattr(group, "split", None))
        try:
            if first and prefetch > 0:
                source.start()
            while first:
                yield first.pop()
            for _, made in source:
                # A group's batches are forgotten one by one.
                ready = made if isinstance(made, list) else [made]
                while ready:
                    yield ready.pop(0)
        finally:
            source.close()
            if isinstance(source, Pipeline) and source.prefetch < prefetch:
                # Memory that ran out once would run out in each epoch. Groups alone leave what was asked for.
                self.prefetch = min(self.prefetch, source.prefetch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: the next batch of the current epoch, in numbers and words that any file holds.

        With `ranks`, the batch is the first that not all processes have had; an epoch may be resumed by another number
        of them.
        """
        batch = self._standing[1] * self._ranks.resolve().count
        return {"seed": self.seed, "epoch": self._standing[0], "batch": batch, **describe_batches(self)}  # type: ignore[arg-type]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the next iteration gives the remaining batches of that epoch.

        Args:
            state: What `state_dict` returned: `seed`, `epoch` and `batch`, integers; and `num_seeds`, `batch_size`,
                `shuffle` and `drop_last` of the loader that it was taken from, of which one that is left out is not
                compared with this loader's.

        Raises:
            ArgumentError: not a state of a loader, or one of a loader that has other batches.
        """
        for name in ("seed", "epoch", "batch"):
            value = state.get(name) if isinstance(state, dict) else None
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
                raise ArgumentError(f"state must hold {name!r} as an integer in [0, 2**64), got {value!r}")
        for name, own in describe_batches(self).items():  # type: ignore[arg-type]
            if state.get(name, own) != own:
                raise ArgumentError(f"state must be of a loader of equal batches, with {name}={own!r}, got "
                                    f"{state[name]!r}")  # fmt: skip
        self.seed, self._must_agree = state["seed"], False
        self._next_epoch, self._first_batch = state["epoch"], state["batch"]
        self._standing = state["epoch"], state["batch"] // self._ranks.resolve().count

    def __getstate__(self) -> dict[str, Any]:
        """What another process makes the same batches from; what was placed here is placed anew there."""
        return {name: None if name in _PLACED else value for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._chooses_device:
            self.device = resolve_device(None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _tell_learned(what: str) -> None:
    announce(f"{what} when a batch is asked for, and no batch is made ahead")


def make_batch(stages: Stages, number: int, seeds: Seeds) -> Any:
    """A batch, one stage after the other."""
    batch = stages.fetch(stages.finish(stages.submit(number, seeds), number), number, seeds)
    # Nobody else reads it on another stream.
    take_memory(batch)
    return batch
