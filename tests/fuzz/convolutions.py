"""Convolutions of an accelerated model over the edges of a batch, with gradients, beside PyG's own code in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    HeteroConv,
    HGTConv,
    RGCNConv,
    SAGEConv,
)  # fmt: skip

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.nn.sorted_edges import register_sorted
from tests.fuzz.aggregates import near
from tests.fuzz.compare import deterministic
from tests.fuzz.graphs import make_types, to_hetero
from tests.fuzz.space import Row, Space

OUT, RELATIONS, EDGE_WIDTH, HEADS = 4, 5, 3, {"1": 1, "3": 3}
WIDTHS = {"1": 1, "3": 3, "8": 8, "24": 24}
SUMS = ("SAGE", "Graph", "GIN", "GINE", "RGCN")
ATTENTION = ("GAT", "GATv2")
# Each from (numbers of a source, of a target, row of options).
MAKES: dict[str, Callable[[int, int, Row], torch.nn.Module]] = {
    "SAGE": lambda a, b, row: SAGEConv((a, b), OUT, aggr=row["reduce"], normalize=row["more"] == "yes"),
    "Graph": lambda a, b, row: GraphConv((a, b), OUT, aggr=row["reduce"], bias=row["more"] == "no"),
    "GCN": lambda a, b, row: GCNConv(a, OUT, add_self_loops=row["loops"] == "yes", improved=row["more"] == "yes"),
    "GIN": lambda a, b, row: GINConv(torch.nn.Linear(a, OUT), aggr=row["reduce"], train_eps=row["more"] == "yes"),
    "GINE": lambda a, b, row: GINEConv(torch.nn.Linear(a, OUT), aggr=row["reduce"], edge_dim=EDGE_WIDTH,
                                       train_eps=row["more"] == "yes"),
    "GAT": lambda a, b, row: GATConv(a if a == b and row["loops"] == "yes" else (a, b), OUT, HEADS[row["heads"]],
                                     concat=row["more"] == "no", add_self_loops=row["loops"] == "yes"),
    "GATv2": lambda a, b, row: GATv2Conv((a, b), OUT, HEADS[row["heads"]], concat=row["more"] == "no",
                                         add_self_loops=row["loops"] == "yes"),
    "RGCN": lambda a, b, row: RGCNConv((a, b), OUT, RELATIONS, aggr=row["reduce"],
                                       num_bases=2 if row["more"] == "yes" else None),
}  # fmt: skip


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "conv": (*MAKES, "HGT"), "reduce": ("mean", "sum", "max", "min"), "over": ("one", "relations"),
        "edges": ("batch", "inner", "unsorted", "written", "again"), "dtype": ("float64", "float32"),
        "width": tuple(WIDTHS), "pair": ("no", "yes"), "weight": ("no", "yes"), "loops": ("yes", "no"),
        "heads": tuple(HEADS), "more": ("no", "yes"), "grads": ("all", "parameters", "none"),
        "fixed": ("no", "yes"), "threads": ("one", "all"),
    }  # fmt: skip
    rules = (
        (("conv", "reduce"), lambda conv, reduce: conv in SUMS or reduce == "mean"),
        (("conv", "over"), lambda conv, over: over == "one" if conv in ("GINE", "RGCN") else
         over == "relations" or conv != "HGT"),
        # Edges of types come of a loader.
        (("over", "edges"), lambda over, edges: over == "one" or edges in ("batch", "unsorted")),
        (("over", "width"), lambda over, width: over == "one" or width == "8"),
        # A graph that comes back has no targets of its own.
        (("edges", "pair"), lambda edges, pair: edges != "again" or pair == "no"),
        (("conv", "pair"), lambda conv, pair: conv not in ("GCN", "HGT") or pair == "no"),
        (("over", "pair"), lambda over, pair: over == "one" or pair == "no"),
        (("conv", "weight"), lambda conv, weight: conv in ("Graph", "GCN") or weight == "no"),
        (("over", "weight"), lambda over, weight: over == "one" or weight == "no"),
        (("conv", "loops"), lambda conv, loops: conv in ("GCN", *ATTENTION) or loops == "yes"),
        # Loops are of nodes that are sources and targets.
        (("conv", "loops", "pair"), lambda conv, loops, pair: conv not in ATTENTION or "no" in (loops, pair)),
        (("conv", "loops", "over"),
         lambda conv, loops, over: conv not in ("GCN", *ATTENTION) or over == "one" or loops == "no"),
        (("conv", "heads"), lambda conv, heads: conv in ATTENTION or heads == "1"),
        (("conv", "more"), lambda conv, more: conv != "HGT" or more == "no"),
        # Of several loops of a node PyG keeps any on a GPU, and we the last, unless torch is asked for equal results.
        (("conv", "weight", "fixed", "edges"), lambda conv, weight, fixed, edges: device == "cpu" or conv != "GCN" or
         weight == "no" or fixed == "yes" or edges in ("batch", "inner")),
    )  # fmt: skip
    return Space(options, rules)


class Edges:
    """Edges of two hops as a loader numbers them, or of a graph in any order."""

    def __init__(self, row: Row, random: Random, device: str) -> None:
        nodes = [random.randint(1, 5), random.randint(0, 6), random.randint(0, 7)]
        counts, rows, targets = [], [], []
        for hop in range(2):
            # A hop leads from nodes known by then, and to those that were new before it.
            first, known, end = sum(nodes[:hop]), sum(nodes[: hop + 1]), sum(nodes[: hop + 2])
            counts.append(random.choice([0, 3, 12, 60]) if known > first else 0)
            hub = random.randrange(first, known) if known > first else 0
            targets += sorted(hub if random.random() < 0.4 else random.randrange(first, known)
                              for _ in range(counts[-1]))  # fmt: skip
            rows += [random.randrange(end) for _ in range(counts[-1])]
        edge_index = torch.tensor([rows, targets], dtype=torch.int64).to(device)
        self.num_sources = self.num_targets = sum(nodes)
        if row["edges"] in ("unsorted", "again"):
            edge_index = edge_index[:, torch.randperm(edge_index.shape[1]).to(device)]
        else:
            register_sorted(edge_index, nodes, counts)
        if row["edges"] == "written" and edge_index.shape[1]:
            edge_index[1] = edge_index[1].flip(0)
        if row["edges"] == "inner":
            # As `trim_to_layer` narrows them.
            edge_index, self.num_sources = edge_index.narrow(1, 0, counts[0]), sum(nodes[:2])
            self.num_targets = self.num_sources
        if row["pair"] == "yes" and row["edges"] in ("batch", "inner"):
            self.num_targets = random.choice([sum(nodes[:2]) if row["edges"] == "batch" else nodes[0],
                                              self.num_targets])  # fmt: skip
        self.edge_index = edge_index


def run(row: Row, random: Random, device: str) -> int:
    """Check results and gradients; returns the number of calls."""
    with deterministic(row["fixed"] == "yes"):
        return (run_one if row["over"] == "one" else run_relations)(row, random, device)


def run_one(row: Row, random: Random, device: str) -> int:
    """Layers of one graph."""
    calls = 3
    for _ in range(calls):
        edges, width = Edges(row, random, device), WIDTHS[row["width"]]
        own = random.choice([width, 5]) if row["pair"] == "yes" and row["conv"] not in ("GIN", "GINE") else width
        sources = torch.randn(edges.num_sources, width, dtype=torch.float64, device=device)
        targets = torch.randn(edges.num_targets, own, dtype=torch.float64, device=device)
        rows = [sources, targets] if row["pair"] == "yes" else [sources]
        num_edges = edges.edge_index.shape[1]
        given: list[Tensor] = []
        if row["weight"] == "yes":
            given = [torch.rand(num_edges, dtype=torch.float64, device=device) + 0.1]
        elif row["conv"] == "GINE":
            given = [torch.randn(num_edges, EDGE_WIDTH, dtype=torch.float64, device=device)]
        elif row["conv"] == "RGCN":
            given = [torch.randint(RELATIONS - 1, (num_edges,), device=device)]

        def call(layer: Any, *parts: Tensor, edges: Edges = edges, count: int = len(rows)) -> list[Tensor]:
            x: Any = tuple(parts[:count]) if count == 2 else parts[0]
            return [layer(x, edges.edge_index, *parts[count:])]

        check(row, MAKES[row["conv"]](width, own, row).to(device), call, [*rows, *given],
              times=12 if row["edges"] == "again" else 1)  # fmt: skip
    return calls


def run_relations(row: Row, random: Random, device: str) -> int:
    """A layer over the relations of a batch with types."""
    data, width = to_hetero(random, make_types(random)), WIDTHS[row["width"]]
    for kind in data.node_types:
        data[kind].x = torch.randn(data[kind].num_nodes, width)
    loader = NeighborLoader(data, [3, 2], "a", batch_size=4, device=device, seed=random.getrandbits(32))
    checked = 0
    for batch in loader:
        edges = {kind: pairs if row["edges"] == "batch" else pairs.flip(1)
                 for kind, pairs in batch.edge_index_dict.items()}  # fmt: skip
        names = list(batch.x_dict)
        if row["conv"] == "HGT":
            layer = HGTConv(width, OUT, data.metadata(), heads=2)
        else:
            layer = HeteroConv({kind: MAKES[row["conv"]](width, width, row) for kind in edges
                                if row["conv"] != "GCN" or kind[0] == kind[2]})  # fmt: skip
            # Those of nodes of one type alone, which GCN has.
            edges = edges if row["conv"] != "GCN" else {kind: p for kind, p in edges.items() if kind[0] == kind[2]}

        def call(layer: Any, *parts: Tensor, edges: Any = edges, names: Any = names) -> list[Tensor]:
            out = layer(dict(zip(names, parts, strict=True)), edges)
            return [out[name] for name in sorted(out) if out[name] is not None]

        check(row, layer.to(device), call, [rows.double() for rows in batch.x_dict.values()])
        checked += 1
    return checked


def check(row: Row, layer: torch.nn.Module, call: Callable[..., list[Tensor]], given: list[Tensor],
          times: int = 1) -> None:  # fmt: skip
    """An accelerated copy gives what the layer gives in float64, and the same gradients."""
    exact, fast = layer.double(), copy.deepcopy(layer).to(getattr(torch, row["dtype"]))
    accelerate(fast)
    # Also of layers whose rows are too narrow for a CPU, which are not claimed.
    assert any(name in module.__dict__ for module in fast.modules() for name in ("forward", "propagate"))
    with deterministic():
        expected, wanted = differentiate(row, exact, call, given, torch.float64)
    for _ in range(times):
        got, grads = differentiate(row, fast, call, given, getattr(torch, row["dtype"]))
        assert len(got) == len(expected)
        assert len(grads) == len(wanted)
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            near(f"result {number}", one, other.cpu(), row["dtype"], terms=_TERMS)
        for number, (grad, other) in enumerate(zip(grads, wanted, strict=True)):
            assert (grad is None) == (other is None), f"gradient {number}: {grad}, expected {other}"
            if grad is not None and other is not None:
                near(f"gradient {number}", grad, other.cpu(), row["dtype"], terms=_TERMS)


# Roundings on the way to a number: products, exponentials, norms and sums of all edges.
_TERMS = 2000


def differentiate(row: Row, layer: torch.nn.Module, call: Callable[..., list[Tensor]], given: list[Tensor],
                  dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """(results, gradients of what is asked for)."""
    wants = row["grads"] == "all"
    parts = [part.to(dtype).requires_grad_(wants) if part.is_floating_point() else part for part in given]
    if row["grads"] == "none":
        with torch.no_grad():
            return call(layer, *parts), []
    out = call(layer, *parts)
    leaves = [*(part for part in parts if part.requires_grad), *layer.parameters()]
    total = sum((part * torch.linspace(-1, 1, part.numel(), dtype=dtype, device=part.device).view_as(part)).sum()
                for part in out)  # fmt: skip
    if not isinstance(total, Tensor) or not total.requires_grad:
        return out, []
    return out, list(torch.autograd.grad(total, leaves, allow_unused=True))
