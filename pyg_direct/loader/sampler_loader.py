"""Batches of any sampler with PyG's interface, with rows fetched on the device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    HeteroSamplerOutput,
    HGTSampler,
    NeighborSampler as PygNeighborSampler,
    SamplerOutput,
)

from pyg_direct.errors import ArgumentError, PlacementWarning, warn, warn_unused
from pyg_direct.features.feature import Feature
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.graph.placed_topology import ListReads
from pyg_direct.loader.base_loader import ALONE, EpochLoader
from pyg_direct.loader.batch_sampler import Seeds, Share, can_share, iterate_batches
from pyg_direct.loader.collate.attributes import without_edge_attributes
from pyg_direct.loader.collate.data import Attributes, StoreAttributes, summarise
from pyg_direct.loader.collate.hetero_data import HeteroAttributes, note_typed
from pyg_direct.loader.hot_row_ranking import SeedDraw, rank_sampled
from pyg_direct.loader.memory_placement import Placed
from pyg_direct.loader.prefetch.batch_groups import GPU_ROOM, HOST_ROOM, GrowingTogether, SharedRows, Together, Work
from pyg_direct.loader.prefetch.drivers import note_memory
from pyg_direct.nn.sorted_edges import register_batch
from pyg_direct.object_text import show_fanouts
from pyg_direct.ops.argument_checks import as_ids, check_ids
from pyg_direct.ops.compute_content_hash import glance_only
from pyg_direct.runtime.comm.host_group import count_processes
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.host.host_memory import available_bytes, parse_size
from pyg_direct.runtime.host.tensor_views import ordinary_tensors
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampler.graph_reader import Ids
from pyg_direct.sampler.keyed_sampler import Drawn, Output, OwnSampler, check_output, is_own
from pyg_direct.sampler.neighbor_sampler import NeighborSampler
from pyg_direct.sampling.captured_plan import Finished, PendingOutput
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.sampling.sampling_options import Sample

if TYPE_CHECKING:
    from pyg_direct.features.range_reader import DiskReads
    from pyg_direct.features.tiers.window import RowWindow
    from pyg_direct.graph.csr_topo import FiledLists
    from pyg_direct.loader.prefetch.foresight import Foresight

# Share of the free host memory for planned batches, the share of it, or of free GPU memory, for their samples, and the
# windows of an epoch at least: only the first one is waited for.
_AHEAD_SHARE, _SAMPLES_SHARE, _PARTS = 0.25, 0.125, 4
# A table of this part of the memory is small, and of so many bytes at most; as long as all small ones take this part.
_SMALL, _SMALL_BYTES, _MOST_SMALL = 64, 32 << 20, 4
# Batches that read neighbor lists in a file together, at most.
_MOST_TOGETHER = 32


class GeneralLoader(EpochLoader):
    """Base of node and link loaders over a PyG sampler."""

    data: Any
    custom_cls: Any
    input_data: Any
    store_dtype: torch.dtype | None = None
    _general: Any = None
    # The topology of a sampler of ours; None for others.
    _sampled_topology: Any = None
    # The plan whose samples become batches by `_build_sample`; None if samples take PyG's form before.
    _plan: Any = None
    # Windows over the files of features, kept between epochs: (what the feature holds, window).
    _row_windows: Any = None
    # True if this loader made its sampler, for the given graph.
    _made_sampler = False

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Data | HeteroData]: ...

    @property
    def _sampler(self) -> Any:
        """The sampler, which a program may replace between epochs."""
        raise NotImplementedError

    def _prepare(self) -> Any:
        ours = isinstance(self._sampler, OwnSampler)
        if ours:
            if self._made_sampler and self._sampler.data is not self.data:
                # Another graph, `loader.data = other`, is passed to the sampler too, which only this loader has.
                self._sampler.change_data(self.data)
            self._sampler.refresh()
            self._check_seeds(self._sampler.num_nodes)
        # Its tensors were just compared.
        with glance_only():
            self._sampled_topology = self._sampler._open_topology() if ours else None
            # Places the topology before the attributes.
            self._plan = self._open_plan()
        if self._plan is not None:
            self._plan.topology.check_process()
        self._renew_rows()
        return self._general

    def _open_plan(self) -> Any:
        """Open the plan that makes samples for `_build_sample`; None if there is none for these options."""
        return None

    def _check_seeds(self, sizes: Any) -> None:
        """Check the seeds against the current numbers of nodes, by type in a graph with types."""
        raise NotImplementedError

    def _rows(self) -> Any:
        return self._general

    def _follow_rows(self) -> None:
        if isinstance(self._general, StoreAttributes):
            # Rows are read for every batch in any case.
            self._general = self._general.renew()
        else:
            self._renew_rows()

    def _renew_rows(self) -> None:
        topology: Any = self._sampled_topology
        by_adjacency = isinstance(self._sampler, (OwnSampler, PygNeighborSampler, HGTSampler))
        options = self.device, self.placement, self.feature_cache, self.store_dtype, self.sharing
        if isinstance(self.data, HeteroData):
            typed = topology if isinstance(topology, HeteroTopo) else None
            self._general = HeteroAttributes(self.data, typed, *options, by_adjacency=by_adjacency,
                                             rankings=rank_sampled(self, typed).nodes)  # fmt: skip
        elif isinstance(self.data, Data):
            counts, ranked = {} if topology is None else _count_items(topology), rank_sampled(self, topology)
            ranking = next(iter(ranked.nodes.values()), None)
            self._general = Attributes(self.data, ranking, *options, ranked.edges, by_adjacency, counts)
        else:
            features, graph = self.data
            self._general = StoreAttributes(features, graph, self.device, self.custom_cls, topology)

    def _list_draws(self) -> list[SeedDraw]:
        """List the seeds of a batch."""
        raise NotImplementedError

    def _ask(self, positions: Tensor, key: int | None) -> Output:
        """Call the sampler on the seeds at these positions."""
        raise NotImplementedError

    def _is_own(self) -> bool:
        ours = is_own(self._sampler) and isinstance(self.data, (Data, HeteroData))
        return ours and super()._is_own()

    def _is_told_by_batches(self) -> bool:
        return isinstance(self._general, StoreAttributes) or super()._is_told_by_batches()

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        if self._plan is not None:
            return self._plan.submit(self._list_seeds(seeds), key.of_batch(number))
        return PendingOutput(self._submit_together([seeds], [key.of_batch(number)]), _first_drawn)

    def _list_seeds(self, seeds: Seeds) -> Any:
        """List the seeds of a batch in the form of the plan."""
        raise NotImplementedError

    def _submit_together(self, seeds: Sequence[Seeds], keys: Sequence[int]) -> PendingOutput | Finished:
        """Start to sample around the seeds of several batches; the result is a list."""
        if self._samples_together():
            return self._submit_to_sampler(seeds, keys)
        return Finished([self._ask(own.positions, key) for own, key in zip(seeds, keys, strict=True)])

    def _submit_to_sampler(self, seeds: Sequence[Seeds], keys: Sequence[int]) -> PendingOutput | Finished:
        """Start to sample several batches by one call of our sampler."""
        raise NotImplementedError

    def _samples_together(self) -> bool:
        """Check if several batches can be sampled in one call: a sampler of a user's subclass may draw differently."""
        return is_own(self._sampler, NeighborSampler)

    def _grows(self) -> bool:
        """Check if groups of batches are made by default, without `super_batch` or more prefetch: if single batches
        take the host far longer.
        """
        is_ahead = self.prefetch == 1 and self._is_own()
        # On a GPU, batches whose trees are not told apart are sampled one after the other in any case.
        is_ahead = is_ahead and (self.device.type == "cpu" or getattr(self._sampler, "disjoint", False))
        return is_ahead and self._samples_together() and isinstance(self._general, HeteroAttributes)

    def _open_group(self, key: EpochKey) -> Any:
        if is_uniform(self._sampler):
            # Such batches are sampled one by one; they may share the reads of rows.
            return super()._open_group(key)
        if self.super_batch == 1 or (self.super_batch is None and not self._grows()):
            return None
        stages, is_alone = self._stages_together(key), self.device.type == "cuda"
        if self.super_batch is None:
            room = GPU_ROOM if is_alone else HOST_ROOM
            count_free = partial(free_bytes, self.device.index) if is_alone else available_bytes
            return GrowingTogether(room, count_free, *stages, is_alone)
        return Together(self.super_batch, *stages, is_alone)

    def _stages_together(self, key: EpochKey) -> tuple[Any, Any, Any]:
        """Build what `Together` needs: sampling of a group, reading of its rows, and building of a batch."""

        def submit(work: Sequence[Work]) -> PendingOutput | Finished:
            keys = [key.of_batch(number) for number, _ in work]
            return self._submit_together([seeds for _, seeds in work], keys)

        def read(samples: Sequence[Drawn]) -> Sequence[Any]:
            if not self._is_own() or not hasattr(self._general, "read_together"):
                return [None] * len(samples)
            rows: Sequence[Any] = self._general.read_together([sample.out for sample in samples])
            return rows

        return submit, read, self._fetch_read

    def _open_foresight(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]]) -> Foresight | None:
        stored, lists = self._find_filed(), self._find_lists()
        if not stored and lists is None and not self.ahead:
            return None
        from pyg_direct.features.tiers.window import is_cached

        # Other samplers, and orders of the program, may depend on when they are asked.
        in_memory = [is_cached(rows.tier) for rows in stored]  # type: ignore[arg-type]
        if self.ahead is None and all(in_memory) and (lists is None or lists.is_cached()):
            # Batches read cached rows faster alone: on an H200 7.1 ms a step instead of 7.8.
            return None
        if (not stored and lists is None) or not is_own(self._sampler) or not can_share(self):  # type: ignore[arg-type]
            # A file that memory holds whole needs no plan.
            is_planned = stored or lists is not None
            if self.ahead and (is_planned or not any(table.holds_file for table in self._find_tables())):
                warn_unused({"ahead": self.ahead}, "it needs rows in a file (Feature.from_file) in our FeatureStore, "
                            "our sampler, and batches that the loader itself chooses")  # fmt: skip
            return None
        for array in lists.arrays if lists is not None else ():
            array.num_processes = self._count_local()
        return self._foresee(key, batches, self._open_windows(stored), lists)

    def _foresee(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], windows: Sequence[RowWindow],
                 lists: FiledLists | None) -> Foresight:  # fmt: skip
        """Plan the batches of an epoch, for windows whose locks it holds."""
        from pyg_direct.loader.prefetch.foresight import Foresight

        by_tier = {id(window.source): window for window in windows}

        def sample(items: Sequence[Work]) -> list[Any]:
            if lists is None:
                return [self._submit(key, number, seeds).finish() for number, seeds in items]
            keys = [key.of_batch(number) for number, _ in items]
            return [Drawn(out) for out in self._submit_together([seeds for _, seeds in items], keys).finish()]

        def find_reads(sample: Any) -> list[tuple[RowWindow, Tensor]]:
            found = []
            for feature, ids in self._general.list_reads(sample.out):
                stored = feature.stored
                window = by_tier.get(id(stored.tier)) if isinstance(stored, SpilledRows) else None
                if window is None:
                    continue
                if window.is_whole and stored.memory is None:
                    # The host need not wait for the ids.
                    window.note_asked(ids.numel())
                else:
                    found.append((window, feature.find_missing(ids)))
            return found

        most = self.ahead if isinstance(self.ahead, int) else max(1, -(-len(self) // _PARTS))  # type: ignore[arg-type]
        memory = free_bytes(self.device.index) if self.device.type == "cuda" else self._ahead_bytes()
        # Two windows are in memory.
        room = int(_SAMPLES_SHARE * memory) // 2
        return Foresight(batches, sample, find_reads, windows, most, room, self.device,
                         together=1 if lists is None else _MOST_TOGETHER)  # fmt: skip

    def _ahead_bytes(self) -> int:
        """Return the memory for planned batches of this process: of the host, or of a GPU that reads files itself."""
        from pyg_direct.features.device_reader import wants_gpu_direct

        if isinstance(self.ahead, str):
            return parse_size(self.ahead)
        if wants_gpu_direct(self.device):
            return int(_AHEAD_SHARE * free_bytes(self.device.index))
        return int(_AHEAD_SHARE * available_bytes()) // self._count_local()

    def _count_local(self) -> int:
        """Return how many processes of this host may read the files; of several hosts at most as many as that."""
        known = os.environ.get("LOCAL_WORLD_SIZE", "")
        return int(known) if known.isdigit() and int(known) else max(self._ranks.resolve().count, count_processes())

    def _find_tables(self) -> list[Feature]:
        """Find the features of a store."""
        if not isinstance(self._general, StoreAttributes):
            return []
        return [table for table in self._general.describe().values() if isinstance(table, Feature)]

    def _find_lists(self) -> FiledLists | None:
        """Find the neighbor lists that lie in a file, if batches that are planned read them together."""
        is_planned = self.ahead != 0 and self.super_batch in (None, 1) and self._samples_together()
        topology = self._sampled_topology if is_planned and isinstance(self._general, StoreAttributes) else None
        return topology.lists if isinstance(topology, HeteroTopo) else None

    def _find_filed(self) -> list[SpilledRows]:
        """Find the rows of the store that lie in files."""
        if self.ahead == 0 or self.super_batch not in (None, 1):
            return []
        filed = [table.stored for table in self._find_tables() if isinstance(table.stored, SpilledRows)]
        if not filed:
            return []
        from pyg_direct.features.tiers.window import can_plan

        return [stored for stored in filed if can_plan(stored.tier)]

    def _open_windows(self, stored: Sequence[SpilledRows]) -> list[RowWindow]:
        """Open a window over each table, with a share of the memory; this epoch holds their locks."""
        known = {id(rows): window for rows, window in self._row_windows or ()
                 if not window.is_broken and any(rows is own for own in stored)}  # fmt: skip
        # The memory of windows over other tables is free before new windows take theirs.
        self._row_windows = None
        from pyg_direct.features.tiers.window import RowWindow

        windows = []
        for rows, (memory, on_device) in zip(stored, self._divide_memory(stored), strict=True):
            window = known.get(id(rows))
            if window is None or not window.lock.acquire(blocking=False):
                # Another iterator of this loader is at work in the known window.
                tier: Any = rows.tier
                try:
                    window = RowWindow(tier, memory, device_bytes=on_device, is_shared=self._count_local() > 1)
                except torch.OutOfMemoryError:
                    warn(f"planned rows of a file lie in host memory, {memory} bytes of them, as free GPU memory lies "
                         f"in pieces smaller than {on_device} bytes: set PYG_DIRECT_AHEAD_GPU to fewer bytes",
                         PlacementWarning)  # fmt: skip
                    window = RowWindow(tier, memory)
                window.lock.acquire()
            windows.append(window)
        self._row_windows = list(zip(stored, windows, strict=True))
        return windows

    def _divide_memory(self, stored: Sequence[SpilledRows]) -> list[tuple[int, int]]:
        """Return the bytes of the host, and of a GPU, for the planned rows of each table."""
        from pyg_direct.features.device_reader import find_device_room
        from pyg_direct.features.tiers.window import RowWindow

        sizes = [rows.shape.numel() * rows.tier.dtype.itemsize for rows in stored]
        # The rest is for samples, which a GPU has in its own memory.
        budget = int((1.0 if self.device.type == "cuda" else 1 - _SAMPLES_SHARE) * self._ahead_bytes())
        # Processes of a host share rows in its memory.
        room = 0 if self._count_local() > 1 else find_device_room(self.device)
        # Small tables are held whole, as memory for them is next to nothing; not for any number of them.
        held, small = 0, set[int]()
        for number in sorted(range(len(sizes)), key=sizes.__getitem__):
            size = sizes[number]
            if size > min(budget // _SMALL, _SMALL_BYTES) or held + size > budget // _MOST_SMALL:
                break
            held += size
            small.add(number)
        large, budget = max(1, sum(sizes) - held), budget - held
        parts = [(size, 0) if number in small else (budget * size // large, room * size // large)
                 for number, size in enumerate(sizes)]  # fmt: skip
        return [(RowWindow.fit_rows(rows.tier, memory), RowWindow.fit_device_rows(rows.tier, memory, on_device))
                for rows, (memory, on_device) in zip(stored, parts, strict=True)]  # fmt: skip

    def _foresee_memory(self, stored: Sequence[SpilledRows]) -> list[tuple[int, int]]:
        """Return the bytes of the host, and of a GPU, that `_open_windows` will find for the rows of each table.

        They are those of windows that are open. Other rows lie on the host if the GPU has no piece for them.
        """
        known = {id(rows): window.memory for rows, window in self._row_windows or () if not window.is_broken}
        found, pieces = [], []
        for rows, (memory, on_device) in zip(stored, self._divide_memory(stored), strict=True):
            if on_device > 0 and id(rows) not in known:
                try:
                    pieces.append(torch.empty(on_device, dtype=torch.uint8, device=self.device))
                except torch.OutOfMemoryError:
                    on_device = 0
            found.append(known.get(id(rows), (memory, on_device)))
        return found

    def _list_window_reads(self, feature: Feature, num_epochs: int) -> list[np.ndarray]:
        """List the rows that each window of the coming epochs will read from the file of a feature, without reading.

        Returns:
            Positions in the file, int32 or int64 `[n]`, ascending, for each window in turn, of each process of `ranks`;
            empty if the feature has no rows in a file that this loader plans.
        """
        with ordinary_tensors():
            self._prepare()
        stored, share = self._find_filed(), self._share()
        if not any(rows is feature.stored for rows in stored):
            return []
        number = next(number for number, rows in enumerate(stored) if rows is feature.stored)
        reads = [self._record_reads(stored, number, replace(share, rank=rank), num_epochs)
                 for rank in range(share.count)]  # fmt: skip
        return [rows for turn in zip_longest(*reads) for rows in turn if rows is not None]

    def _record_reads(self, stored: Sequence[SpilledRows], number: int, share: Share, num_epochs: int
                      ) -> list[np.ndarray]:  # fmt: skip
        """List the rows of a table that each window of a process will read."""
        from pyg_direct.features.tiers.read_order import ReadRecorder

        windows = [ReadRecorder(rows.tier, memory, device_bytes=on_device)  # type: ignore[arg-type]
                   for rows, (memory, on_device) in zip(stored, self._foresee_memory(stored), strict=True)]  # fmt: skip
        for epoch in range(num_epochs):
            key = EpochKey(self.seed, self._next_epoch + epoch)  # type: ignore[arg-type]
            first = self._first_batch // share.count if epoch == 0 else 0
            batches = iterate_batches(self, key, first, self._input(), share, None)  # type: ignore[arg-type]
            for window in windows:
                window.lock.acquire()
            foresight = self._foresee(key, batches, windows, self._find_lists())
            try:
                for batch, _ in foresight:
                    foresight.wait_for_sample(batch)
                    # A window that is left before it reads is not listed.
                    foresight.wait_for_rows(batch)
                    foresight.release(batch)
            finally:
                foresight.close()
        return windows[number].reads

    def _list_disk_reads(self) -> list[DiskReads]:
        lists = getattr(self._sampled_topology, "lists", None)
        arrays = [] if lists is None else lists.arrays
        return [*(window.tell() for _, window in self._row_windows or ()), *(array.tell() for array in arrays)]

    def _find_reads(self) -> ListReads | None:
        # `labor` reads whole lists.
        is_known = self._plan is not None and self._plan.recipe.sampling == "uniform"
        return self._plan.topology.list_reads() if is_known else super()._find_reads()

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        if not isinstance(sample, Sample):
            return self._fetch_read(sample, number, seeds)
        memory: list[Any] = []
        batch = self._build_sample(sample, seeds.positions, shared, memory)
        if memory and self.device.type == "cuda":
            note_memory(batch, memory)
        return batch

    def _build_sample(self, sample: Sample, positions: Tensor, shared: Mapping[str, SharedRows] = ALONE,
                      memory: list[Any] | None = None) -> Any:  # fmt: skip
        """Build the batch of a sample of the plan; `shared` and `memory` as in `Attributes.build`."""
        raise NotImplementedError

    def _fetch_read(self, sample: Drawn, number: int, seeds: Seeds, read: Any = None) -> Any:
        """Make the batch of a sample; `read` as in `HeteroAttributes.build`."""
        if self._is_filtered:
            return self.filter_fn(sample.out)
        memory: list[Any] = []
        batch = self._build(sample.out, memory, read)
        if memory and self.device.type == "cuda":
            note_memory(batch, [*memory, *(sample.out.metadata or ())])
        return batch

    def __call__(self, index: Ids) -> Data | HeteroData:
        """Make the batch around the seeds at these positions; each call makes new draws."""
        with glance_only():
            self._prepare()
        out = self._ask(read_positions(index, len(self.dataset)), None)  # type: ignore[attr-defined]
        return self.filter_fn(out) if self._is_filtered else self._finish_batch(self._build(out))

    def collate_fn(self, index: Any) -> Any:
        """Make the sample of the seeds at these positions, or its batch with `filter_per_worker` (PyG's hook).

        Args:
            index: Positions among the seeds, int64 `[B]` or a list.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: `index`, rule and value.
        """
        # PyG would create positions on torch's default device; seeds lie on the CPU.
        index = index if isinstance(index, Tensor) else check_ids("index", as_ids("index", index)).long()
        return super().collate_fn(index)  # type: ignore[misc]

    def filter_fn(self, out: Output) -> Any:
        """Build the batch of a sampler's output (PyG's hook); a batch of `collate_fn` is returned unchanged.

        Args:
            out: PyG's `SamplerOutput` or `HeteroSamplerOutput`, or the batch.

        Raises:
            ArgumentError: `data` was replaced by a graph that the loader cannot read.
        """
        if isinstance(out, (Data, HeteroData)):
            return out
        if self._general is None:
            self._prepare()
        # The caller may have changed it.
        out.is_given = True
        self._current_rows()
        batch = self._build(out)
        return batch if self.transform is None else self.transform(batch)

    def _place_inputs(self, batch: Any, out: Output) -> None:
        """Write the fields about seeds of PyG's loader."""
        raise NotImplementedError

    def _build(self, out: Output, memory: list[Any] | None = None, read: Any = None) -> Any:
        """Build the batch of a sampler's output; `memory` and `read` as in `HeteroAttributes.build`."""
        if self.transform_sampler_output is not None:
            out = self.transform_sampler_output(out)
            if isinstance(self.data, Data):
                check_output(out)
        if not isinstance(out, (SamplerOutput, HeteroSamplerOutput)):
            raise TypeError(f"the sampler must return a SamplerOutput or a HeteroSamplerOutput, got {type(out)}")
        is_ours = is_own(self._sampler) and self.transform_sampler_output is None and not hasattr(out, "is_given")
        if not is_ours:
            out = self._finalise(out)
        if isinstance(self._general, StoreAttributes):
            batch = self._general.build(out)
        elif isinstance(out, HeteroSamplerOutput):
            # Rows of a graph in parts come without ids, which follow below.
            more = {"notes": True} if isinstance(self._general, HeteroAttributes) else {}
            batch = self._general.build(self.data, out, checked=is_ours, memory=memory, read=read, **more)
        else:
            batch = self._build_homogeneous(out, self._general, is_ours)
        if not isinstance(self._general, HeteroAttributes):
            note_sample(batch, out)
        is_told = isinstance(self._sampler, OwnSampler) and self.transform_sampler_output is None
        if is_told and self._sampler.sample_direction == "forward":
            register_batch(batch, out, is_ours)
        self._place_inputs(batch, out)
        return batch

    def _finalise(self, out: Output) -> Output:
        """Move the output to the device, and convert its edge ids to the graph's."""
        perm, device = self._sampler.edge_permutation, self.device
        if isinstance(out, HeteroSamplerOutput):
            node, row, col = ({k: v.to(device) for k, v in part.items()} for part in (out.node, out.row, out.col))
            edge = {k: _permute(v, None if perm is None else perm.get(k), device) for k, v in (out.edge or {}).items()}
            if isinstance(self.data, HeteroData):
                # Types and relations that a sampler leaves out are empty, as in PyG.
                none = torch.empty(0, dtype=torch.int64, device=device)
                node = dict.fromkeys(self.data.node_types, none) | node
                if out.edge is not None:
                    edge = {**dict.fromkeys((kind for kind in self.data.edge_types if kind not in row), none), **edge}
            batch = None if out.batch is None else {k: v.to(device) for k, v in out.batch.items()}
            return HeteroSamplerOutput(node, row, col, edge, batch, out.num_sampled_nodes, out.num_sampled_edges,
                                       out.orig_row, out.orig_col, out.metadata)  # fmt: skip
        batch = None if out.batch is None else out.batch.to(device)
        return SamplerOutput(out.node.to(device), out.row.to(device), out.col.to(device),
                             _permute(out.edge, perm, device), batch, out.num_sampled_nodes, out.num_sampled_edges,
                             out.orig_row, out.orig_col, out.metadata)  # fmt: skip

    def _build_homogeneous(self, out: SamplerOutput, attributes: Attributes, is_ours: bool) -> Data:
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        pairs = getattr(out, "pair", None) if is_ours else None
        # A view of more would keep, and save, all of it.
        if pairs is None or pairs.untyped_storage().nbytes() > pairs.nbytes:
            # torch's idle threads spin for a while, in parallel with the loops that read features.
            with one_thread(self.device.type == "cpu"):
                pairs = torch.stack([out.row, out.col])
        sample = Sample(out.node, pairs, none if out.edge is None else out.edge, [], [])
        data = self.data
        if out.edge is None:
            # Merged edges have no attributes.
            data = without_edge_attributes(data)
        batch = attributes.build(data, sample, none, checked=is_ours, counts_seeds=False)
        # PyG's own setters take as long as the launch of a kernel.
        mapping = batch._store._mapping
        for key in ("num_sampled_nodes", "num_sampled_edges", "input_id", *(["e_id"] if out.edge is None else [])):
            del mapping[key]
        return batch

    def _list_options(self) -> Iterator[str]:
        # That of HGT has numbers of nodes.
        fanouts = getattr(self._sampler, "num_neighbors", getattr(self._sampler, "num_samples", None))
        yield type(self._sampler).__name__ if fanouts is None else show_fanouts(fanouts)

    def _summarise_places(self) -> Iterable[Placed] | None:
        if self._general is None:
            return None
        # The places of a graph in parts are not chosen here.
        is_chosen = self._plan is not None and self._sampled_topology is not None
        topology = [summarise(self._sampled_topology, self._plan.topology)] if is_chosen else []
        return [*topology, *self._general.summarise()]

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        attributes = self._prepare() if self._general is None else self._general
        lines = [self._sampler.summarise()] if isinstance(self._sampler, OwnSampler) else []
        if self._plan is not None and self._sampled_topology is not None:
            placed = self._plan.topology
            lines = [f"topology: {placed.num_nodes} nodes, {placed.num_edges} edges, {placed.placement}"]
        return lines, attributes.describe()


def is_uniform(sampler: Any) -> bool:
    """Check if a sampler is ours, without steps of the program's, and draws uniformly in a graph of one node type."""
    return isinstance(sampler, NeighborSampler) and is_own(sampler) and sampler.is_plain


def _first_drawn(outs: Sequence[Output]) -> Drawn:
    return Drawn(outs[0])


def read_positions(index: Any, count: int) -> Tensor:
    """Read positions among `count` seeds, int64 `[B]`, from a number, a list or a mask."""
    positions = as_ids("index", index).cpu().reshape(-1)
    if positions.dtype == torch.bool:
        if positions.numel() != count:
            raise ArgumentError(f"index must have shape [{count}] as a mask of the seeds, got [{positions.numel()}]")
        positions = positions.nonzero().view(-1)
    return check_ids("index", positions, count).long()


def _count_items(topology: Any) -> dict[str, int]:
    """Count nodes and edges of a topology without types."""
    if isinstance(topology, HeteroTopo):
        return {"node": sum(topology.num_nodes.values()), "edge": sum(topology.num_edges.values())}
    return {"node": topology.node_count, "edge": topology.edge_count}


def _permute(edge: Tensor | None, perm: Tensor | None, device: torch.device) -> Tensor | None:
    if edge is None:
        return None
    edge = edge.long()
    return (edge if perm is None else perm[edge.to(perm.device)]).to(device)


def note_sample(batch: Any, out: Output) -> None:
    """Write ids, trees and counts into a batch."""
    # PyG's own setter takes as long as the launch of a kernel.
    if isinstance(out, SamplerOutput):
        store = batch._store._mapping
        store.setdefault("n_id", out.node)
        if out.edge is not None:
            store.setdefault("e_id", out.edge)
        for name in ("batch", "num_sampled_nodes", "num_sampled_edges"):
            # The graph's attributes of these names do not belong to the batch.
            store.pop(name, None)
            if getattr(out, name) is not None:
                store[name] = getattr(out, name)
        if out.orig_row is not None and out.orig_col is not None:
            batch._orig_edge_index = torch.stack([out.orig_row, out.orig_col])
        return
    note_typed(batch, out)
