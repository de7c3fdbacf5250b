"""Reductions, softmax and attention over the edges of targets, with gradients, beside sums in float64."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from pyg_direct.ops.aggregate.compute_softmax import attend, softmax
from pyg_direct.ops.aggregate.sum_rows import Transposed, aggregate
from pyg_direct.ops.local_ids.build_csr import compress_ids
from tests.fuzz.space import Row, Space
from tests.poison import poisoned_memory
from tests.reference import aggregate as reference
from tests.reference.attend import attend as attend_reference
from tests.reference.softmax import softmax as softmax_reference

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}
WIDTHS = {"1": 1, "3": 3, "8": 8, "24": 24, "129": 129}


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "what": ("sum", "mean", "max", "min", "softmax"), "dtype": tuple(TOLERANCE), "index": ("int32", "int64"),
        "width": tuple(WIDTHS), "edges": ("none", "few", "many", "hub"), "weight": ("no", "edge", "heads"),
        "rows": ("source", "own"), "tail": ("no", "yes"), "transposed": ("no", "yes"), "degree": ("no", "yes"),
        "deterministic": ("no", "yes"), "threads": ("one", "all"), "parts": ("source", "target", "edge", "all"),
        "slope": ("1.0", "0.2"),
    }  # fmt: skip
    rules = (
        (("what", "weight"), lambda what, weight: what in ("sum", "mean") or weight == "no"),
        (("weight", "width"), lambda weight, width: weight != "heads" or width in ("8", "24")),
        # PyG's edges of a batch: offsets of more of them than there are.
        (("rows", "transposed"), lambda rows, by_source: rows == "source" or by_source == "no"),
        (("what", "rows"), lambda what, rows: what != "softmax" or rows == "source"),
        (("what", "transposed"), lambda what, by_source: what != "softmax" or by_source == "no"),
        (("what", "dtype"), lambda what, dtype: what != "softmax" or dtype in ("float32", "float64")),
        (("what", "width"), lambda what, width: what != "softmax" or width in ("1", "3", "8")),
        (("what", "deterministic"), lambda what, fixed: what != "softmax" or fixed == "no"),
        (("what", "tail"), lambda what, tail: what != "softmax" or tail == "no"),
        (("what", "parts"), lambda what, parts: what == "softmax" or parts == "all"),
        (("what", "slope"), lambda what, slope: what == "softmax" or slope == "1.0"),
    )  # fmt: skip
    return Space(options, rules)


def near(what: str, got: Tensor, expected: object, dtype: str, terms: int = 0) -> None:
    """Equal within the rounding of the dtype, in units of the largest number: at least that of so many additions one
    after the other, half a unit in the last place for each.
    """
    wanted = torch.as_tensor(expected).detach().double()
    size = max(1.0, float(wanted.abs().max()) if wanted.numel() else 1.0)
    assert tuple(got.shape) == tuple(wanted.shape), f"{what}: {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    apart = (got.detach().double().cpu() - wanted).abs().max() if wanted.numel() else torch.zeros(())
    most = max(TOLERANCE[dtype], terms * torch.finfo(getattr(torch, dtype)).eps / 2)
    assert float(apart) <= most * size, f"{what}: {float(apart):g} apart, of {size:g} in {terms} additions"


def draw_edges(row: Row, random: Random) -> tuple[int, int, list[int], list[int]]:
    """(rows, targets, sources, targets of edges ascending)."""
    num_rows, num_targets = random.randint(1, 12), random.randint(1, 9)
    count = {"none": 0, "few": 5, "many": 60, "hub": 400}[row["edges"]]
    hub = random.randrange(num_targets)
    targets = sorted(hub if row["edges"] == "hub" and random.random() < 0.8 else random.randrange(num_targets)
                     for _ in range(count))  # fmt: skip
    return num_rows, num_targets, [random.randrange(num_rows) for _ in range(count)], targets


def run(row: Row, random: Random, device: str) -> int:
    """Check results and gradients; returns the number of calls."""
    calls = 4
    for _ in range(calls):
        (run_softmax if row["what"] == "softmax" else run_reduction)(row, random, device)
    return calls


def run_reduction(row: Row, random: Random, device: str) -> None:
    """One call, and the gradients of rows and weights."""
    num_rows, num_targets, sources, targets = draw_edges(row, random)
    dtype, index, width = getattr(torch, row["dtype"]), getattr(torch, row["index"]), WIDTHS[row["width"]]
    if row["rows"] == "own":
        num_rows, sources = len(sources), list(range(len(sources)))
    # Few values, so that maxima have equals.
    x = torch.randint(-4, 5, (num_rows, width)).div(4).to(dtype)
    grad = torch.randint(-4, 5, (num_targets, width)).div(4).to(dtype)
    heads = {"no": None, "edge": 1, "heads": 4}[row["weight"]]
    weight = None if heads is None else torch.randint(-4, 5, (len(sources), heads)).div(4).to(dtype)
    indptr = compress_ids(torch.tensor(targets, dtype=index), num_targets)
    if row["tail"] == "yes":
        # Offsets of edges that are not there count as the last.
        indptr = torch.cat([indptr, indptr[-1:] + 7])
        num_targets += 1
        grad = torch.cat([grad, grad[:1]])
    ends = torch.tensor(sources, dtype=index)
    by_source = None
    if row["transposed"] == "yes":
        by_source = Transposed(*(part.to(device) for part in Transposed.of(ends, torch.tensor(targets, dtype=index),
                                                                           num_rows)))  # fmt: skip
    degree = max((targets.count(target) for target in targets), default=0) if row["degree"] == "yes" else None
    on_device = x.to(device, copy=True).requires_grad_()
    weight_there = None if weight is None else weight.to(device, copy=True).requires_grad_()
    with poisoned_memory():
        got = aggregate(on_device, indptr.to(device), None if row["rows"] == "own" else ends.to(device),
                        reduce=row["what"], weight=weight_there, max_degree=degree, transposed=by_source,
                        deterministic=row["deterministic"] == "yes")  # fmt: skip
        got.backward(grad.to(device))
    factors = None if weight is None else weight.double().numpy()
    arguments = x.double().numpy(), indptr.tolist(), sources, row["what"], factors
    assert got.dtype == dtype
    near("result", got, reference.aggregate(*arguments), row["dtype"])
    # Edges of one source that share a maximum add up to three hundred equal shares.
    terms = max(map(sources.count, set(sources)), default=0)
    near("gradient", on_device.grad, reference.gradient(grad.double().numpy(), *arguments), row["dtype"], terms)
    if weight_there is not None:
        expected = reference.weight_gradient(grad.double().numpy(), *arguments)
        near("gradient of weights", weight_there.grad, expected, row["dtype"])


def run_softmax(row: Row, random: Random, device: str) -> None:
    """Weights of the edges of each target, and sums of rows times these."""
    num_rows, num_targets, sources, targets = draw_edges(row, random)
    dtype, index, heads = getattr(torch, row["dtype"]), getattr(torch, row["index"]), WIDTHS[row["width"]]
    indptr = compress_ids(torch.tensor(targets, dtype=index), num_targets)
    parts = {"source": num_rows, "target": num_targets, "edge": len(sources)}
    scores = [torch.randn(count, heads, dtype=dtype) * 3 if row["parts"] in (name, "all") else None
              for name, count in parts.items()]  # fmt: skip
    with poisoned_memory():
        there = [None if score is None else score.to(device) for score in scores]
        got = softmax(*there, indptr.to(device), torch.tensor(sources, dtype=index, device=device),
                      negative_slope=float(row["slope"]))  # fmt: skip
    lists = [None if score is None else score.double().numpy() for score in scores]
    near("weights", got, softmax_reference(*lists, indptr.tolist(), sources, float(row["slope"])), row["dtype"])
    channels, degree = random.choice((1, 3, 4, 16)), max(map(targets.count, targets), default=0)
    x = torch.randn(num_rows, heads * channels, dtype=dtype)
    with poisoned_memory():
        sums = attend(x.to(device), *there, indptr.to(device), torch.tensor(sources, dtype=index, device=device),
                      negative_slope=float(row["slope"]), max_degree=degree if row["degree"] == "yes" else None,
                      deterministic=False)  # fmt: skip
    expected, _ = attend_reference(x.double().numpy(), *lists, indptr.tolist(), sources, float(row["slope"]))
    near("sums times weights", sums, expected, row["dtype"])
