"""`FeatureStore`: PyG's interface to rows, answered by `Feature`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore as PygFeatureStore, TensorAttr

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.features.feature import Feature
from pyg_direct.features.hot_rows import Listing
from pyg_direct.features.row_files import as_tensor, slice_along
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.argument_checks import as_ids, check_ids
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.typing import Device


class FeatureStore(PygFeatureStore):  # type: ignore[misc]
    """Rows of nodes and edges behind PyG's `FeatureStore`, each table a `Feature`; results are on `device`.

    Groups are node types, or relations for rows of edges; None in a graph without types. Tables may be tensors, NumPy
    arrays and memory maps, or features that hold rows already. A tensor that requires a gradient stays in place, and
    its rows carry the gradient.

    Args:
        device: The device of results; None is the current GPU, or the CPU if there is no GPU.
        device_cache_size, placement, store_dtype, csr_topo: See `Feature`; for every table that is not a feature
            already.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.

    Example:
        >>> store = FeatureStore(device="cpu")
        >>> store["paper", "x", None] = torch.arange(8.0).view(4, 2)
        >>> store["paper", "x", torch.tensor([3, 0])].tolist()
        [[6.0, 7.0], [0.0, 1.0]]
    """

    # Loaders need not bring ids to the CPU first.
    takes_device_ids = True

    def __init__(self, device: Device = None, *, device_cache_size: int | str = 0, placement: str = "unified",
                 store_dtype: torch.dtype | None = None, csr_topo: Listing | None = None) -> None:  # fmt: skip
        super().__init__()
        self._options: dict[str, Any] = {"device": device, "device_cache_size": device_cache_size,
                                         "placement": placement, "csr_topo": csr_topo}  # fmt: skip
        self._store_dtype = store_dtype
        # Errors about them are raised here.
        Feature(**self._options, store_dtype=store_dtype)
        self.__dict__["_features"] = {}

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(len(self._features), "table")
        yield str(resolve_device(self._options["device"]))
        for (group, name), table in self._features.items():
            of = "" if group is None else f" of {group!r}"
            yield f"{name}{of}: {list(table.shape)}{f' {table.placement}' if isinstance(table, Feature) else ''}"

    @staticmethod
    def _key(attr: TensorAttr) -> tuple[Any, Any]:
        group = attr.group_name
        return (tuple(group) if isinstance(group, (list, tuple)) else group), attr.attr_name

    def find(self, attr: TensorAttr) -> Feature | Tensor:
        """Return the table of an attribute: a `Feature`, or a tensor if it is learned, `[N, ...]` of its dtype.

        Args:
            attr: Its group and name, as PyG has them.

        Raises:
            KeyError: there is no such table.
        """
        key = self._key(attr)
        if key not in self._features:
            raise KeyError(f"group_name and attr_name must be of a table in the store, got {key} of "
                           f"{list(self._features)}")  # fmt: skip
        table: Feature | Tensor = self._features[key]
        return table

    def __getitem__(self, key: Any) -> Any:
        """Rows of a table, or PyG's view of a group or of a table.

        Args:
            key: (group, name, index); or a group, or (group, name), for a view.
        """
        attr = self._tensor_attr_cls.cast(key)
        self._check_known(attr)
        return super().__getitem__(attr)

    def _check_known(self, attr: TensorAttr) -> None:
        """Refuse a key that names nothing: a view of it would be read as if it were rows."""
        group, name = self._key(attr)
        known = [key for key in self._features if not attr.is_set("group_name") or key[0] == group]
        if attr.is_set("attr_name"):
            known = [key for key in known if key[1] == name]
        if known or not attr.is_set("group_name"):
            return
        hint = ""
        if any(key[1] == group for key in self._features) or not attr.is_set("attr_name"):
            hint = f"; rows of a graph without types are store[None, {group!r}, None]"
        given = (group, name) if attr.is_set("attr_name") else group
        raise KeyError(f"key must begin with the group and the name of a table in the store, got {given!r} of "
                       f"{list(self._features)}{hint}")  # fmt: skip

    def __setitem__(self, key: Any, value: Any) -> None:
        """Put a table into the store. `key`: (group, name, None)."""
        attr = self._tensor_attr_cls.cast(key)
        if not (attr.is_set("group_name") and attr.is_set("attr_name")):
            group = attr.group_name if attr.is_set("group_name") else None
            raise ArgumentError(f"key must be (group, name, None), got {key!r}: rows of a graph without types are put "
                                f"by store[None, {group!r}, None] = rows")  # fmt: skip
        if not attr.is_set("index"):
            # A table is put whole.
            attr = copy.copy(attr)
            attr.index = None
        super().__setitem__(attr, value)

    def get_tensor(self, *args: Any, convert_type: bool = False, **kwargs: Any) -> Any:
        """Return rows of a table.

        Args:
            *args: Its group, name and index, as PyG has them; the index may be a list or an array.
            **kwargs: The same, by name.
            convert_type: If the index is an array, return the rows as an array.

        Raises:
            KeyError: there is no such table.
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        attr = self._tensor_attr_cls.cast(*args, **kwargs)
        is_array = isinstance(attr.index, np.ndarray)
        if is_array:
            # PyG compares the index, as a whole, with a word.
            attr = copy.copy(attr)
            attr.index = as_ids("index", attr.index)
        rows = super().get_tensor(attr)
        return rows.detach().cpu().numpy() if convert_type and is_array else rows

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Replace a table by another one; if the new one is refused, the old one stays.

        Args:
            tensor: The whole table, as it would be put.
            *args: Its group and name, as PyG has them.
            **kwargs: The same, by name.

        Raises:
            ArgumentError, ArgumentTypeError, NotImplementedError: as of a table that is put.
        """
        # PyG's own method removes the old table first.
        return bool(self.put_tensor(tensor, *args, **kwargs))

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        if attr.index is not None and not (isinstance(attr.index, slice) and attr.index == slice(None)):
            raise NotImplementedError("a table is put whole; index must be None")
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            self._features[self._key(attr)] = tensor
            return True
        if not isinstance(tensor, Feature):
            if not isinstance(tensor, (Tensor, np.ndarray)):
                raise ArgumentTypeError(f"tensor must be a tensor, an array or a Feature, got {type(tensor).__name__}")
            rows = as_tensor(tensor)
            store_dtype = self._store_dtype if rows.dtype == torch.float32 else None
            tensor = Feature(**self._options, store_dtype=store_dtype).from_cpu_tensor(rows)
        if tensor.placement == "sharded":
            raise ArgumentError("tensor must hold all its rows, got a Feature that is shared out over processes: let "
                                "NeighborLoader(cold_policy='shard') make it")  # fmt: skip
        self._features[self._key(attr)] = tensor
        return True

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        table = self.find(attr)
        index = attr.index
        if index is None:
            index = slice(None)
        if isinstance(index, slice):
            start, stop, step = index.indices(table.shape[0])
            # A slice that ends before it begins has no rows, which `arange` refuses.
            stop = max(start, stop) if step > 0 else min(start, stop)
            index = torch.arange(start, stop, step, device="cpu")
        ids = _as_list(as_ids("index", index), table.shape[0])
        if isinstance(table, Tensor):
            rows = slice_along(0, resolve_device(self._options["device"]), table, ids)
        else:
            rows = table[ids]
        # A number selects one row, as in any tensor.
        return rows[0] if np.ndim(index) == 0 else rows

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._features.pop(self._key(attr), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        return tuple(self.find(attr).shape)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """List the attributes of the store, without indices."""
        return [TensorAttr(group, name) for group, name in self._features]


def _as_list(ids: Tensor, count: int) -> Tensor:
    """Return ids `[n]` from a list of ids, one id, or a mask of `count` rows."""
    if ids.dtype == torch.bool:
        if ids.shape != (count,):
            raise ArgumentError(f"index must be a mask of {count} rows, got shape {tuple(ids.shape)}")
        return ids.nonzero().view(-1)
    if ids.dim() > 0:
        return check_ids("index", ids, count)
    check_ids("index", ids.view(1))
    if not -count <= int(ids) < count:
        raise IdError(f"index must lie in [{-count}, {count}), got {int(ids)}")
    return ids.view(1) % count
