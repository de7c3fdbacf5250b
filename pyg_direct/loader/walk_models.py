"""`Node2Vec` and `MetaPath2Vec`: PyG's models of these names, whose walks are drawn on the device, and `WalkLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.nn.models import MetaPath2Vec as PygMetaPath2Vec, Node2Vec as PygNode2Vec
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.kernels.batch_counters import WALK_ANYWHERE_DRAW
from pyg_direct.loader.arguments import TorchOptions, WalkOptions, settle_workers
from pyg_direct.loader.base_loader import SavedAsPyg, WholeBatchLoader, is_said_anew
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.ops.argument_checks import as_ids, check_count, check_edge_list, check_flag, check_ids
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.sampling.draw_random import draw_below
from pyg_direct.ops.sampling.draw_walks import check_bias
from pyg_direct.sampler.keyed_sampler import take_key, under_key
from pyg_direct.sampling.captured_plan import Finished
from pyg_direct.sampling.random_key import EpochKey, call_key, check_seed
from pyg_direct.sampling.random_walks import MetapathWalks, check_nodes, find_rows
from pyg_direct.typing import Device


class Walks(Protocol):
    """A model whose batches are walks."""

    @property
    def is_own(self) -> bool:
        """True if the program overrides no method that draws walks."""

    def open_walks(self, device: torch.device) -> str:
        """Place the topology of the walks, and return a line about it."""

    def draw_walks(self, nodes: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Draw positive walks from nodes on the device, and negative walks, under a key."""


