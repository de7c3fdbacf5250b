"""Epochs of `FrameTrainer`: losses, parameters and statistics beside the plain loop over frames in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from pyg_direct.dynamic import FrameTrainer, accelerate, stream
from pyg_direct.dynamic.nn import MPNNLSTM
from tests.fuzz.aggregates import near
from tests.fuzz.compare import deterministic, full_products
from tests.fuzz.snapshots import GROUPS, OUT, STATES, WEIGHTED, WIDTHS, apply, count_numbers, make_layer, make_snapshots
from tests.fuzz.space import Row, Space

MEMORY = ("none", "least", "some", "much")
# Roundings on the way to a number: steps add up those of all frames.
_TERMS = 1000
# Some cases magnify them step by step: numbers that hardly differ between few nodes are normalised, by up to 316, and
# sums of many rows steer what is bent. How far that goes is told by PyG's own code in float32, with nodes and edges in
# up to so many orders.
_ORDERS, _FARTHER = 64, 4


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "layer": ("TGCN", "GConvGRU", "EvolveGCNO", "MPNNLSTM", "GCN", "SAGE", "Cheb", "GCLSTM"),
        "more": ("no", "yes"), "second": ("no", "yes"), "weights": ("none", "all", "some"), "share": ("no", "yes"),
        "change": ("few", "none", "all"), "edges": ("few", "none", "many"), "count": ("1", "3", "9"),
        "window": ("1", "2", "3", "8"), "width": tuple(WIDTHS), "given": ("list", "stream", "part"),
        "keep": ("auto", "device", "host"), "group": tuple(GROUPS), "form": ("mask", "split"), "memory": MEMORY,
        "target": ("last", "all"), "step": ("plain", "momentum"), "leave": ("never", "once"), "epochs": ("1", "3"),
        "threads": ("one", "all"),
    }  # fmt: skip
    rules = (
        (("layer", "weights"), lambda layer, weights: layer in (*WEIGHTED, "MPNNLSTM") or weights == "none"),
        (("layer", "more"), lambda layer, more: layer not in ("GConvGRU", "GCLSTM", "MPNNLSTM") or more == "no"),
        (("group", "form"), lambda group, form: group != "auto" or form == "mask"),
        (("given", "group"), lambda given, group: given != "list" or group == "auto"),
        (("given", "keep"), lambda given, keep: given != "list" or keep == "auto"),
        (("count", "window"), lambda count, window: int(window) <= int(count)),
    )  # fmt: skip
    return Space(options, rules)


class _Model(torch.nn.Module):
    """A layer, perhaps a convolution behind it, and a linear one; exact in terms of PyG's convolutions."""

    def __init__(self, row: Row, num_nodes: int) -> None:
        super().__init__()
        self.row, self.is_exact, width = row, False, count_numbers(row)
        if row["layer"] == "MPNNLSTM":
            self.cell: Any = MPNNLSTM(WIDTHS[row["width"]], OUT, num_nodes, 1, 0.0)
            width = 2 * OUT + WIDTHS[row["width"]]
        else:
            self.cell = make_layer(row)
        self.second = GCNConv(width, OUT) if row["second"] == "yes" else None
        self.linear = torch.nn.Linear(OUT if row["second"] == "yes" else width, 1)

    def forward(self, x: Tensor, edges: Tensor, weight: Tensor | None, state: Any = None) -> tuple[Tensor, Any]:
        """Prediction and state."""
        if self.row["layer"] != "MPNNLSTM":
            out = apply(self.row, self.cell, x, edges, weight, state, is_exact=self.is_exact)
        else:
            out = _pass_messages(self.cell, x, edges, weight) if self.is_exact else self.cell(x, edges, weight)
        state = out if self.row["layer"] in STATES else None
        # Sums of many numbers would let steps diverge.
        out = out.tanh()
        if self.second is not None:
            out = self.second(out, edges, weight if self.row["layer"] in (*WEIGHTED, "MPNNLSTM") else None).tanh()
        return self.linear(out).view(-1), state


