"""Base of all loaders: epochs that can be resumed, and prefetched batches."""

from __future__ import annotations

import copy
import copyreg
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count as count_from, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, IdError, LoaderWarning, warn
from pyg_direct.features.feature import Feature
from pyg_direct.graph.placed_topology import PLACES, check_place
from pyg_direct.loader.batch_report import EpochRecord, ReportedLoader, Stages, ending
from pyg_direct.loader.batch_sampler import (
    Ranks,
    Seeds,
    Share,
    can_share,
    describe_batches,
    is_shuffled,
    iterate_batches,
    open_positions,
)
from pyg_direct.loader.collate.attributes import find_learned, has_learned
from pyg_direct.loader.collate.stale_rows import FreshRows, are_current, were_written
from pyg_direct.loader.memory_placement import Placed, describe as describe_places
from pyg_direct.loader.prefetch.batch_groups import SharedFetch, SharedRows, SuperBatch
from pyg_direct.loader.prefetch.drivers import Background, Pipeline, take_memory
from pyg_direct.object_text import describe, show_count, show_options, show_parts
from pyg_direct.ops.argument_checks import check_count, check_ids
from pyg_direct.progress import announce
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.host_memory import check_size, parse_size
from pyg_direct.runtime.host.tensor_views import ordinary_tensors, version_of
from pyg_direct.sampling.random_key import EpochKey, check_seed, draw_seed
from pyg_direct.typing import Device

if TYPE_CHECKING:
    from pyg_direct.loader.prefetch.foresight import Foresight


class SavedAsPyg:
    """An object with the attributes of a PyG class, as which it is pickled if a program made it under that name.

    Copies stay ours. A class lists in `_BEYOND_PYG` its attributes that PyG's class does not have.
    """

    _BEYOND_PYG: frozenset[str] = frozenset()
    # PyG's class, if a program made the object under its name.
    _pyg_class: type | None = None

    def stand_for(self, pyg_class: type) -> None:
        """Pickle the object as one of PyG's from now on.

        Args:
            pyg_class: The class whose name the program used.
        """
        self._pyg_class = pyg_class

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._pyg_class is None:
            return super().__reduce_ex__(protocol)
        hidden = {*self._BEYOND_PYG, "_pyg_class"}
        state = {name: value for name, value in self.__dict__.items() if name not in hidden}
        # Not `__newobj__`, which `pickle` accepts only for objects of exactly this class.
        return copyreg._reconstructor, (self._pyg_class, object, None), state  # type: ignore[attr-defined]

    def __copy__(self) -> Any:
        return copy._reconstruct(self, None, *super().__reduce_ex__(4))  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy._reconstruct(self, memo, *super().__reduce_ex__(4))  # type: ignore[attr-defined]


# A batch that shares no rows with others.
ALONE: Mapping[str, SharedRows] = MappingProxyType({})
# Attributes of a loader that belong to the memory of its process.
_PLACED = ("_checked", "_drawing", "_general", "_graphs", "_numbers", "_owners", "_placed",
           "_plan", "_plan_topology", "_ppr", "_reads", "_recorder", "_row_windows", "_sampled_topology",
           "_typed_plan")  # fmt: skip
# Packages whose hooks do not count as the program's.
_ROOMS = ("pyg_direct", "torch_geometric", "torch")
_END = object()


