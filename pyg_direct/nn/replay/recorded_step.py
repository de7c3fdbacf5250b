"""`RecordedStep`: a training step as one CUDA graph, with its loss and its gradients, for batches and for frames."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.runtime.cuda.graph_capture import Recorder


class RecordedStep:
    """Forward and backward passes of a model as one CUDA graph, with the step of the optimizer if it may be a part.

    Attributes:
        graph, loss: The graph, and the number that each replay writes; None if nothing is recorded.
        gradients: Parameters, and the memory of their gradients within the graph.
        steps_inside: True if the optimizer steps within the graph.
    """

    def __init__(self) -> None:
        self.graph: Any = None
        self.loss: Tensor | None = None
        self.gradients: list[tuple[torch.nn.Parameter, Tensor | None]] = []
        self.steps_inside = False

    def record(self, recorder: Recorder, compute: Callable[[], Tensor], model: torch.nn.Module,
               optimizer: torch.optim.Optimizer, may_step: Callable[[], bool],
               checks: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:  # fmt: skip
        """Record a step; the gradients are those of the recording alone.

        Args:
            compute: Computes the loss.
            model, optimizer: Parameters of both get the gradients.
            may_step: Called after the backward pass; True if the optimizer steps within the graph.
            checks: Makes a context of the recorded work, such as `waits_refused`.

        Raises:
            RuntimeError: see `Recorder.record`; nothing is recorded then.
        """
        losses: list[Tensor] = []

        def step() -> None:
            with checks():
                losses.append(compute())
                losses[0].backward()
                self.steps_inside = may_step()
                if self.steps_inside:
                    optimizer.step()

        forget_gradients(model, optimizer)
        try:
            self.graph = recorder.record(step)
            self.gradients = [(parameter, parameter.grad) for parameter in _list_parameters(model, optimizer)]
        finally:
            forget_gradients(model, optimizer)
        self.loss = losses[0].detach()

    def replay(self) -> Tensor:
        """Run the step again; return its loss, which the next replay writes over."""
        assert self.loss is not None, "kept with the graph"
        self.graph.replay()
        # The graph's own gradients, whatever a program did to gradients since.
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.loss

    def drop(self) -> None:
        """Release the graph, whose memory serves the next."""
        self.graph = self.loss = None
        self.gradients, self.steps_inside = [], False


def forget_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Drop all gradients, also of parameters that the optimizer does not have: a graph would add to memory of their
    owner.
    """
    for parameter in _list_parameters(model, optimizer):
        parameter.grad = None


def _list_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """List the parameters of the optimizer and of the model, each once."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(dict.fromkeys([*stepped, *model.parameters()]))


def check_optimizes(optimizer: Any, model: torch.nn.Module) -> None:
    """Check that steps of an optimizer change a model.

    Args:
        optimizer: With `param_groups`, as torch's; others are not looked into.
        model: The model. One without parameters that learn asks for nothing.
    """
    groups = getattr(optimizer, "param_groups", None)
    learning = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if groups is None or not learning:
        return
    held = [parameter for group in groups for parameter in group["params"]]
    if not any(id(parameter) in learning for parameter in held):
        raise ArgumentError(f"optimizer must hold parameters of model, got {type(optimizer).__name__} of {len(held)} "
                            "others: make it of model.parameters()")  # fmt: skip


def steps_on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    """Report whether a step may be a part of a CUDA graph: a number on the host would keep its value."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return not any(hooks) and all(
        group.get("capturable", False) and isinstance(group.get("lr"), Tensor) and group["lr"].is_cuda
        for group in optimizer.param_groups
    )
