"""`PartPlan`: the plan of one rank for batches of a graph in parts.

On a GPU its batches are captured plans, which exchange (`exchange_plan.py`). On a CPU it is the plan of a whole graph,
whose picks are exchanges of the host (`frontier_exchange.py`). So it is for clients of servers, and if exchanges are
not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pyg_direct.distributed.captured_rows import CapturedRows
from pyg_direct.distributed.edge_queries import EdgesOfAll
from pyg_direct.distributed.exchange_plan import ExchangePlan, StrictPairs
from pyg_direct.distributed.frontier_exchange import FrontierExchange
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.row_exchange import RowExchange
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.ops.argument_checks import check_key
from pyg_direct.ops.sampling.sample_hetero import Picked
from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.sampling.captured_plan import Finished, Pending, PendingOutput
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.hetero_sample import GeneralSample
from pyg_direct.sampling.sampling_options import GeneralRecipe
from pyg_direct.sampling.seeds import Ends, Excluded, Request, Seeds, list_pairs


class PartPlan(GeneralPlan):
    """Plan of a graph in parts, whose batches equal those of `GeneralPlan` on the whole graph under the same keys.

    A call to `sample` is collective: processes without a batch call it with no seeds.

    Args:
        recipe: Options of sampling, equal in all processes.
        communicator: Communicator of the owners of the other parts; rank r owns part r.
        rows: Rows that come with captured batches if kernels alone read them; None for none.
        open_frontiers: Opens the exchange of the host: (part, placed part, plan, communicator) -> exchange.
    """

    has_all_rows = False
    # The sample gives the owners of edges.
    _keeps_sampled = True

    def __init__(self, part: GraphPart, recipe: GeneralRecipe, communicator: Communicator, *, timed: bool,
                 weighted: bool, rows: RowExchange | None = None,
                 open_frontiers: Callable[..., FrontierExchange] = FrontierExchange) -> None:  # fmt: skip
        placed: Any = part.place(timed=timed, weighted=weighted)
        super().__init__(placed, recipe)
        self.part, self._communicator, self._rows_of_nodes = part, communicator, rows
        self._frontiers = open_frontiers(part, placed, self, communicator)
        # By whether nodes may stand several times among the seeds, whether batches leave out edges, and the relation
        # that strict negatives avoid, with True for triplets.
        self._captured_plans: dict[tuple[bool, bool, tuple[EdgeType, bool] | None], ExchangePlan] = {}

    @property
    def is_captured(self) -> bool:
        """True if batches are sampled by captured plans that exchange; all ranks ask for it."""
        return self._communicator.captured and self._communicator.open_segments() is not None

    def sample_together(self, requests: Sequence[Request], keys: Sequence[int],
                        excluded: Sequence[Excluded] | None = None) -> list[GeneralSample]:  # fmt: skip
        """Sample as many requests together as an exchange has room for."""
        size = self._frontiers.most_batches
        groups = [slice(first, first + size) for first in range(0, len(keys), size)]
        return [sample for own in groups for sample in super(PartPlan, self).sample_together(
            requests[own], keys[own], None if excluded is None else excluded[own])]  # fmt: skip

    def submit_together(self, requests: Sequence[Any], keys: Sequence[int],
                        excluded: Sequence[Excluded] | None = None, *, repeats: bool = False
                        ) -> PendingOutput | Pending | Finished:  # fmt: skip
        """Start to sample several batches one after the other, if exchanges are captured; otherwise finish them."""
        if not self.is_captured:
            return super().submit_together(requests, keys, excluded, repeats=repeats)
        for key in keys:
            check_key("key", key)
        plan, pending = self._find_captured(repeats, excluded is not None, _find_strict(requests[0])), []
        for number, (request, key) in enumerate(zip(requests, keys, strict=True)):
            pairs = None if excluded is None else torch.stack(list_pairs(self.topology, [excluded[number]])[:3])
            pending.append(plan.submit([request], [key], pairs))
        return self._join(pending)

    def find_plain(self) -> ExchangePlan | None:
        """Find the captured plan if its batches can be `PlainSample`s; None otherwise."""
        if not self.is_captured or self.recipe.subgraph_type != "directional":
            return None
        plan = self._find_captured()
        return plan if plan.is_plain else None

    def _find_captured(self, repeats: bool = False, excludes: bool = False, strict: Ends | None = None
                       ) -> ExchangePlan:  # fmt: skip
        """Find the captured plan of this process's part; all ranks sample a batch by the same one.

        Args:
            strict: Links whose negatives avoid edges of all parts; None for others.
        """
        avoided: Any = None if strict is None else strict.avoided
        options = (repeats and not self.disjoint, excludes,
                   None if strict is None else (avoided.edge_type, strict.is_triplet))  # fmt: skip
        if options not in self._captured_plans:
            segments = self._communicator.open_segments()
            assert segments is not None
            self._captured_plans[options] = ExchangePlan(
                self.part, self, segments, self._open_node_rows(), self._communicator.sent, repeats=options[0],
                excludes=excludes, strict=None if strict is None else self._list_strict(strict, avoided))  # fmt: skip
        return self._captured_plans[options]

    def _list_strict(self, ends: Ends, avoided: EdgesOfAll) -> StrictPairs:
        """List the edges of this part that strict negatives avoid."""
        topo, own = self.topology.topo, avoided.open_own()
        source, target = (0 if kind is None else topo.node_types.index(kind) for kind in ends.types)
        return StrictPairs(own.parts[0], own.num_targets, (source, target), ends.is_triplet)

    def _open_node_rows(self) -> CapturedRows | None:
        """Return the rows that come with captured batches; all ranks agree on them."""
        rows = self._rows_of_nodes
        features = None if rows is None else rows.find_captured()
        if rows is None or not all(self._communicator.agree(int(features is not None))):
            return None
        assert features is not None
        return rows.open_captured(features)

    def _find_excluded(self, excluded: Sequence[Excluded]) -> Any:
        return self._frontiers.find_excluded(excluded)

    def _pick(self, listed: Any, front: Any, start: Seeds, keys: np.ndarray, hop: int) -> Picked:
        return self._frontiers.pick(listed.work, front, start, keys, hop)


def _find_strict(request: Any) -> Ends | None:
    """Return links whose negatives avoid edges of all parts; None for other requests."""
    return request if isinstance(request, Ends) and isinstance(request.avoided, EdgesOfAll) else None
