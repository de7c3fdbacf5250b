"""Layers over the snapshots of a stream, with gradients, beside PyG's convolutions snapshot by snapshot in float64."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import ChebConv, GCNConv, GINConv, GraphConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_direct.dynamic import accelerate, stream
from pyg_direct.dynamic.nn import GCLSTM, TGCN, EvolveGCNO, GConvGRU
from tests.fuzz.aggregates import near
from tests.fuzz.compare import deterministic, full_products
from tests.fuzz.graphs import make_edges
from tests.fuzz.space import Row, Space

OUT = 4
WIDTHS = {"1": 1, "3": 3, "8": 8, "17": 17}
GROUPS: dict[str, int | str] = {"1": 1, "2": 2, "4": 4, "8": 8, "auto": "auto"}
MEMORY = {"none": None, "some": "100%", "much": "1M"}
# Those that take weights of edges, and those of a state.
WEIGHTED = ("GCN", "Graph", "Cheb", "TGCN", "GConvGRU", "GCLSTM", "EvolveGCNO")
STATES = ("TGCN", "GConvGRU", "GCLSTM")
# Roundings on the way to a number: sums, degrees and products; and as many states as there are snapshots.
_TERMS, _STATE_TERMS = 500, 4000


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "layer": ("GCN", "SAGE", "Graph", "GIN", "Cheb", "TGCN", "GConvGRU", "GCLSTM", "EvolveGCNO"),
        "more": ("no", "yes", "other"), "weights": ("none", "all", "some"), "change": ("few", "none", "all"),
        "edges": ("few", "none", "many"), "count": ("1", "3", "9"), "width": tuple(WIDTHS),
        "keep": ("auto", "device", "host"), "group": tuple(GROUPS), "form": ("mask", "split"), "memory": tuple(MEMORY),
        "written": ("no", "yes"), "steps": ("epoch", "snapshot", "none"), "visit": ("all", "part", "backwards"),
        "epochs": ("1", "3"), "threads": ("one", "all"), "nodes": ("same", "other"), "share": ("no", "yes"),
    }  # fmt: skip
    rules = (
        (("layer", "weights"), lambda layer, weights: layer in WEIGHTED or weights == "none"),
        (("group", "form"), lambda group, form: group != "auto" or form == "mask"),
        (("layer", "more"), lambda layer, more: layer not in ("GConvGRU", "GCLSTM") or more == "no"),
        (("layer", "more"), lambda layer, more: layer in ("GCN", "Cheb") or more != "other"),
        # Weights that evolve lead gradients back to the first snapshot.
        (("layer", "steps"), lambda layer, steps: layer != "EvolveGCNO" or steps != "snapshot"),
        # A state is that of the same nodes.
        (("layer", "nodes"), lambda layer, nodes: layer not in STATES or nodes == "same"),
    )  # fmt: skip
    return Space(options, rules)


def make_layer(row: Row) -> torch.nn.Module:
    """The layer of a row."""
    width, more = WIDTHS[row["width"]], row["more"] == "yes"
    if row["layer"] == "GCN":
        if row["more"] == "other":
            return GCNConv(width, OUT, normalize=False)
        return GCNConv(width, OUT, improved=more, add_self_loops=not more)
    if row["layer"] == "SAGE":
        return SAGEConv(width, OUT, aggr="sum" if more else "mean")
    if row["layer"] == "Graph":
        return GraphConv(width, OUT, aggr="mean" if more else "add")
    if row["layer"] == "GIN":
        return GINConv(torch.nn.Linear(width, OUT), train_eps=more)
    if row["layer"] == "Cheb":
        return ChebConv(width, OUT, 2 if row["more"] == "no" else 3, "rw" if row["more"] == "other" else "sym")
    if row["layer"] == "GCLSTM":
        return GCLSTM(width, OUT, 2)
    if row["layer"] == "EvolveGCNO":
        return EvolveGCNO(width, improved=more, add_self_loops=not more)
    return TGCN(width, OUT, improved=more) if row["layer"] == "TGCN" else GConvGRU(width, OUT, 2)


def make_snapshots(row: Row, random: Random) -> list[Data]:
    """Snapshots of which each shares edges with the one before, with parallel edges, loops and isolated nodes."""
    num_nodes = random.choice([1, 2, 7, 12])
    most = {"none": 0, "few": 12, "many": 90}[row["edges"]]
    change, made = {"none": 0.0, "few": 0.15, "all": 1.0}[row["change"]], []
    edges = make_edges(random, num_nodes, num_nodes, most)
    weights = [random.choice((0.5, 1.0, 2.0)) for _ in edges]
    for _ in range(int(row["count"])):
        if row.get("nodes") == "other":
            num_nodes = random.choice([1, 2, 7, 12])
            edges = [(a % num_nodes, b % num_nodes) for a, b in edges]
        edges = [(random.randrange(num_nodes), random.randrange(num_nodes)) if random.random() < change else pair
                 for pair in edges]  # fmt: skip
        order = random.sample(range(len(edges)), len(edges))
        has_weights = row["weights"] == "all" or (row["weights"] == "some" and random.random() < 0.5)
        made.append(Data(
            x=torch.randn(num_nodes, WIDTHS[row["width"]]),
            edge_index=torch.tensor([edges[i] for i in order], dtype=torch.int64).reshape(-1, 2).t().contiguous(),
            edge_attr=torch.tensor([weights[i] for i in order]) if has_weights else None,
        ))  # fmt: skip
        if row.get("share") == "yes":
            share(made, random)
    return made


def share(made: list[Data], random: Random) -> None:
    """Let the last snapshot have some tensors of the one before, as those of static graphs do, where they fit it."""
    *before, last = made
    if not before or before[-1].num_nodes > last.num_nodes or random.random() < 0.3:
        return
    last.edge_index = before[-1].edge_index
    if random.random() < 0.5:
        last.edge_attr = before[-1].edge_attr
    if before[-1].num_nodes == last.num_nodes and random.random() < 0.3:
        last.x = before[-1].x


def run(row: Row, random: Random, device: str) -> int:
    """Check results and gradients of some epochs; returns the number of snapshots."""
    snapshots, made = make_snapshots(row, random), make_layer(row)
    # Moved after it is copied: torch warns of copies of a GRU that lie on a GPU, whose parameters are apart.
    fast, exact = copy.deepcopy(made).to(device), made.to(device).double()
    accelerate(fast)
    given = stream([copy.copy(snapshot) for snapshot in snapshots], device, keep=row["keep"], form=row["form"],
                   group_size=GROUPS[row["group"]], memory=MEMORY[row["memory"]])  # fmt: skip
    begin = random.randrange(len(snapshots)) if row["visit"] == "part" else 0
    times = range(begin, random.randint(begin + 1, len(snapshots)) if row["visit"] == "part" else len(snapshots))
    part: Any = given[times.start : times.stop] if row["visit"] == "part" else given
    order = list(times)[::-1] if row["visit"] == "backwards" else list(times)
    with deterministic():
        expected, wanted = run_epoch(row, exact, [snapshots[t].to(device) for t in order], torch.float64)
    terms = _STATE_TERMS if row["layer"] in (*STATES, "EvolveGCNO") else _TERMS
    for _ in range(int(row["epochs"])):
        visited = [given[t] for t in order] if row["visit"] == "backwards" else part
        with full_products():
            got, grads = run_epoch(row, fast, visited, torch.float32)
        for one, other in zip(got, expected, strict=True):
            near("result", one, other.cpu(), "float32", terms)
        for (name, _), one, other in zip(exact.named_parameters(), grads, wanted, strict=True):
            near(f"gradient of {name}", one, other.cpu(), "float32", terms)
    return len(order) * int(row["epochs"])


def run_epoch(row: Row, layer: Any, snapshots: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """(results, gradients of the parameters), after one backward pass or one for each snapshot."""
    results, total, state = [], None, None
    layer.zero_grad(set_to_none=True)
    if row["layer"] == "EvolveGCNO":
        layer.reinitialize_weight()
    with torch.set_grad_enabled(row["steps"] != "none"):
        for number, snapshot in enumerate(snapshots):
            x, edges, weight = snapshot.x, snapshot.edge_index, snapshot.edge_attr
            if row["written"] == "yes" and number % 2:
                # What a program does to features comes before what is known of them.
                x = x + 1.0
            if dtype == torch.float64:
                x, weight = x.double(), None if weight is None else weight.double()
            out = apply(row, layer, x, edges, weight, state, is_exact=dtype == torch.float64)
            state = None if row["layer"] not in STATES else out.detach() if row["steps"] == "snapshot" else out
            results.append(out)
            loss = (out * torch.linspace(-1, 1, out.numel(), dtype=dtype, device=out.device).view_as(out)).sum()
            if row["steps"] == "snapshot":
                loss.backward()
            total = loss if total is None else total + loss
    if row["steps"] == "epoch":
        assert total is not None
        total.backward()
    return results, [torch.zeros_like(part) if part.grad is None else part.grad for part in layer.parameters()]


def apply(row: Row, layer: Any, x: Tensor, edges: Tensor, weight: Tensor | None, state: Tensor | None, *,
          is_exact: bool) -> Tensor:  # fmt: skip
    """The layer's result; cells in terms of PyG's convolutions where it is to be exact."""
    if row["layer"] in ("SAGE", "GIN"):
        out: Tensor = layer(x, edges)
    elif row["layer"] == "EvolveGCNO" and is_exact:
        out = apply_evolve(layer, x, edges, weight)
    elif row["layer"] not in STATES:
        out = layer(x, edges, weight)
    elif not is_exact:
        states = (state,) if row["layer"] != "GCLSTM" else (None, None) if state is None else state.chunk(2, 1)
        out = layer(x, edges, weight, *states)
        out = torch.cat(out, 1) if row["layer"] == "GCLSTM" else out
    else:
        state = x.new_zeros(x.shape[0], count_numbers(row)) if state is None else state
        cell = {"TGCN": apply_tgcn, "GConvGRU": apply_gru, "GCLSTM": apply_lstm}[row["layer"]]
        out = cell(layer, x, edges, weight, state)
    return out


def count_numbers(row: Row) -> int:
    """Numbers of a node in the results: an LSTM's are its state and that of the cell."""
    if row["layer"] == "EvolveGCNO":
        return WIDTHS[row["width"]]
    return 2 * OUT if row["layer"] == "GCLSTM" else OUT


