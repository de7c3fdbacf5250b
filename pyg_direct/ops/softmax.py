"""Softmax over the edges of each target, of scores that their ends give them; differentiable.

As `ops/aggregate.py`: `torch.library` operators, nothing that waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.kernels import softmax as kernels
from pyg_direct.kernels.jit import SIMULATED
from pyg_direct.ops.aggregate import Transposed, aggregate
from pyg_direct.ops.aggregate_kernels import operators
from pyg_direct.ops.check import INDEX_DTYPES, check_ids, check_same_device
from pyg_direct.ops.launch import grid_of, run_cpu, run_gpu, runs_on_gpu, threads_for
from pyg_direct.ops.offsets import expand

_DTYPES = (torch.float32, torch.float64)
_SCHEMAS = (
    "softmax_edges(Tensor? source, Tensor? target, Tensor? edge, Tensor indptr, Tensor row, SymInt num_targets,"
    " bool loops, float slope, int max_degree) -> Tensor",
    "pull_softmax(Tensor grad, Tensor alpha, Tensor? source, Tensor? target, Tensor? edge, Tensor indptr, Tensor row,"
    " SymInt num_targets, float slope, int max_degree, bool spread) -> (Tensor, Tensor, Tensor)",
)
_library = torch.library.Library("pyg_direct", "FRAGMENT")
# A warp shares a row of which no bound of its length is known.
_UNKNOWN_LANE_BITS = 5


def softmax(source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor, row: Tensor, *,
            num_targets: int | None = None, negative_slope: float = 1.0, loops: bool = False,
            max_degree: int | None = None, deterministic: bool | None = None) -> Tensor:  # fmt: skip
    """Weights of edges: softmax over each target's of leaky(source[row[e]] + target[t] + edge[e]), for each head.

    Args:
        source: Scores of sources, fp32 or float64 `[N, H]`, or None for zeros.
        target: Scores of targets, `[T, H]`, or None.
        edge: Scores of edges, `[E, H]`, or None.
        indptr: Offsets of the targets' edges, int32 or int64 `[T + 1]` or longer; those above E count as E.
        row: Source of each edge, `[E]`.
        num_targets: T, where `indptr` is longer.
        negative_slope: What `leaky` multiplies negative scores with; 1 leaves them.
        loops: The last edge of each target leads from itself, and others of that kind weigh nothing.
        max_degree: Upper bound of the edges of a target, if known.
        deterministic: See `aggregate`.

    Returns:
        `[E, H]`; the weights of a target's edges add up to 1.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    num_targets = indptr.numel() - 1 if num_targets is None else num_targets
    row = check_scores(source, target, edge, indptr, row, num_targets)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    degree = -1 if max_degree is None else max_degree
    made: Tensor = _Softmax.apply(source, target, edge, indptr, row, num_targets, loops, negative_slope, degree,
                                  deterministic)  # fmt: skip
    return made