class WalkLoader(WholeBatchLoader, DataLoader):  # type: ignore[misc,type-arg]
    """Pairs (positive walks, negative walks) of the nodes of a model, on `device`, as from PyG's `model.loader()`.

    Batches are functions of seed, epoch and number. On a GPU each is enqueued on request, without a wait; on a CPU they
    are prefetched.

    Args:
        device, seed, prefetch, ranks, uneven: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `batch_size` and `shuffle`; options of workers are
            absorbed.
    """

    transform = None
    transform_sampler_output = None
    _item = ("node", None)

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...  # type: ignore[override]

    def __init__(self, walks: Walks, num_nodes: int, *, device: Device = None, seed: int | None = None,
                 prefetch: int = 1, ranks: tuple[int, int] | str | None = None, uneven: str = "pad",
                 **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        self._settle(device, "auto", None, None, 1, seed, prefetch, ranks, uneven)
        if "filter_per_worker" in kwargs:
            raise ArgumentTypeError(f"{type(self).__name__} has no option filter_per_worker: its batches are no graphs")
        self._walks, self._nodes = walks, torch.arange(num_nodes, device="cpu")
        options = settle_workers(type(self), kwargs, self.device, may_start=False, num_seeds=num_nodes)
        with torch.device("cpu"):
            DataLoader.__init__(self, range(num_nodes), **options)  # type: ignore[arg-type]

    def _prepare(self) -> None:
        self._place = self._walks.open_walks(self.device)

    def _input(self) -> Tensor:
        return self._nodes

    def _is_own(self) -> bool:
        return self._walks.is_own

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Finished:
        return Finished(self._walks.draw_walks(upload(seeds.nodes, self.device), key.of_batch(number)))

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        self._prepare()
        return [self._place], {}


class WalkModel(SavedAsPyg):
    """Base of both models: walks cut into windows, and loaders of them."""

    _BEYOND_PYG = frozenset({"_device", "_seed", "_num_calls", "_opened"})
    # PyG's methods that draw walks: both kinds, positive and negative ones. A program may override each.
    _hooks: tuple[str, str, str]
    context_size: int
    walks_per_node: int
    num_negative_samples: int
    walk_length: int

    def settle_walks(self, device: Device, seed: int | None) -> None:
        """Set the arguments that PyG's model does not have.

        Args:
            device, seed: See `Node2Vec`.

        Raises:
            ArgumentError, ArgumentTypeError: `seed` is invalid.
        """
        self._device, self._seed, self._num_calls = device, check_seed(seed), 0
        # Topologies of the walks, by device.
        self._opened: dict[torch.device, Any] = {}

    def _open_loader(self, num_nodes: int, options: Mapping[str, Any]) -> WalkLoader:
        return WalkLoader(self, num_nodes, **{"device": self._device, "seed": self._seed, **options})

    @property
    def is_own(self) -> bool:
        """True if the program overrides no method that draws walks."""
        return not any(is_said_anew(self, hook) for hook in self._hooks)

    def _next_key(self) -> int:
        """Return the key of the batch that a loader requests, or of the next call outside an epoch."""
        key = take_key()
        if key is not None:
            return key
        self._num_calls += 1
        return call_key(self._seed, self._num_calls - 1)

    def _open(self, device: torch.device) -> Any:
        """Open the topology of the walks, placed once per device."""
        if device not in self._opened:
            self._opened[device] = self._place_walks(device)
        return self._opened[device]

    def _place_walks(self, device: torch.device) -> Any:
        raise NotImplementedError

    def _walk(self, nodes: Tensor, key: int) -> Tensor:
        """Draw walks from nodes on their device, int64 `[W, L + 1]`."""
        raise NotImplementedError

    def _lead_anywhere(self, nodes: Tensor, key: int) -> Tensor:
        """Draw negative walks: a start node, then nodes drawn from all of their type, int64 `[W, L + 1]`."""
        raise NotImplementedError

    def open_walks(self, device: torch.device) -> str:
        """Place the topology of the walks, or read it again, and return a line about it.

        Args:
            device: The device that walks.
        """
        self._renew(self._open(device))
        return f"topology: {self!r} walks on {device}"

    def _renew(self, opened: Any) -> None:
        """Read a program's writes to the topology."""

    def draw_walks(self, nodes: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Draw windows of positive walks from nodes, and of negative walks.

        Args:
            nodes: int64 `[B]`, on the device that walks.
            key: Unsigned 64-bit key of the draws.

        Returns:
            Two tensors, int64 `[windows, context_size]`: the windows of all walks in PyG's order; or the results of
            methods that the program overrides.
        """
        if not self.is_own:
            with under_key(key):
                return getattr(self, self._hooks[0])(nodes)  # type: ignore[no-any-return]
        walks = self._walk(nodes.repeat(self.walks_per_node), key)
        others = self._lead_anywhere(nodes.repeat(self.walks_per_node * self.num_negative_samples), key)
        return self._cut(walks), self._cut(others)

    def _draw_positive(self, batch: Any, num_nodes: int) -> Tensor:
        nodes = check_nodes("batch", as_ids("batch", batch), num_nodes).long()
        return self._cut(self._walk(nodes.repeat(self.walks_per_node), self._next_key()))

    def _draw_negative(self, batch: Any, num_nodes: int) -> Tensor:
        nodes = check_nodes("batch", as_ids("batch", batch), num_nodes).long()
        return self._cut(self._lead_anywhere(nodes.repeat(self.walks_per_node * self.num_negative_samples),
                                             self._next_key()))  # fmt: skip

    def _cut(self, walks: Tensor) -> Tensor:
        return walks.unfold(1, self.context_size, 1).transpose(0, 1).reshape(-1, self.context_size)

    def __getstate__(self) -> dict[str, Any]:
        # Placed topologies are placed again elsewhere.
        return {**self.__dict__, "_opened": {}}


class Node2Vec(WalkModel, PygNode2Vec):  # type: ignore[misc]
    """Node2Vec (Grover and Leskovec, KDD 2016), PyG's model, without pyg-lib and torch-cluster.

    `loader()` returns pairs of positive and negative walks on `device`, functions of seed, epoch and number.
    TorchScript cannot compile the model, whose walks Python draws.

    Args:
        edge_index: int64 or int32 `[2, E]`; walks go from source to target.
        embedding_dim: Width of an embedding.
        walk_length: Nodes of a walk, at least `context_size`.
        context_size: Nodes of a window.
        walks_per_node: Walks that begin at each node.
        p, q: Finite and above 0: 1 / p is the weight of a return, 1 / q the weight of a node without an edge from the
            previous one.
        num_negative_samples: Negative walks for each positive one.
        num_nodes: N; by default one more than the largest id.
        sparse: Use sparse gradients of the embeddings.
        device: The device that walks; None is the current GPU if there is one, otherwise the CPU.
        seed: Seed of the walks; None takes it from torch's generator.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> model = Node2Vec(ring, embedding_dim=8, walk_length=3, context_size=2, seed=0, device="cpu")
        >>> walks, negatives = next(iter(model.loader(batch_size=4)))
        >>> walks[:4].tolist(), negatives.shape  # the first windows of the walks
        ([[0, 1], [1, 2], [2, 3], [3, 0]], torch.Size([8, 2]))
    """

    _hooks = ("sample", "pos_sample", "neg_sample")

    def __init__(self, edge_index: Tensor, embedding_dim: int, walk_length: int, context_size: int,
                 walks_per_node: int = 1, p: float = 1.0, q: float = 1.0, num_negative_samples: int = 1,
                 num_nodes: int | None = None, sparse: bool = False, *, device: Device = None,
                 seed: int | None = None) -> None:  # fmt: skip
        check_edge_list("edge_index", edge_index)
        if num_nodes is None:
            num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
        self._check(embedding_dim, context_size, walks_per_node, num_negative_samples)
        if check_count("walk_length", walk_length) < context_size:
            raise ArgumentError(f"walk_length must be at least context_size={context_size}, got {walk_length}")
        check_ids("edge_index", edge_index.reshape(-1).cpu(), check_count("num_nodes", num_nodes))
        # Not PyG's constructor, which requires pyg-lib.
        torch.nn.Module.__init__(self)
        self.settle_walks(device, seed)
        source, target = edge_index.cpu().long()
        order = target.sort(stable=True).indices
        order = order[source[order].sort(stable=True).indices]
        self.num_nodes, self.col = num_nodes, target[order]
        self.rowptr = torch.searchsorted(source[order], torch.arange(num_nodes + 1, device="cpu"))
        self.EPS = 1e-15
        self.embedding_dim, self.context_size, self.walks_per_node = embedding_dim, context_size, walks_per_node
        # Number of steps, as in PyG.
        self.walk_length = walk_length - 1
        self.p, self.q, self.num_negative_samples = check_bias("p", p), check_bias("q", q), num_negative_samples
        self.embedding = torch.nn.Embedding(num_nodes, embedding_dim, sparse=check_flag("sparse", sparse))
        self.reset_parameters()

    @staticmethod
    def _check(embedding_dim: int, context_size: int, walks_per_node: int, num_negative_samples: int) -> None:
        for name, value in {"embedding_dim": embedding_dim, "context_size": context_size,
                            "walks_per_node": walks_per_node,
                            "num_negative_samples": num_negative_samples}.items():  # fmt: skip
            check_count(name, value)

    def loader(self, **kwargs: Unpack[WalkOptions]) -> WalkLoader:
        """Make a loader of batches (positive walks, negative walks) of all nodes.

        Args:
            **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `batch_size` and `shuffle`, and `device`,
                `seed`, `prefetch`, `ranks` and `uneven` of `WalkLoader`.

        Raises:
            ArgumentError, ArgumentTypeError: named argument, rule and value.
        """
        return self._open_loader(self.num_nodes, kwargs)

    def pos_sample(self, batch: Tensor) -> Tensor:
        """Draw windows of walks from these nodes, on their device; each call makes new draws.

        Args:
            batch: int64 `[B]`.

        Returns:
            int64 `[windows, context_size]`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: `batch`, rule and value.
        """
        return self._draw_positive(batch, self.num_nodes)

    def neg_sample(self, batch: Tensor) -> Tensor:
        """Draw windows of negative walks from these nodes, on their device; each call makes new draws.

        Args:
            batch: int64 `[B]`.

        Returns:
            int64 `[windows, context_size]`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: `batch`, rule and value.
        """
        return self._draw_negative(batch, self.num_nodes)

    def _renew(self, opened: Any) -> None:
        opened[0].renew()

    def _place_walks(self, device: torch.device) -> Any:
        placed = CSRTopo(indptr=self.rowptr, indices=self.col).place("auto", device)
        # The rows do not own their memory.
        return find_rows(placed), placed

    def _walk(self, nodes: Tensor, key: int) -> Tensor:
        rows, _ = self._open(nodes.device)
        walks: Tensor = rows.walk(nodes, self.walk_length, self.p, self.q, key=key)
        return walks

    def _lead_anywhere(self, nodes: Tensor, key: int) -> Tensor:
        items = torch.arange(nodes.numel() * self.walk_length, device=nodes.device)
        others = draw_below(items, self.num_nodes, key=key, slot=WALK_ANYWHERE_DRAW)
        return torch.cat([nodes.view(-1, 1), others.view(nodes.numel(), self.walk_length)], 1)


class MetaPath2Vec(WalkModel, PygMetaPath2Vec):  # type: ignore[misc]
    """MetaPath2Vec (Dong et al., KDD 2017), PyG's model; `loader()` returns walks on `device`, as `Node2Vec`.

    Args:
        edge_index_dict: int64 or int32 `[2, E]` of each relation.
        embedding_dim: Width of an embedding.
        metapath: Relations that walks follow, each from the target type of the previous one.
        walk_length: Steps of a walk; more than the metapath has, if it is a cycle.
        context_size: Nodes of a window.
        walks_per_node: Walks that begin at each node.
        num_negative_samples: Negative walks for each positive one.
        num_nodes_dict: Nodes of each type; by default one more than the largest id.
        sparse: Use sparse gradients of the embeddings.
        device: The device that walks; None is the current GPU if there is one, otherwise the CPU.
        seed: Seed of the walks; None takes it from torch's generator.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        ValueError, AttributeError: an invalid metapath, as in PyG.

    Example:
        >>> path = [("author", "wrote", "paper"), ("paper", "by", "author")]
        >>> edges = dict.fromkeys(path, torch.tensor([[0, 1], [1, 0]]))  # author 0 wrote paper 1, author 1 paper 0
        >>> model = MetaPath2Vec(edges, 8, path, walk_length=2, context_size=3, seed=0, device="cpu")
        >>> walks, negatives = next(iter(model.loader(batch_size=2)))
        >>> walks.tolist()  # author, paper, author; papers come after the two authors
        [[0, 3, 0], [1, 2, 1]]
    """

    _hooks = ("_sample", "_pos_sample", "_neg_sample")

    def __init__(self, edge_index_dict: Mapping[EdgeType, Tensor], embedding_dim: int, metapath: Sequence[EdgeType],
                 walk_length: int, context_size: int, walks_per_node: int = 1, num_negative_samples: int = 1,
                 num_nodes_dict: Mapping[str, int] | None = None, sparse: bool = False, *, device: Device = None,
                 seed: int | None = None) -> None:  # fmt: skip
        Node2Vec._check(embedding_dim, context_size, walks_per_node, num_negative_samples)
        if check_count("walk_length", walk_length) + 1 < context_size:
            raise ArgumentError(f"walk_length must be at least context_size={context_size} less 1, got {walk_length}")
        missing = [kind for kind in metapath if kind not in edge_index_dict]
        if missing or not len(metapath):
            raise ArgumentError(f"metapath must have relations of edge_index_dict, got {missing or metapath}")
        for kind, edges in edge_index_dict.items():
            name = f"edge_index_dict[{kind!r}]"
            check_edge_list(name, edges)
            for end, ids in zip((kind[0], kind[-1]), edges.cpu(), strict=True):
                if num_nodes_dict is not None:
                    check_ids(name, ids, num_nodes_dict.get(end, 0))
        PygMetaPath2Vec.__init__(self, dict(edge_index_dict), embedding_dim, list(metapath), walk_length, context_size,
                                 walks_per_node, num_negative_samples,
                                 None if num_nodes_dict is None else dict(num_nodes_dict),
                                 check_flag("sparse", sparse))  # fmt: skip
        self.settle_walks(device, seed)

    def loader(self, **kwargs: Unpack[WalkOptions]) -> WalkLoader:
        """Make a loader of batches (positive walks, negative walks) of all nodes of the first type; see
        `Node2Vec.loader`.

        Args:
            **kwargs: See `Node2Vec.loader`.

        Raises:
            ArgumentError, ArgumentTypeError: named argument, rule and value.
        """
        return self._open_loader(self._num_starts, kwargs)

    @property
    def _num_starts(self) -> int:
        return self.num_nodes_dict[self.metapath[0][0]]  # type: ignore[no-any-return]

    def _pos_sample(self, batch: Tensor) -> Tensor:
        return self._draw_positive(batch, self._num_starts)

    def _neg_sample(self, batch: Tensor) -> Tensor:
        return self._draw_negative(batch, self._num_starts)

    def _place_walks(self, device: torch.device) -> Any:
        rows = {kind: (self.rowptr_dict[kind], self.col_dict[kind]) for kind in self.metapath}
        walks = MetapathWalks(rows, self.metapath, self.walk_length, self._num_starts, device)
        kinds = [self.metapath[step % len(self.metapath)][-1] for step in range(self.walk_length)]
        steps_of = {kind: torch.tensor([step for step, own in enumerate(kinds) if own == kind], device=device)
                    for kind in dict.fromkeys(kinds)}  # fmt: skip
        return walks, self.offset.to(device), steps_of

    def _walk(self, nodes: Tensor, key: int) -> Tensor:
        walks, offset, _ = self._open(nodes.device)
        found: Tensor = walks.walk(nodes, key=key)
        return torch.where(found < 0, self.dummy_idx, found + offset)

    def _lead_anywhere(self, nodes: Tensor, key: int) -> Tensor:
        _, offset, steps_of = self._open(nodes.device)
        length = self.walk_length
        walks = torch.empty(nodes.numel(), length + 1, dtype=torch.int64, device=nodes.device)
        walks[:, 0] = nodes
        firsts = torch.arange(0, walks.shape[0] * length, length, device=nodes.device).view(-1, 1)
        for kind, steps in steps_of.items():
            items = (firsts + steps).view(-1)
            drawn = draw_below(items, self.num_nodes_dict[kind], key=key, slot=WALK_ANYWHERE_DRAW)
            walks.index_copy_(1, steps + 1, drawn.view(-1, steps.numel()))
        return walks.add_(offset)
