"""Ways to train a dynamic graph network over frames: PyTorch Geometric Temporal's own, and variants of it.

All train the same model with the same steps: frames of W snapshots, the loss of the last, one step per frame. The names
are the paper's: PyGT; -A with transfers ahead of use; -R that also keeps the first aggregation on the GPU; -G that also
multiplies with cuSPARSE. In addition there is PyGT with all data on the GPU, unchanged or with edges normalised once.
In the latter the model is compiled by `torch.compile`, or each frame is captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

MODELS = ("T-GCN", "EvolveGCN-O", "MPNN-LSTM")


class Model(torch.nn.Module):
    """A cell followed by a linear layer."""

    def __init__(self, kind: str, recurrent: Any, num_features: int, num_nodes: int, hidden: int) -> None:
        super().__init__()
        self.kind, self.keeps_state = kind, kind == "T-GCN"
        if kind == "T-GCN":
            self.cell, width = recurrent.TGCN(num_features, hidden), hidden
        elif kind == "EvolveGCN-O":
            self.cell, width = recurrent.EvolveGCNO(num_features), num_features
        else:
            # Without dropout, so that losses can be compared.
            self.cell = recurrent.MPNNLSTM(num_features, hidden, num_nodes, 1, 0.0)
            width = 2 * hidden + num_features
        self.linear = torch.nn.Linear(width, 1)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Any, state: Any = None) -> tuple[Tensor, Any]:
        """Return prediction and state."""
        if self.keeps_state:
            state = out = self.cell(x, edge_index, edge_weight, state)
        else:
            out = self.cell(x, edge_index, edge_weight)
        return self.linear(F.relu(out)).view(-1), state


def make_optimizer(model: Model, device: torch.device) -> torch.optim.Optimizer:
    """Make Adam, equal for every way: on a GPU in one kernel, and capturable in a CUDA graph."""
    if device.type == "cuda":
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01, device=device), fused=True, capturable=True)
    return torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)


class Way:
    """One way to run an epoch; `epoch()` returns its mean loss.

    Attributes:
        preparing_epochs: Epochs before the time per epoch is constant.
    """

    preparing_epochs = 1

    def __init__(self, model: Model, signal: Sequence[Data], window: int, device: torch.device) -> None:
        self.model, self.signal, self.window, self.device = model, signal, window, device
        self.optimizer = make_optimizer(model, device)
        # Initial state of a frame.
        self.state: Tensor | None = None

    def frames(self) -> range:
        """Return the first snapshots of the frames."""
        return range(len(self.signal) - self.window + 1)

    def epoch(self) -> float:
        """Train over all frames."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in self.frames():
            self.optimizer.zero_grad(set_to_none=True)
            cost = self.compute(first)
            cost.backward()
            self.optimizer.step()
            total += cost.detach()
        return float(total) / len(self.frames())

    def compute(self, first: int) -> Tensor:
        """Compute the loss of the frame that begins at `first`."""
        if hasattr(self.model.cell, "reinitialize_weight"):
            self.model.cell.reinitialize_weight()
        state, y_hat, y = self.state, torch.empty(0), torch.empty(0)
        for snapshot in self.read(first):
            y_hat, state = self.call(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
            y = snapshot.y
        return F.mse_loss(y_hat, y)

    def call(self, *inputs: Any) -> Any:
        """Call the model."""
        return self.model(*inputs)

    def read(self, first: int) -> Iterator[Any]:
        """Iterate over the snapshots of a frame, on the device."""
        raise NotImplementedError


class Plain(Way):
    """PyGT: every snapshot is created from NumPy arrays and copied at every visit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.arrays = [{k: v.numpy() for k, v in s.items() if isinstance(v, Tensor)} for s in self.signal]

    def read(self, first: int) -> Iterator[Any]:
        """Iterate over the snapshots of a frame, on the device."""
        for arrays in self.arrays[first : first + self.window]:
            tensors = {key: (torch.LongTensor if value.dtype.kind == "i" else torch.FloatTensor)(value)
                       for key, value in arrays.items()}  # fmt: skip
            yield Data(edge_attr=None).update(tensors).to(self.device)


class Ahead(Way):
    """PyGT-A: snapshots lie in page-locked memory, and the next one is copied during computation, also across frames
    and epochs.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        on_gpu = self.device.type == "cuda"
        names = self.needed()
        given = [{name: s[name] for name in names if isinstance(s.get(name), Tensor)} for s in self.signal]
        self.pinned = [{k: v.pin_memory() for k, v in part.items()} for part in given] if on_gpu else given
        # Targets alone take less time than the synchronization of streams.
        self.stream = torch.cuda.Stream(self.device) if on_gpu and names != ("y",) else None
        self.coming: tuple[int, Data, Any] | None = None

    def needed(self) -> tuple[str, ...]:
        """List the parts of a snapshot to copy."""
        return ("x", "edge_index", "edge_attr", "y")

    def copy(self, time: int) -> tuple[int, Data, Any]:
        """Begin to copy a snapshot; the last item is the event of its end."""
        part = self.pinned[time]
        if self.stream is None:
            return time, Data(**{name: v.to(self.device, non_blocking=True) for name, v in part.items()}), None
        # Allocated on the computing stream, which is waited for here, and which waits before it uses the copy.
        moved = {name: torch.empty_like(v, device=self.device) for name, v in part.items()}
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for name, given in part.items():
                moved[name].copy_(given, non_blocking=True)
        return time, Data(**moved), self.stream.record_event()

    def read(self, first: int) -> Iterator[Any]:
        """Iterate over the snapshots of a frame, on the device."""
        last = first + self.window - 1
        for time in range(first, last + 1):
            begun, snapshot, copied = self.coming or self.copy(time)
            assert begun == time, "frames come in order"
            # Frames overlap; the first one follows the last.
            self.coming = self.copy(time + 1 if time < last else (first + 1) % len(self.frames()))
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)
            yield snapshot


