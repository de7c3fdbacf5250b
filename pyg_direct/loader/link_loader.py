"""`LinkLoader` and `LinkNeighborLoader`: batches around links, with negatives, on the device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.loader import LinkLoader as PygLinkLoader, LinkNeighborLoader as PygLinkNeighborLoader
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, NegativeSampling
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.row_dtypes import check_store_dtype
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.loader.arguments import TorchOptions, check_custom_cls, check_stores, settle_workers
from pyg_direct.loader.base_loader import ALONE
from pyg_direct.loader.batch_sampler import FEW_SEEDS, Seeds
from pyg_direct.loader.hot_row_ranking import SeedDraw
from pyg_direct.loader.node_loader import check_input_id, check_times, join_windows
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.loader.sampler_loader import GeneralLoader, is_uniform
from pyg_direct.nn.sorted_edges import register_hops
from pyg_direct.ops.argument_checks import check_callables, check_flag, check_ids, checks_keywords, in_short, tell_kind
from pyg_direct.ops.rows.upload import upload
from pyg_direct.runtime.host.tensor_views import LazyDict
from pyg_direct.sampler.graph_reader import (
    FanoutsOf,
    Graph,
    InputLinks,
    Negatives,
    Subgraph,
    check_graph,
    list_links,
    list_relations,
    settle_filter,
)
from pyg_direct.sampler.keyed_sampler import (
    Drawn,
    Output,
    OwnSampler,
    ask,
    check_is_used,
    check_sampler,
    device_for,
    is_own,
)
from pyg_direct.sampler.link_seeds import LoaderLinks, draws_itself, name_ends, tells_negatives
from pyg_direct.sampler.neighbor_sampler import NeighborSampler
from pyg_direct.sampling.captured_plan import Finished, PendingOutput
from pyg_direct.sampling.negative_links import MAX_NODES, check_weight
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.sampling.sampling_options import Sample
from pyg_direct.sampling.seeds import Ends
from pyg_direct.sampling.uniform_plan import is_captured_on
from pyg_direct.typing import Device


class LinkLoader(GeneralLoader, PygLinkLoader):  # type: ignore[misc]
    """Batches around links, after PyG's `LinkLoader`, on `device`.

    Args:
        data: `Data`, `HeteroData` or (`FeatureStore`, `GraphStore`); the second may be None if the sampler has the
            edges.
        link_sampler: A `pyg_direct.sampler.NeighborSampler`, or any sampler with PyG's interface.
        edge_label_index: Links, int64 `[2, L]`, sources first, or None for all edges; (relation, links) or a relation
            on a graph with types; (None, links or None) on one without types in stores.
        edge_label: A label for each link, `[L, ...]` of any dtype.
        edge_label_time: A time for each link, integers `[L]`.
        input_start_time, input_end_time: A window for each link instead, see `NodeLoader`. Batches hold them as
            `edge_label_start_time` and `edge_label_time`, and for triplets as `seed_start_time` and `seed_time`.
        neg_sampling: PyG's `NegativeSampling`, its mode, or a dict of its arguments.
        neg_sampling_ratio: Negative links for each link; short for `neg_sampling` of mode `binary`.
        transform: Called with every batch.
        transform_sampler_output: Called with the sampler's output before rows are fetched.
        filter_per_worker: See `NeighborLoader`.
        custom_cls: Class of the batches of a graph in stores.
        input_id: An id for each link, `[L]` of any dtype, that batches hold instead of its position.
        device, placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven, ahead: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> from pyg_direct.sampler import NeighborSampler
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> sampler = NeighborSampler(ring, [-1], device="cpu")
        >>> (batch,) = LinkLoader(ring, sampler, torch.tensor([[0], [2]]), device="cpu")  # the link 0 -> 2
        >>> batch.n_id.tolist(), batch.edge_label_index.tolist()
        ([0, 2, 1, 3], [[0], [1]])
    """

    _item = ("link", None)
    # Name of the sampler's argument in messages.
    _sampler_name = "link_sampler"

    def __init__(self, data: Graph, link_sampler: BaseSampler, edge_label_index: InputLinks = None,
                 edge_label: Tensor | None = None, edge_label_time: Tensor | None = None,
                 neg_sampling: Negatives = None, neg_sampling_ratio: float | None = None,
                 transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, filter_per_worker: bool | None = None,
                 custom_cls: Any = None, input_id: Tensor | None = None, *, device: Device = None,
                 placement: str = "auto", feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad",
                 input_start_time: Tensor | None = None, input_end_time: Tensor | None = None,
                 ahead: int | str | None = None, **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        edge_label_time = join_windows("edge_label_time", edge_label_time, input_start_time, input_end_time)
        device = device_for(device, link_sampler)
        self._settle(device, placement, None, feature_cache, None, seed, prefetch, ranks, uneven, ahead)
        options = {**kwargs, "filter_per_worker": settle_filter(filter_per_worker, data)}
        self._open_links(data, link_sampler, edge_label_index, edge_label, edge_label_time, neg_sampling,
                         neg_sampling_ratio, transform, transform_sampler_output, custom_cls, input_id, store_dtype,
                         options)  # fmt: skip

    def _open_links(self, data: Any, link_sampler: Any, edge_label_index: Any, edge_label: Any, edge_label_time: Any,
                    neg_sampling: Any, neg_sampling_ratio: Any, transform: Any, transform_sampler_output: Any,
                    custom_cls: Any, input_id: Any, store_dtype: torch.dtype | None, kwargs: Mapping[str, Any]
                    ) -> None:  # fmt: skip
        """Check the inputs and pass them to PyG's loader."""
        check_sampler(self._sampler_name, link_sampler, "sample_from_edges")
        check_callables(transform=transform, transform_sampler_output=transform_sampler_output, custom_cls=custom_cls)
        check_graph(data, is_sampled=False)
        check_store_dtype(store_dtype)
        check_stores(data, store_dtype=store_dtype, feature_cache=self.feature_cache)
        check_custom_cls(data, custom_cls)
        self.store_dtype = store_dtype
        edge_label_index = _read_links(data, edge_label_index)
        links = edge_label_index[1] if isinstance(edge_label_index, tuple) else edge_label_index
        count = None if links is None else links.shape[1]
        if edge_label is not None and not isinstance(edge_label, Tensor):
            raise ArgumentTypeError(f"edge_label must be a tensor, got {type(edge_label).__name__}")
        if edge_label is not None and edge_label.numel() == 0 and count != 0:
            raise ArgumentError("edge_label must have a label for each link, got none")
        neg_sampling = _read_negatives(neg_sampling)
        if neg_sampling_ratio is not None:
            _check_ratio(neg_sampling_ratio)
        if neg_sampling is not None and neg_sampling.is_triplet() and edge_label is not None:
            raise ArgumentError("edge_label must be None with triplets, whose index fields say what is negative")
        if edge_label is not None and edge_label.numel() == 0:
            # PyG computes their minimum, which fails for an empty tensor.
            edge_label = None
        # Before PyG's loader overwrites labels when it adds negatives.
        has_negatives = edge_label is not None and tells_negatives(edge_label)
        check_times("edge_label_time", edge_label_time, count, windows=True)
        check_input_id(input_id, count)
        kwargs = settle_workers(type(self), kwargs, self.device, may_start=False, num_seeds=count)
        PygLinkLoader.__init__(self, data, link_sampler, edge_label_index, edge_label, edge_label_time, neg_sampling,
                               neg_sampling_ratio, transform, transform_sampler_output, custom_cls=custom_cls,
                               input_id=input_id, **kwargs)  # fmt: skip
        self.input_data = LoaderLinks(self.input_data, has_negatives)
        self._check_links()

    def _check_links(self) -> None:
        given = self.input_data
        nodes: Any = self._sampler.num_nodes if isinstance(self._sampler, OwnSampler) else None
        for end in (0, 2) if isinstance(nodes, dict) else ():
            if given.input_type[end] not in nodes:
                raise ArgumentError(
                    f"edge_label_index must name known node types, got {given.input_type[end]!r} of {list(nodes)}"
                )
        sizes = [nodes[given.input_type[end]] for end in (0, 2)] if isinstance(nodes, dict) else [nodes, nodes]
        names = name_ends(given.input_type)
        given.row = check_ids(names[0], given.row, sizes[0]).long().cpu()
        given.col = check_ids(names[1], given.col, sizes[1]).long().cpu()
        count = given.row.numel()
        if given.label is not None and (given.label.dim() == 0 or len(given.label) != count):
            raise ArgumentError(
                f"edge_label must have a label for each of the {count} links, got shape {tuple(given.label.shape)}"
            )
        check_times("edge_label_time", given.time, count, windows=True)
        negatives = self.neg_sampling
        for weight, size in ((getattr(negatives, "src_weight", None), sizes[0]),
                             (getattr(negatives, "dst_weight", None), sizes[1])):  # fmt: skip
            if weight is not None and size is not None:
                check_weight(weight, size)
        if isinstance(self._sampler, NeighborSampler):
            self._sampler.find_ways(given.input_type)

    @property
    def _sampler(self) -> Any:
        return self.link_sampler

    def _list_draws(self) -> list[SeedDraw]:
        links, negatives, count = self.input_data, self.neg_sampling, self.batch_size or 1
        source, target = (None, None) if links.input_type is None else (links.input_type[0], links.input_type[-1])
        draws = [SeedDraw(source, count, links.row), SeedDraw(target, count, links.col)]
        if negatives is None:
            return draws
        drawn = math.ceil(count * negatives.amount)
        if negatives.is_binary():
            draws.append(SeedDraw(source, drawn, weight=negatives.src_weight))
        return [*draws, SeedDraw(target, drawn, weight=negatives.dst_weight)]

    def _check_seeds(self, sizes: Any) -> None:
        given = self.input_data
        ends = [sizes.get(given.input_type[end]) for end in (0, 2)] if isinstance(sizes, dict) else [sizes, sizes]
        self._check_inputs(edge_label_index=(given.row, ends[0]), edge_label_index__targets=(given.col, ends[1]))

    def _input(self) -> Tensor:
        links = self.input_data
        # Both ends are looked up for a whole epoch at once if this takes little memory.
        is_pair = links.row.numel() <= FEW_SEEDS and (self._plan is not None or self._samples_together())
        return torch.stack([links.row, links.col], 1) if is_pair else links.row

    def _ask(self, positions: Tensor, key: int | None) -> Output:
        out: Output = ask(self._sampler, "sample_from_edges", key, self.input_data[positions],
                          neg_sampling=self.neg_sampling)  # fmt: skip
        return out

    def _submit_to_sampler(self, seeds: Sequence[Seeds], keys: Sequence[int]) -> PendingOutput | Finished:
        inputs = [self.input_data.take(own.positions, own.nodes) for own in seeds]
        pending: PendingOutput | Finished = self._sampler.submit_links_together(inputs, self.neg_sampling, keys)
        return pending

    def _open_plan(self) -> Any:
        """Open the plan that draws and places all links; None if links are strict, weighted, timed or excluded."""
        sampler, negatives = self._sampler, self.neg_sampling
        if (not is_uniform(sampler) or not is_captured_on(sampler.device) or not self._is_own()
                or not isinstance(self.data, Data) or self.input_data.time is not None
                or not 0 < sampler.num_nodes < MAX_NODES):  # fmt: skip
            return None
        if negatives is not None and (sampler.strict_negatives or negatives.src_weight is not None
                                      or negatives.dst_weight is not None or draws_itself(negatives)):  # fmt: skip
            return None
        return sampler.open_plan(unique_seeds=True)

    def _list_seeds(self, seeds: Seeds) -> Ends:
        positions, ends, negatives, more_sources, more_targets = seeds.positions, seeds.nodes, self.neg_sampling, 0, 0
        if negatives is not None:
            more_targets = math.ceil(positions.shape[0] * negatives.amount)
            more_sources = more_targets if negatives.is_binary() else 0
        has_labels = more_sources > 0 and self.input_data.label is None
        # Not by indexing, which wakes torch's threads for a few thousand items.
        sources, targets = ends.unbind(1) if ends.dim() == 2 else (
            ends, self.input_data.col.index_select(0, positions))  # fmt: skip
        return Ends(sources, targets, more_sources, more_targets, has_labels)

    def _build_sample(self, sample: Sample, positions: Tensor, shared: Mapping[str, SharedRows] = ALONE,
                      memory: list[Any] | None = None) -> Any:  # fmt: skip
        given, negatives, ends = self.input_data, self.neg_sampling, sample.ends
        assert ends is not None
        input_id = positions if given.input_id is None else given.input_id.index_select(0, positions)
        batch = self._general.build(self.data, sample, input_id, memory=memory, counts_seeds=False)
        store, places, count = batch._store._mapping, ends.places, positions.shape[0]
        values: dict[str, Tensor | None] = {}
        if negatives is None or negatives.is_binary():
            values["edge_label_index"] = places.view(2, -1)
            values["edge_label"] = last = self._find_labels(positions, ends.labels, places.shape[0] // 2)
        else:
            amount = places.shape[0] // count - 2
            last = places[2 * count :].view(amount, count).t().contiguous().squeeze(-1)
            values.update(src_index=places[:count], dst_pos_index=places[count : 2 * count], dst_neg_index=last,
                          seed_time=None, edge_label_index=None)  # fmt: skip
        values["edge_label_time"] = None
        if memory and last is not None:
            memory.append(last)
        # As in PyG, missing values are removed.
        _put(batch._store, **values)
        register_hops(batch, store["num_sampled_nodes"], store["num_sampled_edges"], sample.max_degree)
        return batch

    def _find_labels(self, positions: Tensor, drawn: Tensor, num_pairs: int) -> Tensor | None:
        """Build the labels of links and of negatives, `[num_pairs, ...]`; None without labels."""
        if self.input_data.label is None:
            return drawn if drawn.numel() else None
        label = upload(self.input_data.label[positions], drawn.device)
        count = num_pairs - positions.shape[0]
        return torch.cat([label, label.new_zeros((count, *label.shape[1:]))]) if count else label

    def _prepare(self) -> Any:
        general = super()._prepare()
        if isinstance(self._sampler, NeighborSampler):
            self._sampler.forget_written()
        return general

    def _submits(self) -> bool:
        """Check if the sampler can start to sample without a wait: a user's sampler is called as PyG calls it."""
        return isinstance(self._sampler, NeighborSampler) and is_own(self._sampler)

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        if self._plan is not None or not self._submits():
            return super()._submit(key, number, seeds)
        links = self.input_data.take(seeds.positions, seeds.nodes)
        return PendingOutput(self._sampler.submit_from_edges(links, self.neg_sampling, key=key.of_batch(number)), Drawn)

    def _place_inputs(self, batch: Any, out: Output) -> None:
        """Write labels, times and indices into the same fields as PyG's loader."""
        fields = [value.to(self.device) if isinstance(value, Tensor) else value for value in out.metadata[1:]]
        edge_type = self.input_data.input_type
        start = None
        if fields[-1] is not None and fields[-1].dim() == 2:
            start, fields[-1] = fields[-1].t().contiguous().unbind()
        # Their memory belongs to the batch.
        out.metadata = (out.metadata[0], *fields)
        is_indexed = self.neg_sampling is None or self.neg_sampling.is_binary()

        def write(part: Any) -> None:
            _put(part, input_id=out.metadata[0])
            if is_indexed:
                _put(part, edge_label_index=fields[0], edge_label=fields[1], edge_label_time=fields[2])
                if start is not None:
                    _put(part, edge_label_start_time=start)
            else:
                for key in ("edge_label_index", "edge_label_time"):
                    if key in part:
                        del part[key]

        is_typed = isinstance(out, HeteroSamplerOutput)
        if is_typed:
            edges = batch._edge_store_dict
            if type(edges) is LazyDict and edge_type in self.data._edge_store_dict:
                edges.when_made(lambda made: write(made[edge_type]))
            else:
                write(edges[edge_type] if edge_type in edges else batch[edge_type])
        else:
            write(batch)
        if is_indexed:
            return
        source = target = batch
        if is_typed:
            nodes = batch._node_store_dict
            source, target = (nodes[kind] if kind in nodes else batch[kind] for kind in (edge_type[0], edge_type[-1]))
        _put(source, src_index=fields[0])
        _put(target, dst_pos_index=fields[1], dst_neg_index=fields[2])
        for end in (source, target):
            _put(end, seed_time=fields[3])
            if start is not None:
                _put(end, seed_start_time=start)


def _put(part: Any, **values: Any) -> None:
    """Write values into a batch without types, or into a store; None removes a value."""
    if not isinstance(part, BaseStorage):
        for key, value in values.items():
            setattr(part, key, value)
        return
    # PyG's own setter takes as long as the launch of a kernel.
    mapping = part._mapping
    for key, value in values.items():
        if value is None:
            mapping.pop(key, None)
        else:
            mapping[key] = value


class LinkNeighborLoader(LinkLoader, PygLinkNeighborLoader):  # type: ignore[misc]
    """Batches around links, after PyG's `LinkNeighborLoader` (same arguments, same fields), on `device`.

    Like all draws, negatives are functions of the seed, the epoch and the number of the batch. On a GPU, a batch is one
    captured CUDA graph, and kernels draw the negatives. If a `Data` is sampled uniformly without times, strict or
    weighted negatives are drawn step by step before the graph.

    Args:
        data, edge_label_index, edge_label, edge_label_time, neg_sampling, neg_sampling_ratio: See `LinkLoader`.
        input_start_time, input_end_time: See `LinkLoader`.
        num_neighbors, replace, subgraph_type, disjoint, temporal_strategy, time_attr, weight_attr, is_sorted: See
            `NeighborLoader`.
        transform, transform_sampler_output, filter_per_worker, neighbor_sampler, directed: See `NeighborLoader`.
        strict_negatives: Negative links are neither edges of the graph nor positive links of the loader; after 32 tries
            one is kept, with a warning. If labels are 0 and 1, links with label 0 may be drawn. A graph, or a relation
            of a type with itself, is undirected if it has all edges in both directions; negatives then avoid reversed
            positive links too. Without edges in the graph, give `edge_label_index` both directions.
        exclude_target_edges: True: sample as if the links' relation had no edges from the sources to the targets of the
            batch's links; other relations keep theirs. All fanouts are used. `"reverse"`: exclude reverse edges too. On
            a graph without types, these are the reversed links. With types, they are edges of the relation `rev_...`,
            and of relations that hold exactly the reversed edges of the links' relation. A relation from a type to
            itself is its own reverse too.
        rev_edge_type: With `"reverse"`: the relation of the reverse edges, as in `RandomLinkSplit`, if its name and
            edges do not identify it.
        device, placement, topology_placement, feature_cache, topology_cache, store_dtype: See `NeighborLoader`.
        sampling, layer_dependency: See `NeighborLoader`.
        seed, prefetch, time_comparison, time_window, ranks, uneven, custom_cls, ahead: See `NeighborLoader`.
        input_id: An id for each link, `[L]` of any dtype, that batches hold instead of its position.
        super_batch: With types or other options: batches sampled in one call, equal to batches without it. None: see
            `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        NotImplementedError: combinations that PyG does not support either.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> (batch,) = LinkNeighborLoader(ring, [-1], torch.tensor([[0], [2]]), device="cpu")  # the link 0 -> 2
        >>> batch.n_id.tolist(), batch.edge_index.tolist(), batch.edge_label_index.tolist()
        ([0, 2, 1, 3], [[3, 2], [0, 1]], [[0], [1]])
    """

    _sampler_name = "neighbor_sampler"

    @checks_keywords
    def __init__(self, data: Graph, num_neighbors: FanoutsOf, edge_label_index: InputLinks = None,
                 edge_label: Tensor | None = None, edge_label_time: Tensor | None = None, replace: bool = False,
                 subgraph_type: Subgraph = "directional", disjoint: bool = False, temporal_strategy: str = "uniform",
                 neg_sampling: Negatives = None, neg_sampling_ratio: float | None = None, time_attr: str | None = None,
                 weight_attr: str | None = None, transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, is_sorted: bool = False,
                 filter_per_worker: bool | None = None, neighbor_sampler: BaseSampler | None = None,
                 directed: bool = True, *, strict_negatives: bool = False, exclude_target_edges: bool | str = False,
                 device: Device = None, placement: str = "auto", topology_placement: str | None = None,
                 feature_cache: int | str | None = None, topology_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 time_comparison: str = "<=", time_window: int | None = None,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", custom_cls: Any = None,
                 input_id: Tensor | None = None, super_batch: int | None = None, rev_edge_type: EdgeType | None = None,
                 input_start_time: Tensor | None = None, input_end_time: Tensor | None = None,
                 ahead: int | str | None = None, sampling: str = "uniform", layer_dependency: bool = False,
                 **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        edge_label_time = join_windows("edge_label_time", edge_label_time, input_start_time, input_end_time,
                                       time_window)  # fmt: skip
        if neighbor_sampler is None and (edge_label_time is None) != (time_attr is None):
            is_set = ["'edge_label_time' is not set", "'time_attr' is not set"][time_attr is None]
            raise ArgumentError(f"edge_label_time and time_attr must be given together, but {is_set}")
        check_strict(strict_negatives, neg_sampling, neg_sampling_ratio)
        device = device_for(device, neighbor_sampler)
        self._settle(
            device, placement, topology_placement, feature_cache, super_batch, seed, prefetch, ranks, uneven, ahead
        )
        self._made_sampler = neighbor_sampler is None
        if neighbor_sampler is None:
            neighbor_sampler = NeighborSampler(
                data, num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr,
                is_sorted, directed=directed, device=device, placement=self.topology_placement, seed=self.seed,
                time_comparison=time_comparison, time_window=time_window, strict_negatives=strict_negatives,
                exclude_target_edges=exclude_target_edges, topology_cache=topology_cache,
                rev_edge_type=rev_edge_type, sampling=sampling, layer_dependency=layer_dependency)  # fmt: skip
        elif strict_negatives or exclude_target_edges or rev_edge_type is not None:
            raise ArgumentError("strict_negatives, exclude_target_edges and rev_edge_type belong to the sampler, if "
                                "one is given")  # fmt: skip
        else:
            check_is_used(neighbor_sampler, {"time_comparison": time_comparison, "time_window": time_window,
                                             "topology_placement": topology_placement,
                                             "topology_cache": topology_cache, "sampling": sampling,
                                             "layer_dependency": layer_dependency},
                          {"replace": replace, "subgraph_type": subgraph_type, "disjoint": disjoint,
                           "temporal_strategy": temporal_strategy, "time_attr": time_attr, "weight_attr": weight_attr,
                           "is_sorted": is_sorted, "directed": directed})  # fmt: skip
        options = {**kwargs, "filter_per_worker": settle_filter(filter_per_worker, data)}
        self._open_links(data, neighbor_sampler, edge_label_index, edge_label, edge_label_time, neg_sampling,
                         neg_sampling_ratio, transform, transform_sampler_output, custom_cls, input_id, store_dtype,
                         options)  # fmt: skip


def _read_negatives(neg_sampling: Any) -> NegativeSampling | None:
    """Read options of negatives, as PyG does.

    Raises:
        ArgumentError, ArgumentTypeError: PyG refuses them, for the reason given.
    """
    try:
        made = NegativeSampling.cast(neg_sampling)
        if made is not None and not math.isfinite(made.amount):
            raise ValueError(f"The attribute 'amount' needs to be finite (got {made.amount})")
        return made  # type: ignore[no-any-return]
    except (ValueError, TypeError, NotImplementedError) as error:
        kind = ArgumentError if isinstance(error, ValueError) else ArgumentTypeError
        raise kind("neg_sampling must be 'binary', 'triplet', a dict of their options or a NegativeSampling, got "
                   f"{neg_sampling!r}: {error}") from error  # fmt: skip


def check_strict(strict_negatives: bool, neg_sampling: Any, neg_sampling_ratio: float | None) -> None:
    """Check that strict negatives come with negatives."""
    if check_flag("strict_negatives", strict_negatives) and neg_sampling is None and not neg_sampling_ratio:
        raise ArgumentError("strict_negatives=True needs neg_sampling, got None: there are no negatives")


def _check_ratio(ratio: Any) -> None:
    """Check the number of negatives per link: at least 0."""
    try:
        is_ratio = not isinstance(ratio, str) and 0 <= float(ratio) < 2**31
    except (TypeError, ValueError, RuntimeError):
        is_ratio = False
    if not is_ratio:
        raise ArgumentError(f"neg_sampling_ratio must be at least 0, got {ratio!r}")


def _list_links(name: str, part: Any) -> Tensor:
    """List the edges of a graph or a relation; edges of a transposed adjacency, a `SparseTensor` or a sparse tensor of
    torch, in its order.
    """
    if part.get("edge_index") is not None:
        return part.edge_index  # type: ignore[no-any-return]
    adj_t = part.get("adj_t")
    if adj_t is None:
        raise ArgumentError(
            f"edge_label_index must have the links, as {name} has no edges that could be taken, got None"
        )
    if isinstance(adj_t, Tensor):
        # Parallel edges stay separate.
        target, source = adj_t.to_sparse_coo()._indices()
    else:
        target, source, _ = adj_t.coo()
    return torch.stack([source, target])


def _read_links(data: Any, edge_label_index: Any) -> Any:
    """Read and check links in PyG's forms: a tensor, or (relation, tensor)."""
    if isinstance(data, Data):
        return _list_links("data", data) if edge_label_index is None else _check_links_shape(edge_label_index)
    is_pair = isinstance(edge_label_index, (tuple, list)) and len(edge_label_index) > 0
    if not is_pair:
        raise ArgumentTypeError(tell_several(edge_label_index) or (
            "edge_label_index must be a relation or (relation, links) for a graph with types, got "
            f"{tell_kind(edge_label_index)}: name the relation as (source type, name, target type)"))  # fmt: skip
    bare = isinstance(edge_label_index[0], str) and all(isinstance(part, str) for part in edge_label_index)
    several = None if bare else tell_several(edge_label_index)
    if several is not None:
        raise ArgumentTypeError(several)
    if len(edge_label_index) != 2 and not bare:
        raise ArgumentError("edge_label_index must be a relation or (relation, links), got a tuple of "
                            f"{len(edge_label_index)}: {in_short(edge_label_index)}")  # fmt: skip
    edge_type, links = (edge_label_index, None) if bare else edge_label_index
    is_named = _is_relation(edge_type)
    # As in PyG, a graph without types in stores has the relation None.
    if not is_named and (edge_type is not None or isinstance(data, HeteroData) or list_relations(data[1]) != [None]):
        raise ArgumentTypeError(
            f"edge_label_index must name a relation, got {in_short(edge_type)}: give "
            "((source type, name, target type), links)"
        )
    if isinstance(data, HeteroData):
        edge_type = data._to_canonical(*edge_type)
        for end in (edge_type[0], edge_type[-1]):
            if end not in data.node_types:
                raise ArgumentError(f"edge_label_index must name known node types, got {end!r} of {data.node_types}")
        if links is None:
            if edge_type not in data.edge_types:
                raise ArgumentError(
                    f"edge_label_index must name a known relation, got {edge_type} of {data.edge_types}"
                )
            return edge_type, _list_links(f"data[{edge_type}]", data[edge_type])
        if edge_type not in data.edge_types:
            _warn_of_near(edge_type, data.edge_types)
    elif links is None:
        return edge_type, list_links(data[1], edge_type)
    return edge_type, _check_links_shape(links)


def _warn_of_near(edge_type: EdgeType, known: list[EdgeType]) -> None:
    """Warn of a relation that the graph lacks, as PyG allows for links, if its name is nearly the name of another."""
    names = {kind[1]: kind for kind in known if (kind[0], kind[2]) == (edge_type[0], edge_type[2])}
    near = get_close_matches(edge_type[1], names, 1)
    if near:
        warnings.warn(f"edge_label_index names {edge_type}, a relation that the graph does not have; did you mean "
                      f"{names[near[0]]}?", UserWarning, stacklevel=2)  # fmt: skip


def _is_relation(value: Any, least: int = 1) -> bool:
    """Check if a value names a relation, in full or in PyG's short forms of at least `least` strings."""
    return isinstance(value, (tuple, list)) and least <= len(value) <= 3 and all(isinstance(w, str) for w in value)


def tell_several(given: Any) -> str | None:
    """Return the error text for several relations, with or without links, or for one in a list; None for other
    values.
    """
    items = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(items, (set, frozenset)):
        items = list(items)
    if not isinstance(items, (list, tuple)) or not items:
        return None
    named = [
        item[0] if isinstance(item, (list, tuple)) and item and _is_relation(item[0], 2) else item for item in items
    ]
    # (relation, links) is one.
    if not all(_is_relation(name, 2) for name in named):
        return None
    way = f"give {named[0]} or ({named[0]}, links)" if len(named) == 1 else (
        "make a loader for each, and go over several together with zip(first, second)")  # fmt: skip
    return f"edge_label_index must be one relation or one (relation, links), got {in_short(named)}: {way}"


def _check_links_shape(links: Any) -> Tensor:
    is_list = isinstance(links, (list, tuple))
    if is_list and len(links) == 2 and all(isinstance(end, Tensor) and end.dim() == 1 for end in links):
        # PyG's accepts both ends separately too.
        if links[0].shape != links[1].shape:
            sizes = " and ".join(str(end.numel()) for end in links)
            raise ArgumentError(f"edge_label_index must have as many sources as targets, got {sizes}")
        links = torch.stack(list(links))
    if not isinstance(links, Tensor):
        try:
            links = torch.as_tensor(links, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            first = links[0] if is_list and links else links
            is_named = tell_several([first]) is not None or isinstance(first, str)
            hint = ": relations are those of a HeteroData" if is_named else ""
            raise ArgumentTypeError(
                f"edge_label_index must be links [2, L] or None, got {in_short(links)}{hint}"
            ) from error
    if is_list and links.dim() == 1 and not links.numel():
        # No links.
        links = links.view(2, 0)
    if links.dim() != 2 or links.shape[0] != 2:
        hint = ": give its .t()" if links.dim() == 2 and links.shape[1] == 2 else ""
        if links.dtype == torch.bool and links.dim() == 1:
            hint = ": of a mask, give edge_index[:, mask]"
        raise ArgumentError(f"edge_label_index must have shape [2, L], got {list(links.shape)}{hint}")
    # The dtype of an empty list is meaningless: it becomes float.
    return links if links.numel() > 0 else links.long()  # type: ignore[no-any-return]
