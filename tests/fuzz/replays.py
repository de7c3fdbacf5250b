"""Training loops over a model whose passes are replayed, disturbed in many ways, beside loops of ordinary passes.

Without a GPU a recording is what torch computed, noted and computed again over the same memory (`tests/nn/tape.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GINEConv, GraphConv, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.nn.replay import batch_passes, model_call, model_replay as replayed, recorded_passes
from tests.fuzz.aggregates import near
from tests.fuzz.loops import OPTIMIZERS, Loop
from tests.fuzz.space import Row, Space
from tests.nn.replays import read_for_model
from tests.nn.tape import TapeRecorder

IN, HIDDEN, OUT, EDGE_WIDTH = 6, 8, 5, 3
# Steps before something disturbs the loop, by when passes are replayed, and in all.
CALM, STEPS = 11, 18
# Roundings of three layers and their gradients.
TERMS = 4000
# What a loop does instead of a step like the others.
EVENTS = ("none", "add", "zero", "together", "crossed", "forward", "kept", "evaluate", "no_grad", "inference", "freeze",
          "load", "assign", "scale", "data", "hook", "model_hook", "grad_hook", "input", "autograd", "retain",
          "in_place", "error", "checkpoint", "copy", "keywords", "clip", "fanouts", "smaller", "given")  # fmt: skip
# And in turns with it: what memory and sizes depend on.
SECOND = ("none", "crossed", "freeze", "assign", "smaller")


class Graphs(BasicGNN):
    """Layers of `GraphConv`."""

    supports_edge_weight, supports_edge_attr = True, False

    def init_conv(self, in_channels: Any, out_channels: int, **kwargs: Any) -> Any:
        return GraphConv(in_channels, out_channels, aggr="mean", **kwargs)


class Edged(torch.nn.Module):
    """Layers that read rows of edges, around a residual."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.begin, self.end = torch.nn.Linear(width, HIDDEN), torch.nn.Linear(HIDDEN, OUT)
        self.convs = torch.nn.ModuleList(
            GINEConv(torch.nn.Linear(HIDDEN, HIDDEN), edge_dim=EDGE_WIDTH, train_eps=True) for _ in range(layers)
        )
        self.norm = torch.nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.begin(x)
        for conv in self.convs:
            x = x + self.norm(conv(x, edge_index, edge_attr).tanh())
        out: Tensor = self.end(x)
        return out


MODELS: dict[str, Any] = {"SAGE": GraphSAGE, "GCN": GCN, "GIN": GIN, "GAT": GAT, "Graph": Graphs, "Edged": Edged}


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "model": tuple(MODELS), "jk": ("none", "cat", "max"), "norm": ("none", "rows"), "layers": ("1", "2", "3"),
        "trim": ("yes", "no"), "dtype": ("float64", "float32"), "seeds": ("12", "5"), "replace": ("no", "yes"),
        "optimizer": tuple(OPTIMIZERS), "loss": ("seeds", "all", "one"), "event": EVENTS, "second": SECOND,
        "often": ("always", "once", "now_and_then"), "threads": ("one", "all"),
    }  # fmt: skip
    rules = (
        (("model", "jk"), lambda model, jk: model != "Edged" or jk == "none"),
        (("model", "norm"), lambda model, norm: model != "Edged" or norm == "none"),
        (("model", "trim"), lambda model, trim: model != "Edged" or trim == "no"),
        (("jk", "layers"), lambda jk, layers: jk == "none" or layers != "1"),
        # Rows of several hops have no common length.
        (("jk", "trim"), lambda jk, trim: jk == "none" or trim == "no"),
    )
    return Space(options, rules)


@contextmanager
def recorded_anywhere(device: str) -> Iterator[None]:
    """Let passes over small batches be recorded, on a CPU as what torch computes."""
    with pytest.MonkeyPatch.context() as patch:
        # Batches of few seeds differ by more than those of a thousand.
        patch.setattr(batch_passes, "_MARGIN", 0.5)
        if device == "cpu":
            patch.setattr(recorded_passes, "Recorder", TapeRecorder)
            read_for_model(patch)
            patch.setattr(model_call, "_can_record", lambda device: True)
            patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
            patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
        yield


