"""Softmax over the edges of each target, and the sums of rows weighted by it; differentiable.

The scores come from the ends of each edge. As in `ops/aggregate/sum_rows.py` the kernels are `torch.library` operators,
and none waits for the GPU.

If `is_fused` reports that weights and sums take one launch, `attend` uses `kernels/aggregate/softmax.py`. Otherwise it
uses `softmax` and then `aggregate`, which also make the gradients of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.kernels.aggregate import softmax as kernels
from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.ops.aggregate.operators import WIDE_KINDS, is_wide, length_of_run, operators, sum_rows
from pyg_direct.ops.aggregate.sum_rows import Transposed, aggregate, check_rows
from pyg_direct.ops.argument_checks import INDEX_DTYPES, check_ids, check_same_device
from pyg_direct.ops.local_ids.build_csr import expand
from pyg_direct.ops.run_kernel import grid_of, pull_by_torch, run_cpu, run_gpu, runs_on_gpu, threads_for

_DTYPES = (torch.float32, torch.float64)
_SCHEMAS = (
    "softmax_edges(Tensor? source, Tensor? target, Tensor? edge, Tensor indptr, Tensor row, SymInt num_targets,"
    " bool loops, float slope, int max_degree) -> Tensor",
    "pull_softmax(Tensor grad, Tensor alpha, Tensor? source, Tensor? target, Tensor? edge, Tensor indptr, Tensor row,"
    " SymInt num_targets, float slope, int max_degree, bool spread) -> (Tensor, Tensor, Tensor)",
)
_library = torch.library.Library("pyg_direct", "FRAGMENT")
# A warp shares a row whose length has no known bound.
_UNKNOWN_LANE_BITS = 5


def softmax(source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor, row: Tensor, *,
            num_targets: int | None = None, negative_slope: float = 1.0, loops: bool = False,
            max_degree: int | None = None, deterministic: bool | None = None) -> Tensor:  # fmt: skip
    """Return weights of edges: softmax over each target's of leaky(source[row[e]] + target[t] + edge[e]), for each
    head.

    Args:
        source: Scores of sources, fp32 or float64 `[N, H]`, or None for zeros.
        target: Scores of targets, `[T, H]`, or None.
        edge: Scores of edges, `[E, H]`, or None.
        indptr: Offsets of the targets' edges, int32 or int64 `[T + 1]` or longer; those above E count as E.
        row: Source of each edge, `[E]`.
        num_targets: T, if `indptr` is longer.
        negative_slope: Factor of negative scores in `leaky`; 1 leaves them unchanged.
        loops: The last edge of each target is its loop, and other loops have weight 0.
        max_degree: Upper bound of the edges of a target, if known.
        deterministic: See `aggregate`.

    Returns:
        `[E, H]`; the weights of a target's edges add up to 1.
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
    """Check that the arguments of `softmax` fit, and return `row` on the device."""
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
            run = partial(_softmax_by_torch, indptr, row, alpha, slope, num_targets)
            return *pull_by_torch(run, (source, target, edge), ctx.needs_input_grad[:3], [grad]), *(None,) * 7
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


def _softmax_by_torch(indptr: Tensor, row: Tensor, alpha: Tensor, slope: float, num_targets: int,
                      source: Tensor | None, target: Tensor | None, edge: Tensor | None) -> list[Tensor]:  # fmt: skip
    """Compute `softmax`, whose result is `alpha`, by functions that torch can differentiate again."""
    target_of = expand(indptr[: num_targets + 1], row.numel())
    scores = torch.zeros_like(alpha) if edge is None else edge
    scores = scores if source is None else scores + source.index_select(0, row)
    scores = scores if target is None else scores + target.index_select(0, target_of)
    bent = torch.where(scores > 0, scores, scores * slope)
    best = aggregate(bent.detach(), indptr, reduce="max", num_targets=num_targets)
    # Edges with weight 0 stay out.
    shares = (bent - best.index_select(0, target_of)).exp() * (alpha.detach() != 0)
    total = shares.new_zeros(best.shape).index_add(0, target_of, shares) + kernels.TINY
    return [shares / total.index_select(0, target_of)]