class EpochLoader(ReportedLoader):
    """Iterator over epochs: it decides the order, the time and the prefetch of batches.

    Subclasses implement sampling (`_submit`), fetching (`_fetch`), and placement before an epoch (`_prepare`).
    """

    device: torch.device
    dataset: Any
    batch_size: int | None
    seed: int | None
    generator: Any
    prefetch: int
    super_batch: int | None
    # Batches, or memory, of foresight; see `NeighborLoader`.
    ahead: int | str | None = 0
    transform: Any
    transform_sampler_output: Any
    num_workers: int
    # True after rows were written while an epoch ran: they are then read when a batch is requested.
    _reads_late = False
    # Noun of what an epoch iterates over, in the singular and the plural.
    _item: tuple[str, str | None] = ("seed", None)
    # True after the warning that rows shared by several processes were written, and the text of the warning.
    _has_told_kept = False
    _kept_words = (
        "rows of data that processes share (cache_policy) were written: batches that are made ahead, and copies on "
        "GPUs and in other processes, do not have them; assign others in every process before an epoch, keep rows that "
        "change in a loader without cache_policy, or keep them apart and index them by batch.n_id"
    )
    # Rule that ranks rows for caches; see `NeighborLoader`.
    hotness = "expected"
    # The options of sampling, and the probabilities of reads that follow from them.
    _reads: Any = None
    # Sharing of node attributes within a group of processes; see `NeighborLoader`.
    sharing: Mapping[str, str] = MappingProxyType({})
    # True if a loader without a seed shuffles as torch's `RandomSampler`.
    _orders_as_torch = False
    # `__repr__` of PyG's class, for a loader that a program made under PyG's name.
    _repr_of_pyg: Callable[[Any], str] | None = None
    # True if processes with own seeds, without `ranks`, still agree on the number of batches.
    _evens_out_alone = False

    def enable_cpu_affinity(self, loader_cores: Any = None) -> AbstractContextManager[Any]:
        """Pin workers to cores, as PyG does; does nothing without workers.

        Args:
            loader_cores: Numbers of the cores, as in PyG: a list, or one for each worker.
        """
        pinned: AbstractContextManager[Any] = super().enable_cpu_affinity(loader_cores)  # type: ignore[misc]
        return pinned if self.num_workers > 0 else nullcontext()

    def enable_multithreading(self, worker_threads: int | None = None) -> AbstractContextManager[Any]:
        """Give workers threads, as PyG does; does nothing without workers.

        Args:
            worker_threads: Threads of each worker; None is PyG's default.
        """
        threaded: AbstractContextManager[Any] = super().enable_multithreading(worker_threads)  # type: ignore[misc]
        return threaded if self.num_workers > 0 else nullcontext()

    def _settle(self, device: Device, placement: str, topology_placement: str | None, feature_cache: int | str | None,
                super_batch: int | None, seed: int | None, prefetch: int, ranks: Any = None,
                uneven: str = "pad", ahead: int | str | None = 0) -> None:  # fmt: skip
        """Check and keep the arguments that PyG's loaders do not have."""
        check_hooks(self)
        topology_placement = placement if topology_placement is None else topology_placement
        for name, count, least in [("prefetch", prefetch, 0), ("super_batch", super_batch, 1)]:
            if name == "super_batch" and count is None:
                continue
            if check_count(name, count, least) >= 2**31:
                raise ArgumentError(f"{name} must be below 2**31, got {count}")
        check_ahead(ahead, super_batch)
        self.ahead = ahead
        self.device = resolve_device(device)
        # After unpickling, a loader without a chosen device takes the current GPU of its process.
        self._chooses_device = device is None
        check_place("placement", placement, self.device)
        check_place("topology_placement", topology_placement, self.device, PLACES)
        check_size(0 if feature_cache is None else feature_cache, "feature_cache")
        self.placement, self.topology_placement = placement, topology_placement
        self.feature_cache, self.prefetch, self.super_batch = feature_cache, prefetch, super_batch
        self._ranks = Ranks(ranks, uneven)
        if ranks is None and uneven != "pad" and not self._evens_out_alone:
            raise ArgumentError(f"uneven={uneven!r} needs ranks, got None: this process has all batches")
        self.seed = check_seed(seed)
        # The next epoch and its first batch; and the number drawn for it, if it has begun before.
        self._next_epoch = self._first_batch = 0
        self._drawn: int | None = None
        # Position of the latest iteration: epoch, batch, and the number drawn for the epoch.
        self._standing: tuple[int, int, int | None] = (0, 0, None)

    def _prepare(self) -> Any:
        """Read the graph again, and place all parts that are not placed yet."""
        raise NotImplementedError

    def _rows(self) -> Any:
        """Return the placed attributes; None if batches have none."""
        return None

    def _renew_rows(self) -> None:
        """Place the attributes as the graph holds them now; the sampled topology does not change."""
        raise NotImplementedError

    def _follow_rows(self) -> None:
        """Use the current rows, within an epoch."""
        self._renew_rows()

    def _current_rows(self) -> Any:
        """Return the attributes, placed again if they were written since, unless other processes read them too."""
        if not self._keeps_rows and not are_current(self._rows()):
            with ordinary_tensors():
                self._follow_rows()
        return self._rows()

    @property
    def _keeps_rows(self) -> bool:
        """True if written rows are not placed again within an epoch, which would be collective."""
        return bool(self.sharing)

    def _tell_kept(self) -> None:
        """Warn, once per loader, that rows read by several processes were written."""
        if not self._has_told_kept:
            self._has_told_kept = True
            warn(self._kept_words, LoaderWarning)

    def _watch_kept(self, batches: Iterator[Any]) -> Iterator[Any]:
        rows = self._rows()
        if getattr(rows, "is_behind", False):
            self._tell_kept()
        with ending(batches):
            for batch in batches:
                if not self._has_told_kept and not are_current(rows):
                    self._tell_kept()
                yield batch

    def _check_inputs(self, **parts: tuple[Tensor | None, int | None]) -> None:
        """Check that the current graph still has all seeds.

        Args:
            parts: For each argument its ids, and the number of nodes of their type, None if it is not known.
        """
        held = [(ids, 0 if ids is None else version_of(ids), size) for ids, size in parts.values()]
        known = self.__dict__.get("_checked") or ()
        if len(known) == len(held) and all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(known, held, strict=True)):
            return
        for name, (ids, size) in parts.items():
            try:
                if ids is not None:
                    check_ids(name.split("__")[0], ids, size)
            except IdError as error:
                raise IdError(f"{error}: the graph has fewer nodes than when the loader was made; make a new one "
                              "for the nodes that are left") from error  # fmt: skip
        self.__dict__["_checked"] = tuple(held)

    def _input(self) -> Tensor:
        """Return the input nodes, int64 `[S]`, which positions of an epoch index; or a tensor of equal length."""
        raise NotImplementedError

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        """Start to sample a batch of an epoch; the result has `finish`."""
        raise NotImplementedError

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        """Make the batch of a sample."""
        raise NotImplementedError

    def _shared(self) -> Mapping[str, Any]:
        """Return features whose rows a group of batches may read together."""
        return {}

    def _is_own(self) -> bool:
        """Check if no function of the user's is called to make a batch."""
        return self.transform_sampler_output is None and not self._is_filtered

    @property
    def _is_filtered(self) -> bool:
        """True if the program overrides `filter_fn`, which may call ours."""
        return is_said_anew(self, "filter_fn")

    def _finish_batch(self, batch: Any) -> Any:
        """Apply the program's transform to a batch; `filter_fn` has called it already."""
        return batch if self.transform is None or self._is_filtered else self.transform(batch)

    def _work_with_workers(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]]) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the next epoch, or the remaining batches of a resumed one."""
        # A hook may have been assigned since.
        check_hooks(self)
        share = self._share()
        rows = self._rows() if self._keeps_rows else None
        with ordinary_tensors():
            self._prepare()
        if were_written(rows):
            self._tell_kept()
        self._announce_places()
        # Before a number is drawn, as in torch: some samplers draw when their iterator is created.
        positions = open_positions(self)  # type: ignore[arg-type]
        epoch, first, key = self._begin_epoch(share)
        batches = iterate_batches(self, key, first, self._input(), share, positions)  # type: ignore[arg-type]
        record = self._begin_record()
        sharded = self._find_sharded()
        if sharded:
            made = self._work_in_step(key, batches if record is None else record.follow(batches), record, sharded)
        elif self.num_workers > 0:  # type: ignore[attr-defined]
            made = self._work_with_workers(key, batches)
        else:
            made = self._work_here(key, batches if record is None else record.follow(batches), record)
        if self._keeps_rows:
            made = self._watch_kept(made)
        handed = self._iterate(epoch, first, made, None if self.seed is not None else key.seed)
        return handed if record is None else record.hand_out(handed)

    def _begin_epoch(self, share: Share) -> tuple[int, int, EpochKey]:
        """Begin an epoch: (its number, its first batch of this process, its key)."""
        self._ranks.compare({"seed": self.seed, **describe_batches(self)})  # type: ignore[arg-type]
        key = self._draw_key()
        epoch, first = self._next_epoch, self._first_batch // share.count
        self._next_epoch, self._first_batch, self._drawn = epoch + 1, 0, None
        self._standing = (epoch, first, None if self.seed is not None else key.seed)
        return epoch, first, key

    def _draw_key(self) -> EpochKey:
        """Draw the key of the next epoch, with as many draws as torch's `DataLoader` makes, from the same generators.

        With a seed, only a generator of the user's is drawn from. A resumed epoch draws nothing if its order is a
        function of the number drawn at its start.
        """
        shares, is_new = can_share(self), self._drawn is None  # type: ignore[arg-type]
        draws = self.seed is None or self.generator is not None
        drawn = draw_seed(self.generator) if draws and (is_new or not shares) else 0
        if self.seed is not None:
            return EpochKey(self.seed, self._next_epoch)
        if self._drawn is not None:
            return EpochKey(self._drawn, 0)
        if shares and is_shuffled(self):  # type: ignore[arg-type]
            # As by torch's `RandomSampler`.
            order = draw_seed()
            drawn = order if self._orders_as_torch else drawn
        return EpochKey(self._agree_on(drawn), 0)

    def _agree_on(self, drawn: int) -> int:
        """Return the number that rank 0 drew for an epoch, if processes share its batches."""
        return drawn if self._ranks.ranks is None else self._ranks.agree_on_seed(drawn, self.device)

    def _share(self) -> Share:
        """Return this process's share of the batches."""
        if self._ranks.ranks is not None and not can_share(self):  # type: ignore[arg-type]
            raise ArgumentError("ranks needs batches that the loader itself makes, without sampler, batch_sampler or "
                                "generator, equal in every process; leave ranks out beside a DistributedSampler, which "
                                "Lightning adds unless it has Trainer(use_distributed_sampler=False)")  # fmt: skip
        return self._ranks.resolve()

    def __len__(self) -> int:
        """Return the number of this process's batches per epoch."""
        return self._share().count_steps(super().__len__())  # type: ignore[misc]

    def _iterate(self, epoch: int, first: int, batches: Iterator[Any], drawn: int | None = None) -> Iterator[Any]:
        with ending(batches):
            for number in count_from(first + 1):
                if torch.is_inference_mode_enabled():
                    with ordinary_tensors():
                        batch = next(batches, _END)
                else:
                    batch = next(batches, _END)
                if batch is _END:
                    break
                result = self._finish_batch(batch)
                # Not through `__setattr__` of torch's loader, which compares each name.
                self.__dict__["_standing"] = (epoch, number, drawn)
                yield result
        if self._standing[0] == epoch:
            self._standing = (epoch + 1, 0, None)

    def _open_group(self, key: EpochKey) -> Any:
        """Make the stages for groups of batches (see `SuperBatch`); None if each batch is made alone."""
        if self.super_batch in (None, 1) or self.device.type != "cuda" or not EpochLoader._is_own(self):
            return None
        shared = self._shared()
        if not shared:
            return None
        return SuperBatch(self.super_batch or 1, partial(self._submit, key), self._fetch, SharedFetch(shared))

    def _is_learned(self) -> bool:
        """Check if rows of batches carry a gradient to the graph, which is reported once; no batch is prefetched
        then.
        """
        name = find_learned(getattr(self, "data", None))
        if name is not None:
            _tell_alone(f"{name} requires a gradient: its rows are read where it lies")
        return name is not None

    def _is_told_by_batches(self) -> bool:
        """Check if only a batch shows a gradient of its rows: they come from the program's code."""
        return self._is_filtered

    def _open_foresight(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]]) -> Foresight | None:
        """Open the foresight of an epoch; None if no rows of its batches lie in a file."""
        return None

    def _stages(self, key: EpochKey, record: EpochRecord | None, group: Any = None,
                foresight: Foresight | None = None) -> Stages:  # fmt: skip
        """Build the stages that make batches of an epoch, or groups of them, with timers if recording is on.

        The times of a group count for its first batch.
        """
        submit, fetch = (partial(self._submit, key), self._fetch) if group is None else (group.submit, group.fetch)
        finish = group.finish if hasattr(group, "finish") else _finish
        stages = Stages(submit, finish, fetch)
        if foresight is not None:
            stages = foresight.around(stages)
        return stages if record is None else record.around(stages)

    def _find_sharded(self) -> list[Feature]:
        """List features whose parts are spread over several processes, in the order in which a batch reads them."""
        features = self._list_places()[1].values() if self.sharing else ()
        sharded = [feature for feature in features if isinstance(feature, Feature) and feature.placement == "sharded"]
        if sharded and self.num_workers > 0:
            raise ArgumentError(f"num_workers must be 0 where processes hold a part of the rows each, got "
                                f"{self.num_workers}")  # fmt: skip
        return sharded

    def _work_in_step(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None,
                      sharded: list[Feature]) -> Iterator[Any]:  # fmt: skip
        """Iterate over batches in lockstep: every process makes its own at the same time, or takes part without one."""
        from pyg_direct.loader.prefetch.lockstep_ranks import Steps

        tiers: list[Any] = [feature.stored.tier for feature in sharded if feature.stored is not None]

        def take_part(count: int) -> None:
            # A step is one batch here.
            for tier in tiers:
                tier.take_nothing()

        make = partial(make_alone, self._stages(key, record))
        steps = Steps(tiers[0].exchange, batches, make, take_part, 0 if self._is_learned() else self.prefetch)
        try:
            yield from steps
        finally:
            steps.close()
        if self._ranks.ranks is not None and self._ranks.uneven != "keep":
            # After this the program may end its process group: all processes have come as far.
            steps.wait()

    def _work_here(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None = None
                   ) -> Iterator[Any]:  # fmt: skip
        is_learned = self._is_learned()
        foresight = None if is_learned else self._open_foresight(key, batches)
        if foresight is None:
            yield from self._make_batches(key, iter(batches), record, is_learned, None)
            return
        try:
            yield from self._make_batches(key, foresight, record, is_learned, foresight)
        finally:
            foresight.close()

    def _make_batches(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None,
                      is_learned: bool, foresight: Foresight | None) -> Iterator[Any]:  # fmt: skip
        first: list[Any] = []
        draws, is_on_threads = False, self.device.type == "cpu" and not self._is_own()
        if self.prefetch > 0 and not is_learned and (is_on_threads or self._is_told_by_batches()):
            before = _read_generators()
            alone = self._stages(key, record, foresight=foresight)
            if foresight is not None:
                alone = alone._replace(fetch=foresight.releasing(alone.fetch))
            first = [make_batch(alone, *item) for item in islice(batches, 1)]
            draws = is_on_threads and not _are_equal(before, _read_generators())
            if self._is_told_by_batches() and any(map(has_learned, first)):
                _tell_alone("rows of a batch require a gradient: they are read")
                is_learned = True
            elif draws:
                # In parallel with training, which draws too, its numbers would differ from run to run.
                _tell_alone("what the program has for a batch draws random numbers, as training may: it is called")
        prefetch, group = (0, None) if is_learned or draws else (self.prefetch, self._open_group(key))
        stages, work = self._stages(key, record, group, foresight), batches if group is None else group.group(batches)
        fresh = FreshRows(self, partial(self._sample_again, key), stages.fetch, prefetch > 0 or group is not None)
        stages = stages._replace(fetch=fresh.fetch if foresight is None else foresight.releasing(fresh.fetch))
        source: Background | Pipeline | Generator[tuple[int, Any], None, None]
        if self.device.type == "cpu" and prefetch > 0:
            # The user's functions are called from one thread at a time.
            source = Background(work, partial(run_stages, stages), prefetch, None if self._is_own() else 1)
        elif self.device.type == "cpu":
            source = ((number, run_stages(stages, number, seeds)) for number, seeds in work)
        else:
            submit, finish, fetch = stages
            prefetch = prefetch if group is None else min(prefetch, 1)
            source = Pipeline(work, submit, fetch, prefetch, self.device, finish, getattr(group, "split", None))
        try:
            if first and prefetch > 0:
                assert not isinstance(source, Generator)
                source.start()
            while first:
                yield first.pop()
            for number, made in source:
                yield from fresh.hand_out(number, made)
        finally:
            source.close()
            if isinstance(source, Pipeline) and source.prefetch < prefetch:
                # Memory that ran out once would run out in each epoch. Smaller groups do not change the user's value.
                self.prefetch = min(self.prefetch, source.prefetch)

    def _sample_again(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        return self._submit(key, number, seeds).finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader: the next batch of the current epoch, in JSON-compatible values.

        With `ranks`, this is the first batch that not all processes have had; an epoch may be resumed by another number
        of processes. A loader without a seed adds `drawn`, from which the current epoch follows. The next epoch follows
        from torch's generator, whose state the program must save (`torch.get_rng_state`).
        """
        epoch, step, drawn = self._standing
        state = {"seed": self.seed, "epoch": epoch, "batch": step * self._ranks.resolve().count}
        return {**state, **({"drawn": drawn} if self.seed is None else {}), **describe_batches(self)}  # type: ignore[arg-type]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position: the next iteration returns the remaining batches of that epoch.

        Args:
            state: Result of `state_dict`: integers `seed`, `epoch` and `batch`. In a loader without a seed, `seed` is
                None, and `drawn` is an integer, or None between epochs. `num_seeds`, `batch_size`, `shuffle` and
                `drop_last` of the saved loader are compared with this loader's, if present.

        Raises:
            ArgumentError: not a state of a loader, or a state of a loader with other batches.
        """
        parts: dict[str, Any] = state if isinstance(state, dict) else {}
        has_seed = "seed" not in parts or parts["seed"] is not None
        is_begun = not has_seed and (state.get("drawn") is not None or state.get("batch") != 0)
        for name in ("seed" if has_seed else "epoch", "epoch", "batch", *(["drawn"] if is_begun else [])):
            value = parts.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
                inner = [key for key, part in parts.items() if isinstance(part, dict) and "batch" in part]
                raise ArgumentError(f"state must hold {name!r} as an integer in [0, 2**64), got {value!r}"
                                    f"{f': give state[{inner[0]!r}]' if inner else ''}")  # fmt: skip
        for name, own in describe_batches(self).items():  # type: ignore[arg-type]
            if state.get(name, own) != own:
                raise ArgumentError(f"state must be of a loader of equal batches, with {name}={own!r}, got "
                                    f"{state[name]!r}")  # fmt: skip
        self.seed, self._drawn = state["seed"], state["drawn"] if is_begun else None
        self._next_epoch, self._first_batch = state["epoch"], state["batch"]
        self._standing = state["epoch"], state["batch"] // self._ranks.resolve().count, self._drawn

    def __getstate__(self) -> dict[str, Any]:
        """Return the state from which another process makes the same batches; placed tensors are placed again there."""
        return {name: None if name in _PLACED else value for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._chooses_device:
            self.device = resolve_device(None)

    def __repr__(self) -> str:
        if self._repr_of_pyg is not None:
            return self._repr_of_pyg(self)
        return describe(self, self._list_parts(), self._list_placed())

    def _repr_html_(self) -> str:
        return show_parts(self, self._list_parts(), self._list_placed())

    def _list_parts(self) -> Iterator[str]:
        """List the items, options, number and device of batches, for `repr`."""
        yield show_count(len(self.dataset), *self._item)
        yield from self._list_options()
        yield from show_options(batch_size=self.batch_size, ranks=self._ranks.ranks)
        # A sampler of the program's need not have a length.
        with suppress(Exception):
            yield show_count(len(self), "batch", "batches")
        yield str(self.device)

    def _list_options(self) -> Iterator[str]:
        """List further options of batches, such as fanouts, for `repr`."""
        return iter(())

    def _list_placed(self) -> Iterator[str]:
        """List the places of rows, for `repr`; nothing is placed before the first epoch."""
        parts = self._summarise_places()
        if parts is None:
            yield "not placed yet"
        else:
            yield from map(str, parts)

    def _summarise_places(self) -> Iterable[Placed] | None:
        """Return the parts of the line about placement; None before anything is placed."""
        return ()

    def _announce_places(self) -> None:
        """Log the places of topology and rows, once for equal lines."""
        line = describe_places(self._summarise_places() or ())
        if line:
            announce(line)


class WholeBatchLoader(EpochLoader):
    """Base of loaders whose `_submit` makes the whole batch, `Finished`."""

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        return sample

    def _work_here(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None = None
                   ) -> Iterator[Any]:  # fmt: skip
        if self.device.type == "cpu":
            yield from super()._work_here(key, batches, record)
            return
        # A batch may hold objects of the program's: on the current stream the allocator needs no mark for them.
        stages = self._stages(key, record)
        for number, seeds in batches:
            yield make_batch(stages, number, seeds)


def check_ahead(ahead: Any, super_batch: int | None) -> None:
    """Check the batches, or the memory, of foresight."""
    if isinstance(ahead, str):
        parse_size(ahead, name="ahead")
    elif ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead < 2**31):
        raise ArgumentError(f"ahead must be a number of batches in [0, 2**31), memory such as '2G', or None, got "
                            f"{ahead!r}")  # fmt: skip
    if ahead and super_batch not in (None, 1):
        raise ArgumentError(f"super_batch must be None or 1 with ahead={ahead!r}, which plans batches itself, got "
                            f"{super_batch}")  # fmt: skip


def _read_generators() -> tuple[Any, ...]:
    """Read the states of the generators from which a program's functions draw."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _are_equal(states: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    (numbers, python, numpy), (others_numbers, others_python, others_numpy) = states, others
    return torch.equal(numbers, others_numbers) and python == others_python \
        and all(map(np.array_equal, numpy, others_numpy))  # fmt: skip


def _tell_alone(what: str) -> None:
    announce(f"{what} when a batch is asked for, and no batch is made ahead")


def is_said_anew(loader: Any, hook: str) -> bool:
    """Check if a loader's class or the loader itself overrides a hook of ours or PyG's."""
    method = loader.__dict__.get(hook)
    if method is None:
        method = getattr(type(loader), hook, None)
    return method is not None and not _is_ours(method)


def _is_ours(method: Any) -> bool:
    """Check if a function is in a file of ours, PyG's or torch's; a wrapper may have the name and module of its
    function.
    """
    function = getattr(method, "__func__", method)
    names = getattr(function, "__globals__", None)
    module = type(function).__module__ if names is None else names["__name__"]
    return module.partition(".")[0] in _ROOMS


def check_hooks(loader: Any) -> None:
    """Refuse a `collate_fn` of the program, or ShaDow's `__collate__`: batches are prefetched in groups without it."""
    for hook in ("collate_fn", "__collate__"):
        if is_said_anew(loader, hook):
            raise NotImplementedError(f"{hook} of {type(loader).__qualname__} would not be called, as batches are "
                                      "sampled ahead; say what it does to them in filter_fn, transform or "
                                      "transform_sampler_output, or derive the class from PyG's loader")  # fmt: skip


def run_stages(stages: Stages, number: int, seeds: Any) -> Any:
    """Run all stages of a batch, or of a group, one after the other."""
    return stages.fetch(stages.finish(stages.submit(number, seeds), number), number, seeds)


def _finish(pending: Any, number: int) -> Any:
    """Wait for the sample of a batch, or of a group."""
    return pending.finish()


def make_batch(stages: Stages, number: int, seeds: Seeds) -> Any:
    """Make a batch that is read on the stream on which it is made, so that the owners of its memory need not be
    known.
    """
    batch = run_stages(stages, number, seeds)
    take_memory(batch)
    return batch


def make_alone(stages: Stages, work: list[tuple[int, Seeds]], most: int) -> list[Any]:
    """Make the batches of a step, one after the other."""
    return [make_batch(stages, *item) for item in work]