def apply_tgcn(layer: Any, x: Tensor, edges: Tensor, weight: Tensor | None, state: Tensor) -> Tensor:
    """The cell of T-GCN (Zhao et al., equations 3 to 6), as PyTorch Geometric Temporal has it."""

    def gate(name: str, state: Tensor) -> Tensor:
        out: Tensor = getattr(layer, f"linear_{name}")(
            torch.cat([getattr(layer, f"conv_{name}")(x, edges, weight), state], 1)
        )
        return out

    update, reset = gate("z", state).sigmoid(), gate("r", state).sigmoid()
    return update * state + (1 - update) * gate("h", state * reset).tanh()


def apply_gru(layer: Any, x: Tensor, edges: Tensor, weight: Tensor | None, state: Tensor) -> Tensor:
    """The cell of GConvGRU (Seo et al., equation 5), likewise."""

    def gate(name: str, state: Tensor) -> Tensor:
        out: Tensor = getattr(layer, f"conv_x_{name}")(x, edges, weight)
        return out + getattr(layer, f"conv_h_{name}")(state, edges, weight)

    update, reset = gate("z", state).sigmoid(), gate("r", state).sigmoid()
    return update * state + (1 - update) * gate("h", state * reset).tanh()


def apply_lstm(layer: Any, x: Tensor, edges: Tensor, weight: Tensor | None, state: Tensor) -> Tensor:
    """The cell of GCLSTM (Chen et al., equations 3 to 8), likewise."""
    state, cell = state.chunk(2, 1)

    def gate(name: str) -> Tensor:
        from_state: Tensor = getattr(layer, f"conv_{name}")(state, edges, weight)
        return x @ getattr(layer, f"W_{name}") + from_state + getattr(layer, f"b_{name}")

    cell = gate("f").sigmoid() * cell + gate("i").sigmoid() * gate("c").tanh()
    return torch.cat([gate("o").sigmoid() * cell.tanh(), cell], 1)


def apply_evolve(cell: Any, x: Tensor, edges: Tensor, weight: Tensor | None) -> Tensor:
    """EvolveGCN-O (Pareja et al., equation 4), as PyTorch Geometric Temporal has it."""
    before = cell.initial_weight if cell.weight is None else cell.weight
    cell.weight = cell.recurrent_layer(before, before)[0]
    edges, weight = gcn_norm(edges, weight, x.shape[0], cell.improved, cell.add_self_loops, dtype=x.dtype)
    messages = x[edges[0]] if weight is None else x[edges[0]] * weight.unsqueeze(1)
    return torch.zeros_like(x).index_add(0, edges[1], messages) @ cell.weight[0]