def check_scores(source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor, row: Tensor,
                 num_targets: int) -> Tensor:  # fmt: skip
    """`row` on the device, once the arguments of `softmax` are known to fit."""
    given = {"source": source, "target": target, "edge": edge}
    first = next((scores for scores in given.values() if scores is not None), None)
    if first is None:
        raise ArgumentError("source, target or edge must be given, got None for each")
    lengths = {"source": None, "target": num_targets, "edge": row.numel()}
    for name, scores in given.items():
        if scores is None:
            continue
        check_same_device(name, scores, "indptr", indptr)
        if scores.dtype not in _DTYPES or scores.dtype != first.dtype:
            raise ArgumentTypeError(f"{name} must be float32 or float64, as other scores are, got {scores.dtype}")
        if scores.dim() != 2 or scores.shape[1] != first.shape[1] or lengths[name] not in (None, scores.shape[0]):
            raise ArgumentError(
                f"{name} must have shape [{lengths[name] or 'N'}, {first.shape[1]}], got {tuple(scores.shape)}"
            )
    if indptr.dtype not in INDEX_DTYPES or indptr.dim() != 1 or not 0 <= num_targets < indptr.numel():
        raise ArgumentError(f"indptr must hold the {num_targets + 1} offsets of num_targets, got {indptr.numel()}")
    on_host = not (runs_on_gpu(first) or torch.compiler.is_compiling())
    if on_host and row.numel() > int(indptr[num_targets]):
        raise ArgumentError(f"indptr must give every one of the {row.numel()} edges a target below {num_targets=}")
    return check_ids("row", row, source.shape[0] if on_host and source is not None else None)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor,
                row: Tensor, num_targets: int, loops: bool, slope: float, max_degree: int, deterministic: bool
                ) -> Tensor:  # fmt: skip
        alpha: Tensor = torch.ops.pyg_direct.softmax_edges.default(source, target, edge, indptr, row, num_targets,
                                                                   loops, slope, max_degree)  # fmt: skip
        ctx.save_for_backward(source, target, edge, indptr, row, alpha)
        ctx.options = num_targets, slope, max_degree, deterministic
        return alpha

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, target, edge, indptr, row, alpha = ctx.saved_tensors
        num_targets, slope, max_degree, deterministic = ctx.options
        if torch.is_grad_enabled():
            return *_differentiate(grad, source, target, edge, indptr, row, alpha, ctx), *(None,) * 7
        spread = ctx.needs_input_grad[0] and runs_on_gpu(grad) and not deterministic
        to_edges, to_targets, to_sources = torch.ops.pyg_direct.pull_softmax.default(
            grad, alpha, source, target, edge, indptr, row, num_targets, slope, max_degree, spread
        )
        if ctx.needs_input_grad[0] and not spread:
            by_source = Transposed.of(row, row, source.shape[0])
            to_sources = operators().sum_rows(to_edges, by_source.indptr, by_source.edge, None, source.shape[0], False,
                                              -1)  # fmt: skip
        made = to_sources, to_targets, to_edges
        wanted = [value if needs else None for value, needs in zip(made, ctx.needs_input_grad[:3], strict=True)]
        return *wanted, *(None,) * 7


def _differentiate(grad: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor,
                   row: Tensor, alpha: Tensor, ctx: Any) -> list[Tensor | None]:  # fmt: skip
    """The gradients in what torch can differentiate once more, for those who ask for a graph of them."""
    num_targets, slope, *_ = ctx.options
    target_of = expand(indptr[: num_targets + 1], row.numel())
    scores = torch.zeros_like(alpha) if edge is None else edge
    scores = scores if source is None else scores + source.index_select(0, row)
    scores = scores if target is None else scores + target.index_select(0, target_of)
    bent = torch.where(scores > 0, scores, scores * slope)
    best = aggregate(bent.detach(), indptr, reduce="max", num_targets=num_targets)
    # Edges that weigh nothing stay out.
    shares = (bent - best.index_select(0, target_of)).exp() * (alpha.detach() != 0)
    total = shares.new_zeros(best.shape).index_add(0, target_of, shares) + kernels.TINY
    again = shares / total.index_select(0, target_of)
    mean = again.new_zeros(best.shape).index_add(0, target_of, again * grad).index_select(0, target_of)
    to_edges = again * (grad - mean)
    to_edges = torch.where(scores > 0, to_edges, to_edges * slope)
    made = [
        None if source is None else source.new_zeros(source.shape).index_add(0, row, to_edges),
        None if target is None else target.new_zeros(target.shape).index_add(0, target_of, to_edges),
        None if edge is None else to_edges,
    ]
    return [value if needs else None for value, needs in zip(made, ctx.needs_input_grad[:3], strict=True)]