def make_model(row: Row, device: str) -> torch.nn.Module:
    """A model as it is."""
    layers = int(row["layers"])
    if row["model"] == "Edged":
        return Edged(IN, layers).to(getattr(torch, row["dtype"]))
    options: dict[str, Any] = {"jk": None if row["jk"] == "none" else row["jk"]}
    if row["norm"] == "rows":
        options |= {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
    if device == "cpu" and row["model"] in ("GCN", "GAT"):
        # What PyG takes out differs in number, which a GPU waits for, and what stands for a recorder does not see.
        options["add_self_loops"] = False
    model: torch.nn.Module = MODELS[row["model"]](IN, HIDDEN, layers, OUT, **options)
    return model.to(getattr(torch, row["dtype"]))


def make_batches(row: Row, random: Random, device: str) -> Callable[[str], list[Data]]:
    """What gives the batches of an event: one for a step, of other fanouts or fewer seeds where that is the event, and
    another one where it does more.
    """
    num_nodes, dtype = random.randint(40, 80), getattr(torch, row["dtype"])
    edge_index = torch.randint(num_nodes, (2, random.randint(3, 7) * num_nodes))
    data = Data(x=torch.randn(num_nodes, IN, dtype=dtype), edge_index=edge_index,
                edge_attr=torch.randn(edge_index.shape[1], EDGE_WIDTH, dtype=dtype))  # fmt: skip
    layers, seeds = int(row["layers"]), int(row["seeds"])

    def load(fanouts: list[int], size: int) -> Iterator[Data]:
        loader = NeighborLoader(data, fanouts, batch_size=size, shuffle=True, drop_last=True, device=device,
                                seed=random.getrandbits(32), replace=row["replace"] == "yes", prefetch=0)  # fmt: skip
        while True:
            yield from loader

    ordinary = load([3] * layers, seeds)
    steps = {"none": ordinary, "fanouts": load([2] * layers, seeds), "smaller": load([3] * layers, seeds - 2)}
    return lambda event: [next(steps[event])] if event in steps else [next(ordinary), next(ordinary)]


def run(row: Row, random: Random, device: str) -> int:
    """Check results, gradients and what is kept of some steps; returns the number of batches."""
    model = make_model(row, device).to(device)
    give_batches = make_batches(row, random, device)

    def accelerate_only(model: torch.nn.Module) -> None:
        if device != "cpu":
            accelerate(model)

    def replay(model: torch.nn.Module) -> None:
        if "_replay" in model.__dict__:
            return
        if device == "cpu":
            # Loops of the CPU are not seen by what stands for a recorder.
            replayed.watch_passes(model, is_strict=False)
        else:
            accelerate(model, replay=True)

    ordinary, fast = (Loop(row, copy.deepcopy(model), attach) for attach in (accelerate_only, replay))
    # Batches with as many edges as nodes are not read: their rows are not told apart.
    num_read = 0
    with recorded_anywhere(device):
        for loop in (ordinary, fast):
            loop.attach(loop.model)
        for number in range(STEPS):
            events = row["event"], row["second"]
            event, draw = "none", random.getrandbits(16)
            if number >= CALM and (
                row["often"] == "always"
                or (row["often"] == "once" and number in (CALM, CALM + 1))
                or (row["often"] == "now_and_then" and random.random() < 0.3)
            ):
                event = events[number % 2]
            chosen = give_batches(event)
            num_read += number < CALM and chosen[0].num_nodes != chosen[0].num_edges
            for loop in (ordinary, fast):
                loop.do(event, chosen, draw)
            compare(fast, ordinary, row, number, event)
    for loop in (ordinary, fast):
        for now, then, _ in loop.kept:
            assert torch.equal(now, then), "what a loop had was written to"
    replay_of: Any = fast.model.__dict__["_replay"]
    assert replay_of.reason is None, replay_of.reason
    # A pass after those that are known before a recording, and the one that is recorded.
    assert replay_of.replayed > 0 or num_read < replayed._WARM_UP + 2 or row["event"] == "copy", replay_of
    return STEPS


def compare(fast: Loop, ordinary: Loop, row: Row, number: int, event: str) -> None:
    """Both have seen the same since they were compared last."""
    assert [name for name, _ in fast.seen] == [name for name, _ in ordinary.seen]
    for (name, one), (_, other) in zip(fast.seen, ordinary.seen, strict=True):
        what = f"{name} after step {number}, {event}"
        assert (one is None) == (other is None), what
        if one is not None and other is not None:
            near(what, one, other, row["dtype"], TERMS)
    fast.seen, ordinary.seen = [], []