class _Reused(torch.nn.Module):
    """Stand-in for a convolution of features whose aggregation is kept."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv, self.aggregated = conv, torch.empty(0)

    def forward(self, first: Tensor, *rest: Any) -> Tensor:
        """Take `(x, edge_index, edge_weight)`, or for EvolveGCN `(weight, x, edge_index, edge_weight)`."""
        if hasattr(self.conv, "lin"):
            return F.linear(self.aggregated, self.conv.lin.weight, self.conv.bias)
        return self.aggregated @ first


class Reusing(Ahead):
    """PyGT-R: as -A, and the aggregated features of all snapshots are kept on the GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = [_aggregate(s, self.device) for s in self.signal]
        self.reused = []
        cell = self.model.cell
        for name in ("conv_z", "conv_r", "conv_h", "conv_layer", "_convolution_1"):
            if hasattr(cell, name):
                module = _Reused(getattr(cell, name))
                setattr(cell, name, module)
                self.reused.append(module)

    def read(self, first: int) -> Iterator[Any]:
        """Iterate over the snapshots of a frame, on the device."""
        for time, snapshot in enumerate(super().read(first), first):
            for module in self.reused:
                module.aggregated = self.kept[time]
            if snapshot.x is None:
                # Cells read its shape.
                snapshot.x = self.kept[time]
            yield snapshot

    def needed(self) -> tuple[str, ...]:
        """List features and edges only if more than the first aggregation reads them."""
        return super().needed() if self.model.kind == "MPNN-LSTM" else ("y",)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, turned: Tensor) -> Tensor:
        ctx.turned = turned
        return torch.sparse.mm(matrix, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.sparse.mm(ctx.turned, grad.contiguous()), None, None


class _Multiplied(torch.nn.Module):
    """Stand-in for a convolution as a product with a sparse matrix and its transpose, normalised beforehand."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv
        self.matrices: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Compute the convolution of the snapshot whose matrices are set."""
        matrix, turned = self.matrices
        out: Tensor = _Product.apply(self.conv.lin(x), matrix, turned) + self.conv.bias
        return out


class Sparse(Reusing):
    """PyGT-G: as -R, and other aggregations are products by cuSPARSE with matrices on the GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.multiplied = None
        if hasattr(self.model.cell, "_convolution_2"):
            self.multiplied = self.model.cell._convolution_2 = _Multiplied(self.model.cell._convolution_2)
            self.products = [_to_matrices(s, self.device) for s in self.signal]

    def needed(self) -> tuple[str, ...]:
        """List no edges."""
        return ("x", "y") if self.model.kind == "MPNN-LSTM" else ("y",)

    def read(self, first: int) -> Iterator[Any]:
        """Iterate over the snapshots of a frame, on the device."""
        for time, snapshot in enumerate(super().read(first), first):
            if self.multiplied is not None:
                self.multiplied.matrices = self.products[time]
            yield snapshot


class Resident(Way):
    """PyGT with every snapshot on the GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.moved = [s.clone().to(self.device) for s in self.signal]

    def read(self, first: int) -> Iterator[Any]:
        """Iterate over the snapshots of a frame, on the device."""
        yield from self.moved[first : first + self.window]


class Normalised(Resident):
    """PyGT with every snapshot on the GPU, and edges normalised once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for snapshot in self.moved:
            snapshot.edge_index, snapshot.edge_attr = _normalise(snapshot, self.device)
        module: Any
        for module in self.model.modules():
            if hasattr(module, "add_self_loops") and hasattr(module, "normalize"):
                module.normalize = False
        if self.model.keeps_state:
            # PyGT creates zeros on the host and copies them, which no graph can hold.
            self.state = torch.zeros(self.signal[0].num_nodes, self.model.linear.in_features, device=self.device)


class Compiled(Normalised):
    """As `Normalised`, with a model compiled by `torch.compile` for any number of edges."""

    preparing_epochs = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Kept separately, since Adam has the parameters of the model itself.
        self.compiled = torch.compile(self.model, dynamic=True)

    def call(self, *inputs: Any) -> Any:
        """Call the compiled model."""
        return self.compiled(*inputs)


class Captured(Normalised):
    """As `Normalised`, with the passes and the step of every frame in one CUDA graph each."""

    preparing_epochs = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.graphs: list[tuple[Any, Tensor]] = []
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.epochs = 0

    def epoch(self) -> float:
        """Train over all frames."""
        self.epochs += 1
        if self.pool is None or self.epochs == 1:
            return super().epoch()
        if not self.graphs:
            self.optimizer.zero_grad(set_to_none=True)
            for first in self.frames():
                graph = torch.cuda.CUDAGraph()
                for parameter in self.model.parameters():
                    # All graphs share the memory of the gradients.
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                with torch.cuda.graph(graph, pool=self.pool):
                    torch._foreach_zero_([p.grad for p in self.model.parameters() if p.grad is not None])
                    cost = self.compute(first)
                    cost.backward()
                    self.optimizer.step()
                self.graphs.append((graph, cost.detach()))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for graph, cost in self.graphs:
            graph.replay()
            total += cost
        return float(total) / len(self.graphs)


def _normalise(snapshot: Data, device: torch.device) -> tuple[Tensor, Tensor]:
    weight = None if snapshot.edge_attr is None else snapshot.edge_attr.to(device)
    out: tuple[Tensor, Tensor] = gcn_norm(snapshot.edge_index.to(device), weight, snapshot.num_nodes)
    return out


def _aggregate(snapshot: Data, device: torch.device) -> Tensor:
    edges, weight = _normalise(snapshot, device)
    x = snapshot.x.to(device)
    return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]] * weight.unsqueeze(1))


def _to_matrices(snapshot: Data, device: torch.device) -> tuple[Tensor, Tensor]:
    edges, weight = _normalise(snapshot, device)
    size = (snapshot.num_nodes, snapshot.num_nodes)
    made = [torch.sparse_coo_tensor(e, weight, size).coalesce().to_sparse_csr() for e in (edges.flip(0), edges)]
    return made[0], made[1]


WAYS: dict[str, Callable[..., Way]] = {
    "PyGT": Plain,
    "PyGT-A": Ahead,
    "PyGT-R": Reusing,
    "PyGT-G": Sparse,
    "resident PyGT": Resident,
    "resident PyGT, torch.compile": Compiled,
    "resident PyGT, CUDA graphs": Captured,
}
