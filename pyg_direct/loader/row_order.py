"""Order of rows in a file, by the windows in which a loader will read them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.feature import Feature
from pyg_direct.features.feature_store import FeatureStore
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.features.tiers.disk import file_of
from pyg_direct.features.tiers.read_order import order_by_windows
from pyg_direct.loader.batch_sampler import can_share
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.loader.sampler_loader import GeneralLoader
from pyg_direct.ops.argument_checks import check_count
from pyg_direct.sampler.keyed_sampler import is_own


def order_by_reads(loader: Any, feature: Feature, *, num_epochs: int = 1) -> Tensor:
    """Return the order in which the rows of a file are best packed for the coming epochs of a loader.

    All batches are sampled, and no rows are read. Rows that the same windows of `ahead=` will read lie side by side in
    this order. So after `pack_rows`, an epoch reads few bytes beside its rows, by large requests. The order fits these
    epochs and this memory alone; with others, batches are equal too, but more bytes are read.

    Args:
        loader: A `NeighborLoader`, `NodeLoader`, `LinkNeighborLoader`, `LinkLoader` or `HGTLoader` with a `seed`, which
            plans batches over the feature. It stands before the first of the epochs, or inside it, and stays there.
            Give it memory, such as `ahead="8G"`, as windows depend on it; on a GPU set `PYG_DIRECT_AHEAD_GPU` to bytes
            too. With `ranks`, the order is for the batches of
            all processes, and equal in all of them; one of them may pack the file for all.
        feature: The feature, from a file, in the `FeatureStore` of the loader.
        num_epochs: Number of epochs; for more of them, rows of a window lie in more places.

    Returns:
        Id of each row, int64 `[N]` on the CPU, as `pack_rows` takes it. Ids are positions in a plain file.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> feature, store = Feature(device="cpu"), FeatureStore(device="cpu")
        >>> store[None, "x", None] = feature.from_file(save_rows("x.npy", torch.eye(6)))
        >>> graph = store, Data(edge_index=torch.tensor([[5, 2], [0, 1]]), num_nodes=6)
        >>> loader = NeighborLoader(graph, [1], torch.tensor([0, 1]), batch_size=1, seed=0, device="cpu", ahead=1)
        >>> order_by_reads(loader, feature).tolist()  # a window reads rows 0 and 5, and the next one rows 1 and 2
        [0, 5, 1, 2, 3, 4]
    """
    if not isinstance(loader, GeneralLoader):
        raise ArgumentTypeError("loader must be a NeighborLoader, NodeLoader, LinkNeighborLoader, LinkLoader or "
                                f"HGTLoader of pyg_direct, got {type(loader).__name__}")  # fmt: skip
    if not isinstance(feature, Feature):
        raise ArgumentTypeError(f"feature must be a Feature, got {type(feature).__name__}")
    check_count("num_epochs", num_epochs)
    if loader.seed is None:
        raise ArgumentError("loader must have a seed, by which its coming batches are known, got seed=None")
    is_stored = isinstance(loader.data, tuple)
    if is_stored and not (is_own(loader._sampler) and can_share(loader)):  # type: ignore[arg-type]
        raise ArgumentError("loader must have a sampler of ours, and choose its batches itself, got "
                            f"{type(loader).__name__} with a sampler or a batch_sampler of the program")  # fmt: skip
    reads = loader._list_window_reads(feature, num_epochs) if is_stored else []
    stored = feature.stored
    if not reads or not isinstance(stored, SpilledRows):
        raise ArgumentError("feature must have rows in a file that the loader reads ahead: the very Feature.from_file "
                            "that is now in its FeatureStore, larger than its host_cache_size, and not ahead=0; got "
                            f"{feature!r} with ahead={loader.ahead!r}")  # fmt: skip
    file = file_of(stored.tier)
    assert file is not None
    if feature.is_reordered and file.order is None:
        raise ArgumentError("feature must read its file without order=, as a packed file would lose it: pack "
                            f"{file.path} in that order first, and open the packed file")  # fmt: skip
    order = torch.from_numpy(order_by_windows(reads, stored.shape[0]))
    return order if file.order is None else file.order[order]


def order_by_epochs(path: str | os.PathLike[str], edge_index: Tensor, input_nodes: Tensor, num_epochs: int,
                    **options: Any) -> Tensor:  # fmt: skip
    """Return the order of the rows of a file for the first epochs of a `NeighborLoader`; see `order_by_reads`.

    Args:
        path: File with a row for each node.
        edge_index: int64 `[2, E]`, in the order of the program: its batches depend on it.
        input_nodes: Nodes to train on, int64 `[n]`.
        num_epochs: Number of epochs, from the first on.
        **options: Other arguments of the loader.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    feature, store = Feature().from_file(path), FeatureStore()
    store[None, "x", None] = feature
    graph = Data(edge_index=edge_index, num_nodes=RowFile(path).layout.shape[0])
    return order_by_reads(NeighborLoader((store, graph), input_nodes=input_nodes, **options), feature,
                          num_epochs=num_epochs)  # fmt: skip
