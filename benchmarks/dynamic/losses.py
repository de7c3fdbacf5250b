"""Losses of dynamic graph networks beside PyTorch Geometric Temporal's, epoch by epoch, from equal parameters.

Steps amplify rounding. So two runs of that package itself are compared too: with parameters a few roundings apart, or
with edges summed in another order. Their distance is the limit of a comparison in fp32. Both packages are also compared
with its result in double precision, in which losses must be equal. Without edge weights, its EvolveGCN has fp32 factors
even then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.dynamic.epochs import Trained
from benchmarks.dynamic.ways import MODELS, WAYS, Model, Resident
from pyg_direct.bench.result_row import Row
from pyg_direct.dynamic import nn, stream
from pyg_direct.errors import needs_extra

# Two roundings of fp32 and of float64, up or down: a common factor would cancel in rows that are normalised later.
_NUDGE, _NUDGE_DOUBLE = 2**-22, 2**-51
_TINY = 1e-12
# Target of the relative distance after the last epoch.
_GOAL = 1e-3
# The same in double precision, above the roundings of equal steps.
_EXACT = 1e-9


class _Script(Resident):
    """Training loop of that package's examples: the mean loss of all snapshots, and one step per epoch."""

    def epoch(self) -> float:
        """Train over all snapshots."""
        if hasattr(self.model.cell, "reinitialize_weight"):
            self.model.cell.reinitialize_weight()
        state, costs = None, []
        for snapshot in self.moved:
            y_hat, state = self.model(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
            costs.append(F.mse_loss(y_hat, snapshot.y))
        cost: Tensor = torch.stack(costs).mean()
        self.optimizer.zero_grad()
        cost.backward()
        self.optimizer.step()
        return float(cost.detach())


class _StreamedScript(_Script):
    """The same over our stream and layers."""

    def __init__(self, model: Model, signal: Sequence[Data], window: int, device: torch.device) -> None:
        super().__init__(model, signal, window, device)
        given = stream(list(signal), device)
        self.moved = [given[t] for t in range(len(given))]


def measure_losses(sets: Mapping[str, Sequence[Data]], models: Sequence[str] = MODELS, window: int = 8,
                   hidden: int = 32, epochs: int = 10, device: str = "cuda",
                   loops: Sequence[str] = ("script", "frames")) -> Iterator[Row]:  # fmt: skip
    """Measure the relative distance of the loss of each epoch, in the loop of a script and over frames (a step
    each).
    """
    with needs_extra("a comparison with PyTorch Geometric Temporal", "temporal"):
        from torch_geometric_temporal.nn import recurrent as theirs

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    ways: dict[str, tuple[Any, Any]] = {
        "script": (_Script, _StreamedScript),
        "frames": (WAYS["resident PyGT"], Trained),
    }
    cells: dict[str, list[tuple[float, float]]] = {}
    for name, signal in sets.items():
        num_nodes, num_features = signal[0].x.shape
        for kind in models:
            for loop in loops:
                make, make_ours = ways[loop]

                def train(make: Any, layers: Any, nudge: float = 0.0, kind: str = kind,
                          signal: Sequence[Data] = signal) -> list[float]:  # fmt: skip
                    torch.manual_seed(0)
                    model = Model(kind, layers, num_features, num_nodes, hidden).to(where)  # noqa: B023
                    if signal[0].x.dtype == torch.float64:
                        model.double()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(1 + nudge * torch.randn_like(parameter).sign())
                    run = make(model, signal, window, where)
                    return [run.epoch() for _ in range(epochs)]

                single, ours = train(make, theirs), train(make_ours, nn)
                nudged = train(make, theirs, _NUDGE)
                mixed = train(make, theirs, signal=[_mix(snapshot, t) for t, snapshot in enumerate(signal)])
                wide = [_widen(snapshot) for snapshot in signal]
                double, ours_double = train(make, theirs, signal=wide), train(make_ours, nn, signal=wide)
                nudged_double = train(make, theirs, _NUDGE_DOUBLE, signal=wide)
                far = []
                for way, got, beside, expected in (
                    ("ours", ours, "PyGT's", single),
                    ("PyGT, begun two roundings apart", nudged, "PyGT's", single),
                    ("PyGT, edges in another order", mixed, "PyGT's", single),
                    ("PyGT", single, "PyGT's in double precision", double),
                    ("ours", ours, "PyGT's in double precision", double),
                    (
                        "PyGT in double precision, begun two roundings apart",
                        nudged_double,
                        "PyGT's in double precision",
                        double,
                    ),
                    ("ours in double precision", ours_double, "PyGT's in double precision", double),
                ):
                    apart = [abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True)]
                    note = f"first, last and largest of {epochs} epochs; losses {got[-1]:.7g} and {expected[-1]:.7g}"
                    yield Row(f"dynamic/{name}/{kind}/{loop}", f"{way}, loss apart from {beside}", "x", apart[0],
                              apart[-1], max(apart), note=note)  # fmt: skip
                    far.append((apart[-1], max(apart)))
                cells[f"{name}/{kind}/{loop}"] = far
    yield from _tell_all(cells)


def _tell_all(cells: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[Row]:
    """Summarise how many cells are within the target, and the distances of the others beside that package's own.

    Args:
        cells: Pairs of last and largest distance. In fp32: of ours, of the two other runs, of PyGT from its double
            precision, and of ours from it. In double precision: of PyGT begun two roundings apart, and of ours.
    """
    beyond = {cell: far for cell, far in cells.items() if far[0][0] > _GOAL}
    within = len(cells) - len(beyond)
    for loop in dict.fromkeys(cell.rpartition("/")[2] for cell in cells):
        given = {cell: far for cell, far in cells.items() if cell.endswith(f"/{loop}")}
        apart = {cell: far for cell, far in given.items() if far[-1][0] > _EXACT}
        note = ", ".join(f"{cell} {far[-1][0]:.1e}, PyGT {far[-2][0]:.1e} from itself" for cell, far in apart.items())
        exact = len(given) - len(apart)
        yield Row(f"dynamic/all/{loop}",
                  f"loss within {_EXACT:g} of PyGT's after the last epoch, both in double precision", "cases", exact,
                  exact, exact, note=f"of {len(given)}; farther: {note or 'none'}")  # fmt: skip
    yield Row("dynamic/all", f"loss within {_GOAL:g} of PyGT's after the last epoch", "cases", within, within, within,
              note=f"of {len(cells)}; farther: {', '.join(beyond) or 'none'}")  # fmt: skip
    if beyond:
        ratios = [far[0][1] / max(_TINY, *(largest for _, largest in far[1:4])) for far in beyond.values()]
        note = "; ".join(f"{cell} {ratio:.2g}" for cell, ratio in zip(beyond, ratios, strict=True))
        metric = "farthest of ours over farthest of PyGT from itself, of the others"
        yield Row.of("dynamic/all", metric, "x", ratios, note=note)


def _mix(snapshot: Data, key: int) -> Data:
    """Copy a snapshot with its edges in another order."""
    order = torch.randperm(snapshot.edge_index.shape[1], generator=torch.Generator().manual_seed(key))
    mixed = snapshot.clone()
    mixed.edge_index = snapshot.edge_index[:, order]
    if snapshot.edge_attr is not None:
        mixed.edge_attr = snapshot.edge_attr[order]
    return mixed


def _widen(snapshot: Data) -> Data:
    """Copy a snapshot in double precision."""
    return snapshot.clone().apply(lambda value: value.double() if value.is_floating_point() else value)