def _pass_messages(cell: Any, x: Tensor, edges: Tensor, weight: Tensor | None) -> Tensor:
    """MPNN-LSTM (Panagopoulos et al.), likewise."""
    first = cell._batch_norm_1(cell._convolution_1(x, edges, weight).relu())
    second = cell._batch_norm_2(cell._convolution_2(first, edges, weight).relu())
    rows, (state, _) = cell._recurrent_1(torch.cat([first, second], 1).unsqueeze(0))
    _, (deeper, _) = cell._recurrent_2(rows)
    return torch.cat([state[0], deeper[0], x], 1)


def make_optimizer(row: Row, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Steps in proportion to gradients: others would make large ones of what is rounding."""
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5 if row["step"] == "momentum" else 0.0)


class _LeavingError(Exception):
    """Leaves an epoch."""


def run(row: Row, random: Random, device: str) -> int:
    """Check some epochs, perhaps after one that was left; returns the number of frames."""
    snapshots = make_snapshots(row, random)
    while row["layer"] == "MPNNLSTM" and snapshots[0].num_nodes < 7:
        # Statistics of fewer are no numbers, or jump.
        snapshots = make_snapshots(row, random)
    for snapshot in snapshots:
        snapshot.y = torch.randn(snapshot.num_nodes)
    window, num_nodes = int(row["window"]), snapshots[0].num_nodes
    times = slice(0, len(snapshots))
    if row["given"] == "part":
        begin = random.randint(0, len(snapshots) - window)
        times = slice(begin, random.randint(begin + window, len(snapshots)))
    num_frames = times.stop - times.start - window + 1
    leave = random.randrange(num_frames) if row["leave"] == "once" else None
    given = _Model(row, num_nodes)
    # Moved after it is copied: torch warns of copies of an LSTM that lie on a GPU, whose parameters are apart.
    fast = copy.deepcopy(given).to(device)
    given.to(device)
    accelerate(fast)

    part = [snapshot.clone().to(device) for snapshot in snapshots[times]]
    expected = run_reference(row, given, part, leave, torch.float64)
    trainer = make_trainer(row, fast, [copy.copy(s) for s in snapshots], times, device, num_frames if leave is None
                           else leave)  # fmt: skip
    if leave is not None:
        try:
            trainer.train_epoch()
        except _LeavingError:
            pass
        else:
            raise AssertionError("the epoch was not left")
    others = ([reorder(snapshot, order) for snapshot in part] for order in range(_ORDERS))
    with full_products():
        got = dict(_list_values(trainer.fit(int(row["epochs"])), fast, leave))
        compare(got, expected, (run_reference(row, given, other, leave, torch.float32) for other in others))
    return num_frames * int(row["epochs"])


def _list_values(losses: list[float], model: torch.nn.Module, leave: int | None) -> Iterator[tuple[str, Tensor]]:
    """What is compared, by name."""
    for number, one in enumerate(losses):
        yield f"loss of epoch {number}", torch.tensor(one, dtype=torch.float64)
    for name, value in model.state_dict().items():
        # A frame that was left may have told its statistics or not.
        if leave is None or not name.rpartition(".")[2].startswith(("running_", "num_batches")):
            yield name, value.cpu()


def compare(got: dict[str, Tensor], expected: dict[str, Tensor], others: Iterator[dict[str, Tensor]]) -> None:
    """Equal up to as many roundings as steps take, or so many times those of `others`, which are right too and are made
    one after the other until they tell of enough.
    """
    assert list(got) == list(expected)
    roundings = dict.fromkeys(expected, 0.0)
    while True:
        try:
            for name, one in got.items():
                near(name, one, expected[name], "float32", max(_TERMS, math.ceil(_FARTHER * roundings[name])))
        except AssertionError:
            other = next(others, None)
            if other is None:
                raise
        else:
            return
        for name, one in other.items():
            wanted = expected[name].double()
            apart = (one.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1)
            roundings[name] = max(roundings[name], 2 * float(apart) / torch.finfo(torch.float32).eps)


def run_reference(row: Row, given: _Model, snapshots: list[Data], leave: int | None,
                  dtype: torch.dtype) -> dict[str, Tensor]:  # fmt: skip
    """What is compared, of PyG's convolutions in the plain loop; the model stays as it is."""
    model = copy.deepcopy(given).to(dtype)
    model.is_exact = True
    with deterministic():
        losses = train_plainly(row, model, snapshots)
    return dict(_list_values(losses, model, leave))


def reorder(snapshot: Data, number: int) -> Data:
    """The same graph with nodes and edges in another order; of loops of a node the last stays so, as it counts."""
    random = Random(number)
    x: Any = snapshot.x
    edge_index: Any = snapshot.edge_index
    nodes = random.sample(range(len(x)), len(x))
    loops = (edge_index[0] == edge_index[1]).tolist()
    edges = random.sample(range(len(loops)), len(loops))
    ascending = iter(sorted(edge for edge in edges if loops[edge]))
    edges = [next(ascending) if loops[edge] else edge for edge in edges]
    there = torch.tensor(nodes, device=x.device).argsort()
    weight = snapshot.edge_attr
    return Data(x=x[nodes], y=snapshot.y[nodes], edge_index=there[edge_index[:, edges]],
                edge_attr=None if weight is None else weight[edges])  # fmt: skip


def make_trainer(row: Row, model: torch.nn.Module, snapshots: list[Data], times: slice, device: str,
                 leave: int) -> FrameTrainer:  # fmt: skip
    """The trainer of a row, whose loss leaves the first epoch at a frame."""
    least = max(s.x.numel() * s.x.element_size() for s in snapshots)
    memory = {"none": None, "least": least, "some": "100%", "much": "1M"}[row["memory"]]
    options: dict[str, Any] = {"device": device, "memory": memory}
    given: Any = snapshots
    if row["given"] != "list":
        given = stream(snapshots, device, keep=row["keep"], group_size=GROUPS[row["group"]], form=row["form"],
                       memory=memory)[times]  # fmt: skip
        options = {}
    # Calls before the one that leaves the first epoch; from a number below zero on there is none.
    calls = [leave * (1 if row["target"] == "last" else int(row["window"])) if row["leave"] == "once" else -2]

    def loss(y_hat: Tensor, y: Tensor) -> Tensor:
        calls[0] -= 1
        if calls[0] == -1:
            raise _LeavingError
        return F.mse_loss(y_hat, y)

    # What leaves must be called in every frame.
    replay = {"replay": False} if device == "cuda" and row["leave"] == "once" else {}
    return FrameTrainer(model, given, make_optimizer(row, model), window=int(row["window"]), target=row["target"],
                        loss=loss, **options, **replay)  # fmt: skip


def train_plainly(row: Row, model: Any, snapshots: list[Data]) -> list[float]:
    """Mean losses of the epochs; one that was left is gone on with where it was."""
    optimizer, window, dtype = make_optimizer(row, model), int(row["window"]), model.linear.weight.dtype
    num_frames, losses = len(snapshots) - window + 1, []
    for _ in range(int(row["epochs"])):
        total = 0.0
        for first in range(num_frames):
            if hasattr(model.cell, "reinitialize_weight"):
                model.cell.reinitialize_weight()
            state, costs = None, []
            for snapshot in snapshots[first : first + window]:
                weight = None if snapshot.edge_attr is None else snapshot.edge_attr.to(dtype)
                y_hat, state = model(snapshot.x.to(dtype), snapshot.edge_index, weight, state)
                costs.append(F.mse_loss(y_hat, snapshot.y.to(dtype)))
            cost = costs[-1] if row["target"] == "last" else torch.stack(costs).mean()
            optimizer.zero_grad()
            cost.backward()
            optimizer.step()
            total += cost.item()
        losses.append(total / num_frames)
    return losses
