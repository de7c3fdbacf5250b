"""The part of `NeighborSampler` that samples around links, and around negative ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, NegativeSampling, SamplerOutput
from torch_geometric.sampler.base import SubgraphType

from pyg_direct.graph.relation import EdgeType
from pyg_direct.loader.links import Links, NegativeSource, PendingLinks, PositiveLinks, draws_itself
from pyg_direct.loader.opened import Opened
from pyg_direct.loader.output import to_general_output
from pyg_direct.loader.own import OwnSampler
from pyg_direct.loader.targets import Ways, check_exclusion, find_ways
from pyg_direct.runtime.mode import version_of
from pyg_direct.sampling.excluded import Excluded
from pyg_direct.sampling.general import GeneralPlan
from pyg_direct.sampling.negative import Edges
from pyg_direct.sampling.plan import GpuPlan


class LinkedSampler(OwnSampler):
    """What a `NeighborSampler` does with links; its constructor sets the attributes."""

    strict_negatives: bool
    exclude_target_edges: bool | str
    rev_edge_type: Sequence[str] | None
    _opened: Opened

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, *,
                          key: int | None = None) -> SamplerOutput | HeteroSamplerOutput:  # fmt: skip
        """Sample around links, and around negative ones drawn for them.

        Args:
            index: PyG's input: sources, targets, labels, times, the relation.
            neg_sampling: PyG's `NegativeSampling`; None draws none.
            key: Draw under this key instead of the sampler's own count of calls.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        return self.submit_from_edges(index, neg_sampling, key=key).finish()

    def submit_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, *,
                          key: int | None = None) -> PendingLinks:  # fmt: skip
        """Start to sample around links; as `sample_from_edges`, but uniform sampling of a `Data` is not waited for.

        Args:
            index, neg_sampling, key: As of `sample_from_edges`.

        Returns:
            What `finish()` makes a sample of, once it is waited for.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        key = self._next_key() if key is None else key
        links = self._open_links(index, neg_sampling, key)
        if self._is_plain():
            plan = self._open_plan(unique_seeds=True)
            pending = (plan.submit if isinstance(plan, GpuPlan) else plan.sample)(links.ends(), key)
            return PendingLinks(links, pending, self.disjoint)
        ways = self.find_ways(index.input_type)
        excluded = None if ways is None else links.list_excluded(ways)
        sample = self._sample(*links.seeds(self.disjoint), key=key, excluded=excluded)
        return PendingLinks(links, sample, self.disjoint)

    def sample_links_together(self, inputs: Sequence[EdgeSamplerInput], neg_sampling: NegativeSampling | None,
                              keys: Sequence[int]) -> list[SamplerOutput | HeteroSamplerOutput]:  # fmt: skip
        """Sample around the links of several batches, at least one, in as many steps as for one; as `sample_from_edges`
        for each under its key.

        Args:
            inputs: At least one, each as of `sample_from_edges`.
            neg_sampling: PyG's `NegativeSampling`; None draws none.
            keys: A key for each.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        plan, each = self._open_plan(), list(zip(inputs, keys, strict=True))
        if not isinstance(plan, GeneralPlan):
            return [self.sample_from_edges(index, neg_sampling, key=key) for index, key in each]
        links = [self._open_links(index, neg_sampling, key) for index, key in each]
        seeds = [own.seeds(self.disjoint) for own in links]
        requests = [(own, times if self.is_temporal else None) for own, times in seeds]
        ways = self.find_ways(inputs[0].input_type)
        excluded = None if ways is None else [own.list_excluded(ways) for own in links]
        return [PendingLinks(own, to_general_output(sample, self.is_hetero), self.disjoint).finish()
                for own, sample in zip(links, plan.sample_together(requests, keys, excluded), strict=True)]  # fmt: skip

    def _open_links(self, index: EdgeSamplerInput, neg_sampling: Any, key: int) -> Links:
        """The links of a batch with their negatives."""
        links = Links(index, self._opened.parts, self.device)
        if neg_sampling is not None:
            neg_sampling = NegativeSampling.cast(neg_sampling)
            source = self._negatives(neg_sampling, index.input_type)
            links.add_negatives(neg_sampling, source, key, self._avoided(source, index))
        return links

    def find_ways(self, edge_type: EdgeType | None) -> Ways | None:
        """Find the relations that links of a relation are taken out of; None where they stay.

        Args:
            edge_type: The relation; None for a graph without types.

        Raises:
            ArgumentError, ArgumentTypeError: the relation of reverse edges is not known, or not one.
        """
        exclude, reverse = self.exclude_target_edges, self.rev_edge_type
        if not exclude and reverse is None:
            return None
        is_bidirectional = self.subgraph_type == SubgraphType.bidirectional
        key = "ways", edge_type, exclude, is_bidirectional, None if reverse is None else tuple(reverse)
        if key not in self._opened.plans:
            check_exclusion(exclude, reverse, self._opened.parts)
            self._opened.plans[key] = find_ways(self._opened.parts, edge_type, with_reverse=exclude == "reverse",
                                                is_bidirectional=is_bidirectional, rev_edge_type=reverse)  # fmt: skip
        return self._opened.plans[key]  # type: ignore[no-any-return]

    def _negatives(self, neg_sampling: NegativeSampling, edge_type: EdgeType | None) -> NegativeSource:
        """What negative links of a relation are drawn from; made once."""
        weights = neg_sampling.src_weight, neg_sampling.dst_weight
        versions = [None if weight is None else (id(weight), version_of(weight)) for weight in weights]
        key = "negatives", edge_type, self.strict_negatives, *versions
        made = self._opened.plans.get(key)
        if made is None:
            made = NegativeSource(self._opened.parts, edge_type, weights, self.strict_negatives, self.device)
            self._opened.plans[key] = made
        return made.drawn_by(neg_sampling) if draws_itself(neg_sampling) else made  # type: ignore[no-any-return]

    def forget_written(self) -> None:
        """Draw by the weights of negatives as they are now, however they were written."""
        plans = self._opened.plans
        gone = {id(made) for made in plans.values() if isinstance(made, NegativeSource) and not made.is_current()}
        for key, made in list(plans.items()) if gone else ():
            if id(made) in gone or (key[0] == "avoided" and id(made[1]) in gone):
                del plans[key]

    def _avoided(self, source: NegativeSource, index: EdgeSamplerInput) -> Edges | None:
        """Edges and positive links that negatives must not be, made once for a loader; None unless strict."""
        if source.edges is None:
            return None
        given = getattr(index, "loader_links", None)
        if given is None:
            # From another loader, of which no more is known. As for drawn ones, a label of 0 says negative.
            is_positive = None if index.label is None or index.label.dim() != 1 else index.label != 0
            positives = PositiveLinks(index.row, index.col, is_positive)
            return positives.join(source.edges, self.device, is_one_type=source.is_one_type)
        positives = given.positives
        key = "avoided", id(positives), id(source)
        if key not in self._opened.plans:
            # Kept with what it is found by, whose ids stay their own then.
            joined = positives.join(source.edges, self.device, is_one_type=source.is_one_type)
            self._opened.plans[key] = positives, source, joined
        return self._opened.plans[key][-1]  # type: ignore[no-any-return]

    # What the rest of a `NeighborSampler` does.

    @property
    def subgraph_type(self) -> SubgraphType:
        """Which edges among the sampled nodes a sample has."""
        raise NotImplementedError

    @property
    def disjoint(self) -> bool:
        """Whether each seed gets a tree of its own."""
        raise NotImplementedError

    @property
    def is_hetero(self) -> bool:
        """Whether the graph has types."""
        raise NotImplementedError

    @property
    def is_temporal(self) -> bool:
        """Whether nodes or edges have times."""
        raise NotImplementedError

    def _is_plain(self) -> bool:
        raise NotImplementedError

    def _open_plan(self, unique_seeds: bool = False) -> Any:
        raise NotImplementedError

    def _sample(self, seed: Tensor | Mapping[str, Tensor], seed_time: Any = None, *, key: int | None = None,
                excluded: Excluded | None = None) -> SamplerOutput | HeteroSamplerOutput:  # fmt: skip
        raise NotImplementedError
