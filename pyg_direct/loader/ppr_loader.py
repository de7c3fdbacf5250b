"""`PPRLoader`: seeds with the nodes that personalised PageRank ranks highest around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.arguments import TorchOptions, read_input_nodes
from pyg_direct.loader.base_loader import ALONE
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.induced_loader import InducedLoader
from pyg_direct.loader.node_loader import count_seeds
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.loader.sampler_loader import read_positions
from pyg_direct.object_text import show_count, show_options
from pyg_direct.ops.argument_checks import check_count, check_ids, check_number
from pyg_direct.ops.sampling.draw_walks import check_walk_length
from pyg_direct.sampler.graph_reader import Ids, count_nodes, describe_other, read_topology
from pyg_direct.sampling.random_key import EpochKey, draw_seed
from pyg_direct.sampling.random_walks import PendingPPR, PPRPlan, PPRRecipe, PPRSample
from pyg_direct.typing import Device

# Sums of probabilities stay exact below 2**63.
_MOST_WALKS, _MOST_STEPS = 1 << 16, 1 << 10


class PPRLoader(InducedLoader, DataLoader):  # type: ignore[misc,type-arg]
    """Batches of seeds with the nodes of highest personalised PageRank around each, as `Data` on `device`.

    Walks from a seed go against the edges, towards the sources of messages. A walk restarts with probability `alpha`
    before each step; its visits to a node have the frequency of the seed's PageRank. `num_walks` walks of `walk_length`
    steps estimate it (Avrachenkov et al., SIAM J. Numer. Anal. 2007). They are drawn for each batch, as a function of
    seed, epoch and number, equal on every device. Each parallel edge counts; at a node without in-edges a walk stays.

    A batch has the attributes of its nodes, and all edges of the graph among them. Nodes are the seeds in their order,
    then the others ascending. `n_id`, `e_id`, `input_id` and `batch_size` are as in `NeighborLoader`. The neighborhoods
    are `ppr_edge_index`, int64 `[2, P]`: (node, seed) as positions in the batch. They are ordered by seed, first the
    seed itself, then by decreasing weight. `ppr_weight`, float32 `[P]`, has the estimates.

    Args:
        data: A `Data` with `edge_index` or `adj_t`.
        num_neighbors: Limit of nodes around a seed, in addition to itself, at least 1.
        input_nodes: Seeds: ids, int32 or int64 `[S]`, a mask bool `[N]`, or None for all nodes.
        alpha: Probability of a restart, in (0, 1).
        num_walks: Walks from a seed, in [1, 65,536].
        walk_length: Steps of a walk, in [1, 1,024]; the last one counts for all later ones.
        device, placement, topology_placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven: See
            `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `batch_size` and `shuffle`; options of workers are
            absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> batch = next(iter(PPRLoader(ring, 1, [2], alpha=0.5, seed=1, device="cpu")))
        >>> batch.n_id[batch.ppr_edge_index], batch.ppr_weight
        (tensor([[2, 1],
                [2, 2]]), tensor([0.5332, 0.2666]))
    """

    _ppr: PPRPlan | None = None

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Data]: ...  # type: ignore[override]

    def __init__(self, data: Data, num_neighbors: int, input_nodes: Ids | None = None, *, alpha: float = 0.2,
                 num_walks: int = 64, walk_length: int = 10, device: Device = None, placement: str = "auto",
                 topology_placement: str | None = None, feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", **kwargs: Unpack[TorchOptions]
                 ) -> None:  # fmt: skip
        if not isinstance(data, Data):
            raise ArgumentTypeError(f"data must be a Data, got {describe_other(data)}")
        for name in ("ppr_edge_index", "ppr_weight"):
            if name in data:
                raise ArgumentError(f"data must have no {name}, which batches are given: delete or rename it")
        self.num_neighbors, self.alpha = check_count("num_neighbors", num_neighbors), _check_chance(alpha)
        self.num_walks = check_count("num_walks", num_walks)
        self.walk_length = check_walk_length(walk_length)
        for name, value, most in (("num_walks", num_walks, _MOST_WALKS), ("walk_length", walk_length, _MOST_STEPS)):
            if not 1 <= value <= most:
                raise ArgumentError(f"{name} must lie in [1, {most}], got {value}")
        self._seeds = _read_seeds(input_nodes, count_nodes(data))
        self._open_induced(data, self._seeds.numel(), 1, device, placement, topology_placement, feature_cache,
                           store_dtype, seed, prefetch, ranks, uneven, kwargs)  # fmt: skip

    def _list_options(self) -> Iterator[str]:
        yield show_count(self.num_neighbors, "neighbor")
        yield from show_options(alpha=self.alpha)

    def _open_topology(self) -> CSRTopo:
        topology = read_topology(self.data, self.device)
        self._check_inputs(input_nodes=(self._seeds, topology.node_count))
        return topology

    def _prepare(self) -> Any:
        before = self._plan
        rows = super()._prepare()
        assert self._plan is not None
        if self._plan is not before or self._ppr is None:
            recipe = PPRRecipe(self.num_neighbors, self.alpha, self.num_walks, self.walk_length)
            self._ppr = PPRPlan(self._plan, recipe)
        return rows

    def _input(self) -> Tensor:
        return self._seeds

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> PendingPPR:
        assert self._ppr is not None
        return self._ppr.submit(seeds.nodes, key.of_batch(number))

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Data:
        return self._write(sample, seeds.positions)

    def _write(self, found: PPRSample, positions: Tensor) -> Data:
        """Build the batch of these seeds."""
        batch = self._build(found.sample)
        mapping, sample = batch._store._mapping, found.sample
        mapping["ppr_edge_index"], mapping["ppr_weight"] = found.pairs, found.weights
        for name, value in (("n_id", sample.n_id), ("e_id", sample.e_id)):
            mapping.setdefault(name, value)
        mapping["input_id"] = positions.to(sample.n_id.device, non_blocking=True)
        mapping["batch_size"] = positions.numel()
        return batch

    def _collate_items(self, index: Any) -> Data:
        """Make the batch of the seeds at these positions, with walks drawn for this call.

        Args:
            index: Positions among the seeds, int64 `[B]` or a list.
        """
        self._prepare()
        assert self._ppr is not None
        positions = read_positions(index, self._seeds.numel())
        return self._write(self._ppr.submit(self._seeds[positions], draw_seed()).finish(), positions)


def _check_chance(alpha: Any) -> float:
    """Check the probability of a restart."""
    if not 0 < check_number("alpha", alpha) < 1:
        raise ArgumentError(f"alpha must lie between 0 and 1, got {alpha!r}")
    return float(alpha)


def _read_seeds(input_nodes: Any, num_nodes: int) -> Tensor:
    """Read ids of the seeds, int64 `[S]` on the CPU."""
    nodes = read_input_nodes(input_nodes)
    if nodes is None:
        return torch.arange(num_nodes, device="cpu")
    count_seeds(nodes, num_nodes)
    nodes = nodes.nonzero().view(-1) if nodes.dtype == torch.bool else nodes
    return check_ids("input_nodes", nodes.cpu(), num_nodes).long()