def _flat(scores: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if scores is None else scores.detach().reshape(-1)


def pick_scores(source: Tensor | None, target: Tensor | None, edge: Tensor | None) -> Tensor:
    """Return one of the scores that are given."""
    first = next(scores for scores in (source, target, edge) if scores is not None)
    return first


def _lane_bits(max_degree: int) -> int:
    """Return the logarithm of the threads that share a target: about one for two edges."""
    if SIMULATED:
        return 0
    return _UNKNOWN_LANE_BITS if max_degree < 0 else min(_UNKNOWN_LANE_BITS, max(0, (max_degree // 2).bit_length()))


def softmax_edges(source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor, row: Tensor,
                  num_targets: int, loops: bool, slope: float, max_degree: int) -> Tensor:  # fmt: skip
    """Compute `softmax` of edges."""
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
    """Return gradients of scores of edges `[E, H]`, of targets `[T, H]`, and with `spread` of sources `[N, H]`."""
    num_edges, heads = alpha.shape
    # The gradient of sources is added at once, unless edges need theirs too.
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
    """Return a number in the dtype of a tensor, as a CPU loop takes it."""
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


_SCHEMA = (
    "attend_rows(Tensor x, Tensor? source, Tensor? target, Tensor? edge, Tensor indptr, Tensor row, SymInt num_targets,"
    " bool loops, float slope, int max_degree, bool keeps_weights, bool widens=False) -> (Tensor, Tensor)"
)
_kernels = operators()


def attend(x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor, row: Tensor, *,
           target_of: Tensor | None = None, num_targets: int | None = None, negative_slope: float = 1.0,
           loops: bool = False, max_degree: int | None = None, transposed: Transposed | None = None,
           deterministic: bool | None = None, widens: bool = False) -> Tensor:  # fmt: skip
    """Sum the rows `row[e]` of `x` over the edges e of each target, times the weights that `softmax` makes of scores; 0
    for a target without edges.

    Args:
        x: Rows `[N, ...]` of fp32, fp16, bfloat16 (added up in fp32) or float64, the columns of H heads one after the
            other.
        source, target, edge: Scores of sources `[N, H]`, targets `[T, H]` and edges `[E, H]`; see `softmax`.
        indptr: Offsets of the targets' edges, int32 or int64 `[T + 1]` or longer; those above E count as E.
        row: Source of each edge, `[E]`.
        target_of: Target of each edge, `[E]`, if it is there already; only gradients need it.
        num_targets: T, if `indptr` is longer.
        negative_slope, loops: See `softmax`.
        max_degree: Upper bound of the edges of a target, if known; without it many edges take two launches.
        transposed: See `aggregate`; used if attention takes two launches.
        deterministic: See `aggregate`.
        widens: Return the sums in the dtype of the scores, if it is wider than the dtype of `x`.

    Returns:
        `[T, ...]` of the dtype of `x`, unless it `widens`.
    """
    num_targets = indptr.numel() - 1 if num_targets is None else num_targets
    row = check_scores(source, target, edge, indptr, row, num_targets)
    check_rows(x, indptr, row, "sum", None, num_targets, row.numel())
    heads, width = pick_scores(source, target, edge).shape[1], math.prod(x.shape[1:])
    if heads == 0 or width % heads != 0:
        raise ArgumentError(f"scores must have a divisor of {width} columns, got {heads}")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    degree = -1 if max_degree is None else max_degree
    flat = x.reshape(x.shape[0], width)
    if deterministic or not is_fused(flat, source, target, edge, row.numel(), num_targets, degree):
        alpha = softmax(source, target, edge, indptr, row, num_targets=num_targets, negative_slope=negative_slope,
                        loops=loops, max_degree=max_degree, deterministic=deterministic)  # fmt: skip
        x = x.to(torch.promote_types(x.dtype, alpha.dtype)) if widens else x
        return aggregate(x, indptr, row, weight=alpha.to(x.dtype), target=target_of, num_targets=num_targets,
                         max_degree=max_degree, transposed=transposed, deterministic=deterministic)  # fmt: skip
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, source, target, edge)):
        out = _Attend.apply(flat, source, target, edge, indptr, row, target_of, num_targets, loops, negative_slope,
                            degree, widens)  # fmt: skip
    else:
        out, _ = torch.ops.pyg_direct.attend_rows.default(flat, source, target, edge, indptr, row, num_targets, loops,
                                                          negative_slope, degree, False, widens)  # fmt: skip
    made: Tensor = out.reshape(num_targets, *x.shape[1:])
    return made


def is_fused(x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, num_edges: int,
             num_targets: int, max_degree: int) -> bool:  # fmt: skip
    """Report whether weights and sums of rows `[N, F]` take one launch. This needs a GPU, fp32, heads that are read in
    pieces of 16 bytes, and scores of both ends or of edges. Long rows of edges, which are cut into slices, are not
    fused.

    A thread computes the weights of its edges again. With pieces of 16 bytes this costs less than the saved launch and
    weights, at any measured width. Item by item it costs up to twice as much.
    """
    scores = pick_scores(source, target, edge)
    heads = scores.shape[1]
    return (
        runs_on_gpu(x)
        and scores.dtype == torch.float32
        and ((source is None) == (target is None) != (edge is None))
        and (num_edges <= LONG_ROW or 0 <= max_degree <= LONG_ROW)
        and min(num_edges, num_targets, x.shape[1]) > 0
        and is_wide(x, x.shape[1] // heads, max(x.shape[0], num_edges, num_targets) * heads)
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor,
                row: Tensor, target_of: Tensor | None, num_targets: int, loops: bool, slope: float, max_degree: int,
                widens: bool) -> Tensor:  # fmt: skip
        out: Tensor
        out, alpha = torch.ops.pyg_direct.attend_rows.default(x, source, target, edge, indptr, row, num_targets, loops,
                                                              slope, max_degree, True, widens)  # fmt: skip
        ctx.save_for_backward(x, source, target, edge, indptr, row, target_of, alpha)
        ctx.options = num_targets, loops, slope, max_degree
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, source, target, edge, indptr, row, target_of, alpha = ctx.saved_tensors
        num_targets, _, slope, max_degree = ctx.options
        if torch.is_grad_enabled():
            run, given = partial(_attend_by_torch, indptr, row, ctx.options, grad.dtype), (x, source, target, edge)
            return *pull_by_torch(run, given, ctx.needs_input_grad[:4], [grad]), *(None,) * 8
        grad = grad.to(x.dtype).contiguous()
        if target_of is None:
            target_of = expand(indptr[: num_targets + 1], row.numel())
        to_x = to_source = to_target = to_edge = None
        if ctx.needs_input_grad[0]:
            to_x = _kernels.spread_rows(grad, indptr, row, target_of, alpha, x.shape[0], False, max_degree)
        if any(ctx.needs_input_grad[1:4]):
            to_alpha = _kernels.dot_rows(grad, x, indptr, row, target_of, alpha.shape[1], False)
            to_edge, to_target, to_source = torch.ops.pyg_direct.pull_softmax.default(
                to_alpha, alpha, source, target, edge, indptr, row, num_targets, slope, max_degree,
                ctx.needs_input_grad[1])  # fmt: skip
        made = to_x, to_source, to_target, to_edge
        wanted = [value if needs else None for value, needs in zip(made, ctx.needs_input_grad[:4], strict=True)]
        return *wanted, *(None,) * 8


def _attend_by_torch(indptr: Tensor, row: Tensor, options: tuple[int, bool, float, int], dtype: torch.dtype, x: Tensor,
                     source: Tensor | None, target: Tensor | None, edge: Tensor | None) -> list[Tensor]:  # fmt: skip
    """Compute `attend` through the two operators, which torch can differentiate again."""
    num_targets, loops, slope, max_degree = options
    bound = None if max_degree < 0 else max_degree
    alpha = softmax(source, target, edge, indptr, row, num_targets=num_targets, negative_slope=slope, loops=loops,
                    max_degree=bound)  # fmt: skip
    return [aggregate(x.to(dtype), indptr, row, weight=alpha.to(dtype), num_targets=num_targets, max_degree=bound)]


def attend_rows(x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor,
                row: Tensor, num_targets: int, loops: bool, slope: float, max_degree: int, keeps_weights: bool,
                widens: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (sums `[T, F]` of rows `[N, F]`, weights of edges `[E, H]`, empty without `keeps_weights`)."""
    like, num_edges, width = pick_scores(source, target, edge), row.numel(), x.shape[1]
    heads = like.shape[1]
    if not is_fused(x, source, target, edge, num_edges, num_targets, max_degree):
        alpha = softmax_edges(source, target, edge, indptr, row, num_targets, loops, slope, max_degree)
        x = x.to(alpha.dtype) if widens else x
        out = sum_rows(x, indptr, row, alpha, num_targets, False, max_degree)
        return out, alpha if keeps_weights else alpha.new_empty(0, heads)
    alpha = like.new_empty(num_edges if keeps_weights else 0, heads)
    indptr, x, row = indptr.contiguous(), x.detach().contiguous(), row.to(indptr.dtype).contiguous()
    # Scores of sources, or of edges.
    scores, own = like.detach().contiguous(), None if target is None else target.detach().contiguous()
    out = torch.empty(num_targets, width, dtype=like.dtype if widens else x.dtype, device=x.device)
    lanes = width // heads * x.element_size() // 16
    pieces = lanes * heads
    run = length_of_run(num_targets * pieces, x)
    num_runs = -(-num_targets // run)
    run_gpu(kernels.attend_rows_gpu, grid_of(num_runs * pieces, 0), x.data_ptr(), indptr, indptr.data_ptr(),
            row.data_ptr(), row.element_size(), scores.data_ptr(), 0 if own is None else own.data_ptr(), num_edges,
            num_targets, num_runs, run, lanes, heads, int(loops), slope, WIDE_KINDS[x.dtype],
            WIDE_KINDS[out.dtype], alpha.data_ptr() if keeps_weights else 0, out.data_ptr())  # fmt: skip
    return out, alpha


def _shape(x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor, row: Tensor,
           num_targets: int, loops: bool, slope: float, max_degree: int, keeps_weights: bool, widens: bool = False
           ) -> tuple[Tensor, Tensor]:  # fmt: skip
    like = pick_scores(source, target, edge)
    out = x.new_empty(num_targets, x.shape[1], dtype=like.dtype if widens else x.dtype)
    return out, like.new_empty(row.numel() if keeps_weights else 0, like.shape[1])


_library.define(_SCHEMA)
for _key in ("CPU", "CUDA"):
    _library.impl("attend_rows", attend_rows, _key)
_library.impl("attend_rows", _shape, "Meta")