def _flat(scores: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if scores is None else scores.detach().reshape(-1)


def pick_scores(source: Tensor | None, target: Tensor | None, edge: Tensor | None) -> Tensor:
    """One of the scores that are given."""
    first = next(scores for scores in (source, target, edge) if scores is not None)
    return first


def _lane_bits(max_degree: int) -> int:
    """Logarithm of the threads that share a target: about one for two edges."""
    if SIMULATED:
        return 0
    return _UNKNOWN_LANE_BITS if max_degree < 0 else min(_UNKNOWN_LANE_BITS, max(0, (max_degree // 2).bit_length()))


def softmax_edges(source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor, row: Tensor,
                  num_targets: int, loops: bool, slope: float, max_degree: int) -> Tensor:  # fmt: skip
    """See `softmax`."""
    like = pick_scores(source, target, edge)
    num_edges, heads = row.numel(), like.shape[1]
    alpha = like.new_empty(num_edges, heads)
    if alpha.numel() == 0:
        return alpha
    scores = [_flat(part, like) for part in (source, target, edge)]
    row = row.to(indptr.dtype).contiguous()
    if runs_on_gpu(like):
        lane_bits = _lane_bits(max_degree)
        run_gpu(kernels.softmax_edges_gpu, grid_of(num_targets * heads, lane_bits), *scores, indptr.contiguous(), row,
                num_edges, num_targets, heads, lane_bits, int(loops), slope, alpha.view(-1))  # fmt: skip
    else:
        of_targets = alpha.new_empty(num_targets * heads)
        with threads_for(alpha.numel()):
            run_cpu(kernels.add_scores_cpu, *scores, indptr, row, num_edges, num_targets, heads, alpha.view(-1))
            run_cpu(kernels.shift_scores_cpu, indptr, row, num_edges, num_targets, heads, int(loops),
                    _scalar(slope, alpha), of_targets, alpha.view(-1))  # fmt: skip
            alpha.exp_()
            run_cpu(kernels.divide_shares_cpu, indptr, num_edges, num_targets, heads, of_targets, alpha.view(-1))
    return alpha


def pull_softmax(grad: Tensor, alpha: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None,
                 indptr: Tensor, row: Tensor, num_targets: int, slope: float, max_degree: int, spread: bool
                 ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of scores of edges `[E, H]`, of targets `[T, H]`, and with `spread` of sources `[N, H]`, else empty."""
    num_edges, heads = alpha.shape
    # Sources take theirs at once, unless edges want them too.
    keeps_edges = not spread or edge is not None
    to_edges = alpha.new_empty(num_edges if keeps_edges else 0, heads)
    to_targets = alpha.new_zeros(num_targets, heads)
    to_sources = alpha.new_zeros(source.shape[0] if spread and source is not None else 0, heads)
    if alpha.numel() == 0:
        return to_edges, to_targets, to_sources
    given = [grad.detach().to(alpha.dtype).reshape(-1), alpha.view(-1),
             *(_flat(part, alpha) for part in (source, target, edge))]  # fmt: skip
    row = row.to(indptr.dtype).contiguous()
    if runs_on_gpu(alpha):
        lane_bits = _lane_bits(max_degree)
        run_gpu(kernels.pull_softmax_gpu, grid_of(num_targets * heads, lane_bits), *given, indptr.contiguous(), row,
                num_edges, num_targets, heads, lane_bits, slope, to_edges.view(-1), to_targets.view(-1),
                to_sources.view(-1))  # fmt: skip
    else:
        with threads_for(alpha.numel()):
            run_cpu(kernels.add_scores_cpu, *given[2:], indptr, row, num_edges, num_targets, heads, to_edges.view(-1))
            run_cpu(kernels.pull_softmax_cpu, *given[:2], indptr, num_edges, num_targets, heads, _scalar(slope, alpha),
                    torch.empty_like(to_targets).view(-1), to_edges.view(-1), to_targets.view(-1))  # fmt: skip
    return to_edges, to_targets, to_sources


def _scalar(value: float, like: Tensor) -> Any:
    """A number of the dtype of a tensor, as a loop of the CPU takes it."""
    return like.new_tensor(value).numpy()[()]


def _register() -> None:
    shapes: tuple[Callable[..., Any], ...] = (
        lambda source, target, edge, indptr, row, num_targets, loops, slope, max_degree: pick_scores(
            source, target, edge
        ).new_empty(row.numel(), pick_scores(source, target, edge).shape[1]),
        lambda grad, alpha, source, target, edge, indptr, row, num_targets, slope, max_degree, spread: (
            alpha.new_empty(0 if spread and edge is None else alpha.shape[0], alpha.shape[1]),
            alpha.new_empty(num_targets, alpha.shape[1]),
            alpha.new_empty(source.shape[0] if spread and source is not None else 0, alpha.shape[1]),
        ),
    )
    for schema, work, shape in zip(_SCHEMAS, (softmax_edges, pull_softmax), shapes, strict=True):
        _library.define(schema)
        for key in ("CPU", "CUDA"):
            _library.impl(work.__name__, work, key)
        _library.impl(work.__name__, shape, "Meta")


_register()
