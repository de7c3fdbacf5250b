"""Optimizers that read and write only the rows of a batch, in the memory that the table of an embedding lies in.

They are torch's optimizers for sparse gradients, over `TrainedRows`. A row without a gradient stays as it is, and so do
the numbers that are kept for it. Ids that come several times have their gradients summed in the order of the batch. Ids
go to memory in ascending order. No step waits for the GPU.

`state_dict()` has torch's form. Tables on the host are tensors of the CPU there, so that a checkpoint is not read into
GPU memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.trained_rows import find_rows
from pyg_direct.ops.aggregate.sum_rows import aggregate
from pyg_direct.ops.argument_checks import check_flag, check_number
from pyg_direct.ops.local_ids.build_csr import compress_ids

# Options of torch's optimizers that would change rows without a gradient, or need more numbers.
_LACKING = ("momentum", "weight_decay", "nesterov")


def _check_above(name: str, value: float) -> float:
    if not 0 < check_number(name, value) < float("inf"):
        raise ArgumentError(f"{name} must be above 0 and finite, got {value!r}")
    return float(value)


def _check_least(name: str, value: float) -> float:
    if not 0 <= check_number(name, value) < float("inf"):
        raise ArgumentError(f"{name} must be at least 0 and finite, got {value!r}")
    return float(value)


def _check_betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentTypeError(f"{name} must be two numbers, got {value!r}")
    for beta in value:
        if not 0 <= check_number(name, beta) < 1:
            raise ArgumentError(f"{name} must lie in [0, 1), got {beta!r}")
    return tuple(value)  # type: ignore[return-value]


class _SparseOptimizer(torch.optim.Optimizer):
    """Base: finds the rows of a gradient, and keeps a number of each of their items.

    Attributes:
        kept: Names of the tables in the state of a parameter, in torch's words.
    """

    kept: tuple[str, ...] = ()
    # Check of each option, by name: returns the value, or raises.
    _checks: Mapping[str, Callable[[str, Any], Any]]

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        super().__init__(params, {name: self._checks[name](name, value) for name, value in defaults.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, as of torch.

        Args:
            param_group: A dict with `params`, and options of the optimizer.

        Raises:
            ArgumentError, ArgumentTypeError: an option has a value that it cannot have, or that this optimizer lacks;
                or a parameter is no table of rows, one behind the other.
        """
        if not isinstance(param_group, dict):
            raise ArgumentTypeError(f"param_group must be a dict with params, got {type(param_group).__name__}")
        self._check_lacking("params", [param_group])
        given = {name: self._checks[name](name, value) for name, value in param_group.items() if name in self._checks}
        super().add_param_group({**param_group, **given})
        for param in self.param_groups[-1]["params"]:
            if (param.dim() != 2 or not param.is_floating_point() or param.layout is not torch.strided
                    or not param.is_contiguous()):  # fmt: skip
                del self.param_groups[-1]
                raise ArgumentTypeError(f"params must be contiguous tables [N, D] of a floating dtype, such as the "
                                        f"weight of a NodeEmbedding, got {tuple(param.shape)} of {param.dtype}: give "
                                        "others to another optimizer")  # fmt: skip

    def _check_lacking(self, argument: str, groups: Sequence[Mapping[str, Any]]) -> None:
        for name in _LACKING:
            if values := [group[name] for group in groups if group.get(name)]:
                raise ArgumentError(f"{argument} must be without {name}, which {type(self).__name__} lacks, got "
                                    f"{values[0]!r}")  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the rows that have gradients.

        Args:
            closure: Computes the loss and its gradients again, and returns the loss.

        Raises:
            ArgumentError: a gradient is dense.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not param.grad.is_sparse:
                    raise ArgumentError(f"{type(self).__name__} needs sparse gradients, got a dense one of shape "
                                        f"{tuple(param.grad.shape)}: read rows by a NodeEmbedding, or by "
                                        "torch.nn.Embedding(sparse=True)")  # fmt: skip
                self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        rows, state, own = find_rows(param), self.state[param], param.grad
        assert own is not None
        rows.refresh()
        if self.kept:
            if not state:
                state |= {"step": 0, **{name: rows.make_like(self._first_value(group)) for name in self.kept}}
            state["step"] += 1
        ids, grad = sum_by_id(own)
        if len(ids) == 0:
            return
        grad = grad.neg() if group["maximize"] else grad
        rows.write(ids, rows.read(ids).add_(self._find_change(ids, grad, state, group)))
        rows.note_written()

    def _first_value(self, group: dict[str, Any]) -> float:
        """Return the number that tables of the state begin with."""
        return 0.0

    @abstractmethod
    def _find_change(self, ids: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return what is added to rows, `[n, D]`, and write the numbers that are kept.

        Args:
            ids: int64 `[n]`, ascending and each once; on a GPU -1 in places that are left over.
            grad: Their gradients, `[n, D]`.
            state: Of the parameter.
            group: Options of the parameter.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form; tables over the memory that they lie in, `[N, D]`."""
        state = super().state_dict()
        state["state"] = {key: {name: value if name == "step" else value.list_rows() for name, value in kept.items()}
                          for key, kept in state["state"].items()}  # fmt: skip
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also of torch's optimizer for the same rule.

        Args:
            state_dict: As `state_dict()` returned it.

        Raises:
            ArgumentError: numbers that this optimizer keeps are missing, or of a table of another size; or the state
                has options that this one lacks. Nothing is loaded then.
        """
        for name in ("state", "param_groups"):
            if name not in state_dict:
                raise ArgumentError(f"state_dict must be of {type(self).__name__}, got one without {name!r}")
        saved, groups = state_dict["state"] if self.kept else {}, state_dict["param_groups"]
        numbers = {number: place for place, number in enumerate(n for group in groups for n in group["params"])}
        tables = [param for group in self.param_groups for param in group["params"]]
        for number, kept in saved.items():
            if missing := [name for name in ("step", *self.kept) if kept.get(name) is None]:
                raise ArgumentError(f"state_dict must be of {type(self).__name__}, got one without {missing[0]!r}")
            if number not in numbers or numbers[number] >= len(tables):
                raise ArgumentError(f"state_dict must have a parameter for each state, got a state of {number!r} and "
                                    f"parameters {list(numbers)}")  # fmt: skip
            shape = tables[numbers[number]].shape
            for name in self.kept:
                if kept[name].shape != shape:
                    raise ArgumentError(f"state_dict must have {name} of the shape of parameter {number}, "
                                        f"{tuple(shape)}, got {tuple(kept[name].shape)}")  # fmt: skip
        self._check_lacking("state_dict", groups)
        # Torch would copy the tables to the device of the parameters.
        counts = {number: {"step": int(kept["step"])} for number, kept in saved.items()}
        super().load_state_dict({**state_dict, "state": counts})
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for number, kept in saved.items():
            param, group = params[numbers[number]]
            for name in self.kept:
                table = find_rows(param).make_like(self._first_value(group))
                table.load(kept[name])
                self.state[param][name] = table


def sum_by_id(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the rows of a sparse gradient `[N, D]` that have one id, in their order.

    Returns:
        Ids, ascending and each once, int64 `[n]`, and their sums `[n, D]`. On a GPU there are as many as in the
        gradient, so that the host need not wait; left over places have the id -1.
    """
    ids, rows = grad._indices()[0], grad._values()
    if grad.is_coalesced() or len(ids) == 0:
        return ids, rows
    ordered, order = ids.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
    run = is_first.cumsum(0) - 1
    if ids.is_cuda:
        count = len(ids)
    elif (count := int(run[-1]) + 1) == len(ids):
        return ordered, rows[order]
    # Equal numbers are written to one place.
    own = torch.full((count,), -1, dtype=ids.dtype, device=ids.device).index_copy_(0, run, ordered)
    return own, aggregate(rows, compress_ids(run, count), order, num_targets=count)


class SparseSGD(_SparseOptimizer):
    """`torch.optim.SGD` without momentum, for rows with sparse gradients, such as of a `NodeEmbedding`.

    Args:
        params: Tables `[N, D]`, or dicts of groups of them, as of torch.
        lr: Learning rate.
        maximize: Maximize instead of minimize.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> nodes = NodeEmbedding(num_embeddings=4, embedding_dim=2, device="cpu")
        >>> nodes.load_state_dict({"weight": torch.zeros(4, 2)})
        <All keys matched successfully>
        >>> nodes(torch.tensor([1, 1])).sum().backward()
        >>> SparseSGD(nodes.parameters(), lr=0.5).step()
        >>> nodes.weight.tolist()
        [[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    """

    _checks = MappingProxyType({"lr": _check_least, "maximize": check_flag})

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, maximize: bool = False) -> None:
        super().__init__(params, lr=lr, maximize=maximize)

    def _find_change(self, ids: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad * -group["lr"]


class SparseAdagrad(_SparseOptimizer):
    """`torch.optim.Adagrad` for rows with sparse gradients, such as of a `NodeEmbedding` (Duchi et al., JMLR 2011).

    It keeps one number for each item of a table, in memory of the same kind.

    Args:
        params: Tables `[N, D]`, or dicts of groups of them, as of torch.
        lr: Learning rate.
        lr_decay: Decay of the learning rate.
        initial_accumulator_value: First value of the sums of squares.
        eps: Added to the denominator.
        maximize: Maximize instead of minimize.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> nodes = NodeEmbedding(num_embeddings=4, embedding_dim=2, device="cpu")
        >>> optimizer = SparseAdagrad(nodes.parameters(), lr=0.1)
        >>> nodes(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state_dict()["state"][0]["sum"].tolist()
        [[0.0, 0.0], [4.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
    """

    kept = ("sum",)
    _checks = MappingProxyType({**dict.fromkeys(("lr", "lr_decay", "initial_accumulator_value", "eps"), _check_least),
                                "maximize": check_flag})  # fmt: skip

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, lr_decay: float = 0.0, *,
                 initial_accumulator_value: float = 0.0, eps: float = 1e-10, maximize: bool = False
                 ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value,
                         eps=eps, maximize=maximize)  # fmt: skip

    def _first_value(self, group: dict[str, Any]) -> float:
        return float(group["initial_accumulator_value"])

    def _find_change(self, ids: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        total = state["sum"].read(ids).addcmul_(grad, grad)
        state["sum"].write(ids, total)
        rate = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
        return grad.div(total.sqrt_().add_(group["eps"])).mul_(-rate)


class SparseAdam(_SparseOptimizer):
    """`torch.optim.SparseAdam`, for tables in any memory, such as of a `NodeEmbedding` (Kingma and Ba, ICLR 2015).

    It keeps two numbers for each item of a table, in memory of the same kind.

    Args:
        params: Tables `[N, D]`, or dicts of groups of them, as of torch.
        lr: Learning rate.
        betas: Decay of the means of gradients and of their squares.
        eps: Added to the denominator.
        maximize: Maximize instead of minimize.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> nodes = NodeEmbedding(num_embeddings=4, embedding_dim=2, device="cpu")
        >>> optimizer, before = SparseAdam(nodes.parameters(), lr=0.1), nodes.weight.detach().clone()
        >>> nodes(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.step()
        >>> (nodes.weight != before).any(1).tolist()
        [False, True, False, False]
    """

    kept = ("exp_avg", "exp_avg_sq")
    _checks = MappingProxyType({"lr": _check_above, "betas": _check_betas, "eps": _check_above, "maximize": check_flag})

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, *, maximize: bool = False) -> None:  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, eps=eps, maximize=maximize)

    def _find_change(self, ids: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        (beta1, beta2), step = group["betas"], state["step"]
        mean = state["exp_avg"].read(ids).lerp_(grad, 1 - beta1)
        state["exp_avg"].write(ids, mean)
        square = state["exp_avg_sq"].read(ids).lerp_(grad.square(), 1 - beta2)
        state["exp_avg_sq"].write(ids, square)
        rate = group["lr"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        return mean.div_(square.sqrt_().add_(group["eps"])).mul_(-rate)
