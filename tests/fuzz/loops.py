"""A training loop that is disturbed: what models whose passes are replayed meet, and all that it sees of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

from tests.fuzz.space import Row

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda parameters: None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.01),
    # Steps of gradients near zero are small, and not of any sign.
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=0.1),
}


class Loop:
    """A training loop of one model, and what it has seen."""

    def __init__(self, row: Row, model: torch.nn.Module, attach: Callable[[torch.nn.Module], None]) -> None:
        self.row, self.model, self.attach = row, model, attach
        self.optimizer = OPTIMIZERS[row["optimizer"]](list(model.parameters()))
        self.seen: list[tuple[str, Tensor | None]] = []
        self.kept: list[Any] = []
        self.hooks: list[Any] = []

    def note(self, name: str, value: Tensor | None) -> None:
        """What another loop is to have seen too: as it is now."""
        self.seen.append((name, None if value is None else value.detach().clone().cpu()))

    def run(self, batch: Data, x: Tensor | None = None, by_name: bool = False) -> Tensor:
        """The model's result; it is to stay as it is."""
        x = batch.x if x is None else x
        if self.row["model"] == "Edged":
            args, more = (x, batch.edge_index, batch.edge_attr), {}
        else:
            args, more = (x, batch.edge_index), {}
            if self.row["trim"] == "yes":
                more = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes,
                        "num_sampled_edges_per_hop": batch.num_sampled_edges}  # fmt: skip
        if by_name:
            more, args = {"edge_index": args[1], **more, "x": x}, args[2:]
            if args:
                more, args = {**more, "edge_attr": args[0]}, ()
        out: Tensor = self.model(*args, **more)
        return out

    def lose(self, out: Tensor, batch: Data) -> Tensor:
        """A loss of a result."""
        rows = {"seeds": out[: batch.batch_size], "all": out, "one": out[:1]}[self.row["loss"]]
        scale = torch.linspace(-1, 1, rows.numel(), dtype=rows.dtype, device=rows.device).view_as(rows)
        return (rows.tanh() * scale).mean() + rows.square().mean()

    def tell(self, out: Tensor, loss: Tensor) -> None:
        """Note a result, and keep both until the end, when they are to be what they were."""
        self.note("result", out)
        self.kept.append((out.detach(), out.detach().clone(), loss))

    def finish(self) -> None:
        """Note gradients and take the optimizer's step."""
        for name, part in self.model.named_parameters():
            self.note(f"gradient of {name}", part.grad)
            if part.grad is not None:
                self.kept.append((part.grad, part.grad.clone(), None))
        if self.optimizer is not None:
            # Which writes to no gradient.
            self.optimizer.step()

    def step(self, batch: Data, **options: Any) -> None:
        """An ordinary step."""
        self.model.zero_grad(set_to_none=True)
        out = self.run(batch, **options)
        loss = self.lose(out, batch)
        self.tell(out, loss)
        loss.backward()
        self.finish()

    def do(self, event: str, batches: list[Data], number: int) -> None:
        """What disturbs, with one batch or two; `number` is a random one, of which both loops get the same."""
        batch, other = batches[0], batches[-1]
        parameters = list(self.model.parameters())
        one = parameters[number % len(parameters)]
        method = getattr(self, f"_{event}", None)
        if method is not None:
            method(batch, other, one)
        else:
            assert event in ("none", "fanouts", "smaller")
            self.step(batch)

    def _add(self, batch: Data, other: Data, one: Any) -> None:
        for each in (batch, other):
            self.lose(self.run(each), each).backward()
        # Gradients that are added to change.
        self.kept = [known for known in self.kept if known[2] is not None]
        self.note("sum of gradients", one.grad)

    def _zero(self, batch: Data, other: Data, one: Any) -> None:
        self.step(batch)
        self.kept = [known for known in self.kept if known[2] is not None]
        self.model.zero_grad(set_to_none=False)
        self.lose(self.run(other), other).backward()
        self.note("gradient after zeros", one.grad)

    def _together(self, batch: Data, other: Data, one: Any) -> None:
        self.model.zero_grad()
        outs = [self.run(each) for each in (batch, other)]
        total = self.lose(outs[0], batch) + 2 * self.lose(outs[1], other)
        for out in outs:
            self.tell(out, total)
        total.backward()
        self.finish()

    def _crossed(self, batch: Data, other: Data, one: Any) -> None:
        self.model.zero_grad()
        first, second = self.run(batch), self.run(other)
        losses = self.lose(first, batch), self.lose(second, other)
        losses[1].backward()
        losses[0].backward()
        self.tell(first, losses[0])
        self.tell(second, losses[1])
        self.finish()

    def _forward(self, batch: Data, other: Data, one: Any) -> None:
        self.note("result", self.run(batch))
        self.step(other)

    def _kept(self, batch: Data, other: Data, one: Any) -> None:
        # It could still go back.
        self.kept.append((torch.zeros(1), torch.zeros(1), self.run(batch)))
        self.step(other)

    def _evaluate(self, batch: Data, other: Data, one: Any) -> None:
        self.model.eval()
        with torch.no_grad():
            self.note("evaluated", self.run(batch))
        self.model.train()
        self.step(other)

    def _no_grad(self, batch: Data, other: Data, one: Any) -> None:
        with torch.no_grad():
            self.note("without gradients", self.run(batch))
        self.step(other)

    def _inference(self, batch: Data, other: Data, one: Any) -> None:
        with torch.inference_mode():
            self.note("by inference", self.run(batch).clone())
        self.step(other)

    def _freeze(self, batch: Data, other: Data, one: Any) -> None:
        if sum(part.requires_grad for part in self.model.parameters()) > 1 or not one.requires_grad:
            one.requires_grad_(not one.requires_grad)
        self.step(batch)

    def _load(self, batch: Data, other: Data, one: Any) -> None:
        self.model.load_state_dict({name: 0.9 * value for name, value in self.model.state_dict().items()})
        self.step(batch)

    def _assign(self, batch: Data, other: Data, one: Any) -> None:
        state = {name: 0.9 * value for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state, assign=True)
        self.optimizer = OPTIMIZERS[self.row["optimizer"]](list(self.model.parameters()))
        self.step(batch)

    def _scale(self, batch: Data, other: Data, one: Any) -> None:
        with torch.no_grad():
            one.mul_(0.9)
        self.step(batch)

    def _data(self, batch: Data, other: Data, one: Any) -> None:
        one.data = 0.9 * one.data
        self.step(batch)

    def _hook(self, batch: Data, other: Data, one: Any) -> None:
        # A layer that computes something itself.
        part = next(part for part in self.model.modules() if next(part.parameters(recurse=False), None) is not None)
        handle = part.register_forward_hook(lambda module, given, out: 0.5 * out)
        self.step(batch)
        handle.remove()
        self.step(other)

    def _model_hook(self, batch: Data, other: Data, one: Any) -> None:
        handle = self.model.register_forward_hook(lambda module, given, out: 0.5 * out)
        self.step(batch)
        handle.remove()
        self.step(other)

    def _grad_hook(self, batch: Data, other: Data, one: Any) -> None:
        if one.requires_grad:
            handle = one.register_hook(lambda grad: 2 * grad)
            self.step(batch)
            handle.remove()
        self.step(other)

    def _input(self, batch: Data, other: Data, one: Any) -> None:
        x = batch.x.clone().requires_grad_()
        self.step(batch, x=x)
        self.note("gradient of the rows", x.grad)
        self.step(other)

    def _autograd(self, batch: Data, other: Data, one: Any) -> None:
        if one.requires_grad:
            found = torch.autograd.grad(self.lose(self.run(batch), batch), [one], allow_unused=True)
            self.note("gradient asked for", found[0])
        self.step(other)

    def _retain(self, batch: Data, other: Data, one: Any) -> None:
        self.model.zero_grad()
        out = self.run(batch)
        out.retain_grad()
        self.lose(out, batch).backward()
        self.note("gradient of the result", out.grad)
        self.finish()

    def _in_place(self, batch: Data, other: Data, one: Any) -> None:
        self.model.zero_grad()
        out = self.run(batch)
        out.mul_(2)
        self.lose(out, batch).backward()
        self.finish()

    def _error(self, batch: Data, other: Data, one: Any) -> None:
        self.run(batch)
        self.step(other)

    def _checkpoint(self, batch: Data, other: Data, one: Any) -> None:
        self.model.zero_grad()
        out: Any = checkpoint(self.run, batch, use_reentrant=False)
        self.lose(out, batch).backward()
        self.finish()

    def _copy(self, batch: Data, other: Data, one: Any) -> None:
        for part in self.model.parameters():
            part.grad = None
        self.model = copy.deepcopy(self.model)
        self.attach(self.model)
        self.optimizer = OPTIMIZERS[self.row["optimizer"]](list(self.model.parameters()))
        self.step(batch)

    def _keywords(self, batch: Data, other: Data, one: Any) -> None:
        self.step(batch, by_name=True)

    def _clip(self, batch: Data, other: Data, one: Any) -> None:
        self.model.zero_grad()
        self.lose(self.run(batch), batch).backward()
        self.note("norm", torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01))
        self.finish()

    def _given(self, batch: Data, other: Data, one: Any) -> None:
        self.model.zero_grad()
        if one.requires_grad:
            one.grad = torch.ones_like(one)
        self.lose(self.run(batch), batch).backward()
        self.note("gradient beside one that was given", one.grad)
