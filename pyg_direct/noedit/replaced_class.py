"""Replacement of PyG's classes and functions: `__new__` of a class returns an object of ours, and so does a function.

The class or function itself stays, so that every reference to it leads to ours. References may be in modules imported
before, in dictionaries, in default arguments, or under a deprecated name. Options that ours does not support go to PyG.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage, recursive_apply
from torch_geometric.loader import ClusterData, LinkLoader, NodeLoader, NodeLoader as PygNodeLoader
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct import loader as loaders
from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, IdError, LoaderWarning
from pyg_direct.loader.base_loader import EpochLoader, SavedAsPyg
from pyg_direct.noedit.program_record import is_watched, note_left, note_made
from pyg_direct.ops.compute_content_hash import glance_only
from pyg_direct.ops.rows.upload import upload
from pyg_direct.progress import announce

IDS = frozenset({"n_id", "e_id", "input_id"})
# Fields of a link loader's seeds, which ids index.
LINKS = frozenset({"edge_label_index", "edge_label", "edge_label_time", "src_index", "dst_pos_index", "dst_neg_index"})
_HOST = torch.device("cpu")


class _LazyIds(BaseStorage):  # type: ignore[misc]
    """A store of a batch in which some tensors move to another device when they are read by name.

    If a tensor is moved or replaced before, as by `batch.to(device)`, this takes precedence.
    """

    def __getitem__(self, key: str) -> Any:
        # No property: PyG's `__getattr__` would shadow it in a half-made copy.
        waiting: dict[str, torch.device | Tensor] = self.__dict__.get("_waiting", {})
        if key in waiting:
            # The target device, or the tensor that is there already.
            shown = waiting[key]
            self[key] = shown if isinstance(shown, Tensor) else self._mapping[key].to(shown)
        return super().__getitem__(key)

    def get(self, key: str, value: Any = None) -> Any:
        """Return an attribute, moved as by `__getitem__`; PyG's own method, as `batch.get`, bypasses `__getitem__`."""
        return self[key] if key in self._mapping else value

    def __setitem__(self, key: str, value: Any) -> None:
        # Copies of the batch share the table, so it is not edited.
        waiting = self.__dict__.get("_waiting", {})
        self.__dict__["_waiting"] = {name: device for name, device in waiting.items() if name != key}
        super().__setitem__(key, value)

    def __deepcopy__(self, memo: dict[int, Any] | None) -> _LazyIds:
        # PyG's own shares everything but the attributes: a read of the copy would change the original.
        out: _LazyIds = super().__deepcopy__(memo)
        out.__dict__["_waiting"] = copy.deepcopy(self.__dict__.get("_waiting", {}), memo)
        return out

    def __reduce__(self) -> Any:
        # Pickled as PyG's class, with ids on the host: it must load without this package.
        state: dict[str, Any] = super().__getstate__()
        waiting = state.pop("_waiting", {})
        state["_mapping"] = {key: self[key] if key in waiting else value for key, value in state["_mapping"].items()}
        return next(plain for plain, lazy in _LAZY.items() if lazy is type(self)), (), state

    def apply(self, func: Callable[[Any], Any], *args: str) -> _LazyIds:
        """Apply `func` to all or to named attributes, by which batches move, in half the time of PyG's own."""
        mapping, is_bare = self._mapping, "_cached_attr" not in self.__dict__
        # Copies of the batch share the table, so it is not edited.
        waiting = dict(self.__dict__.get("_waiting", {}))
        for key in [key for key in args if key in mapping] if args else list(mapping):
            value = mapping[key]
            made = func(value) if type(value) is Tensor else recursive_apply(value, func)
            if is_bare and made is not None:
                mapping[key] = made
            else:
                super().__setitem__(key, made)
            shown = waiting.pop(key, None)
            if shown is not None and made is not value and isinstance(made, Tensor) and made.device == value.device:
                # A new tensor in its place, such as a clone, keeps the device.
                waiting[key] = shown.device if isinstance(shown, Tensor) else shown
        self.__dict__["_waiting"] = waiting
        return self


class LazyGlobalStorage(_LazyIds, GlobalStorage):  # type: ignore[misc]
    """Store of all attributes of a `Data`."""


class LazyNodeStorage(_LazyIds, NodeStorage):  # type: ignore[misc]
    """Store of a node type."""


class LazyEdgeStorage(_LazyIds, EdgeStorage):  # type: ignore[misc]
    """Store of an edge type."""


_LAZY = {GlobalStorage: LazyGlobalStorage, NodeStorage: LazyNodeStorage, EdgeStorage: LazyEdgeStorage}


def show_ids(batch: Any, device: torch.device = _HOST) -> Any:
    """Make `n_id`, `e_id`, `input_id` and the fields of seed links of a batch appear on `device`.

    A program written for PyG may use them to index tensors on the host; ids on the host index tensors on a GPU too.

    Args:
        batch: A `Data` or `HeteroData`, changed in place; for `(batch_size, n_id, adjs)` of PyG's old sampler a new
            tuple is returned.
    """
    if isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[1], Tensor):
        return batch[0], batch[1].to(device), batch[2]
    if isinstance(batch, BaseData):
        for store in batch.stores:
            found = (IDS | LINKS) & store._mapping.keys()
            waiting: dict[str, Any] = {key: device for key in found if _is_elsewhere(store._mapping[key], device)}
            if waiting and type(store) in _LAZY:
                _send(store._mapping, found - waiting.keys(), waiting)
                # The store's own `__setattr__` would add it as an attribute.
                object.__setattr__(store, "__class__", _LAZY[type(store)])
                store.__dict__["_waiting"] = waiting
    return batch


def _send(mapping: dict[str, Any], keys: set[str], waiting: dict[str, Any]) -> None:
    """Copy ids that are already on the right device to the GPU too; otherwise `batch.to` would wait for the GPU.

    Args:
        waiting: Target devices of ids elsewhere; the ids of `keys` are added.
    """
    place = mapping[next(iter(waiting))].device
    for key in keys:
        if isinstance(mapping[key], Tensor):
            mapping[key], waiting[key] = upload(mapping[key], place), mapping[key]


def _is_elsewhere(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device != device


# PyG's own code in these packages makes loaders and samplers for itself, and calls their internals.
_INNER = ("torch_geometric.loader.", "torch_geometric.sampler.", "torch_geometric.distributed.")


class StandIn(NamedTuple):
    """Replacement for objects of a PyG class.

    Attributes:
        ours: A class that takes the arguments of PyG's class, and the `options` that its signature names.
        options: Arguments beyond PyG's; `device="data"` is the device of the data.
    """

    ours: type
    options: Mapping[str, Any]
    verbose: bool


# Loaders of data that ours may refuse and PyG take, such as graphs of several dtypes: under `run`, the code of PyG
# decides.
_LEAVING = (loaders.DataLoader, loaders.DataListLoader, loaders.DenseDataLoader, loaders.RandomNodeLoader)
# By PyG's class.
_STAND_INS: dict[type, StandIn] = {}
# Functions of PyG that call ours, and copies of them that do what they did before.
_FUNCTIONS: list[tuple[FunctionType, FunctionType]] = []


def replace(original: type, stand_in: StandIn) -> None:
    """Make a PyG class create ours from now on, also under the deprecated names for which PyG derives a class.

    Objects of the program's subclasses stay PyG's, and so do objects for which ours raises `NotImplementedError`. Other
    refusals leave loaders of small graphs, and of parts of all nodes, to PyG too. All are reported once.
    """
    if original not in _STAND_INS and "__new__" not in vars(original):
        # `__new__` is never removed: Python would then refuse arguments, as it does not forget that the class had one.
        new = functools.partial(_make, original)
        # PyG's data modules read the signature of the class, which Python takes from `__new__` before `__init__`.
        new.__signature__ = inspect.signature(original.__init__)  # type: ignore[attr-defined,misc]
        original.__new__ = staticmethod(new)  # type: ignore[assignment]
    _STAND_INS[original] = stand_in
    if not issubclass(stand_in.ours, original):
        # An abstract class, which programs may use in `isinstance`.
        original.register(stand_in.ours)  # type: ignore[attr-defined]


def replace_function(original: FunctionType, ours: Callable[..., Any], serves: Callable[..., bool]) -> None:
    """Make a PyG function call ours from now on.

    Args:
        serves: Tests if ours serves a call with these arguments; otherwise PyG's code does.
    """
    plain = FunctionType(original.__code__, original.__globals__, original.__name__, original.__defaults__,
                         original.__closure__)  # fmt: skip
    plain.__kwdefaults__ = original.__kwdefaults__
    signature = inspect.signature(original)

    def choose(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) if serves(*args, **kwargs) else plain(*args, **kwargs)

    _FUNCTIONS.append((original, plain))
    original.__code__, original.__defaults__ = _call_chosen.__code__, None
    original.__kwdefaults__ = {"_pyg_direct": choose}
    original.__signature__ = signature  # type: ignore[attr-defined]


def _call_chosen(*args: Any, _pyg_direct: Any, **kwargs: Any) -> Any:
    return _pyg_direct(*args, **kwargs)


def give_back() -> None:
    """Make all PyG classes create PyG's objects again, and PyG's functions run their own code."""
    _STAND_INS.clear()
    while _FUNCTIONS:
        original, plain = _FUNCTIONS.pop()
        original.__code__, original.__defaults__ = plain.__code__, plain.__defaults__
        original.__kwdefaults__ = plain.__kwdefaults__
        del original.__signature__  # type: ignore[attr-defined]


def _make(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Create an object of ours, or an empty one of `cls`, which its `__init__` fills; empty without arguments."""
    stand_in = _STAND_INS.get(original)
    if stand_in is not None and (args or kwargs):
        if cls is not original and not _is_alias(cls, original):
            _tell_left(cls)
        elif not _is_inner(sys._getframe(1)):
            try:
                return _make_ours(original, cls, stand_in, args, kwargs)
            except (ArgumentError, ArgumentTypeError, NotImplementedError) as error:
                if not (isinstance(error, NotImplementedError) or issubclass(stand_in.ours, _LEAVING)):
                    raise
                note_left(cls.__name__, str(error))
    following: Any = super(original, cls).__new__
    return following(cls) if following is object.__new__ else following(cls, *args, **kwargs)


def _is_inner(frame: FrameType) -> bool:
    """Check if PyG's own code makes an object for itself; a loader of the program's class has a sampler of ours."""
    room = str(frame.f_globals.get("__name__"))
    owner = type(frame.f_locals.get("self")).__module__.partition(".")[0]
    is_derived = frame.f_code.co_name == "__init__" and room.startswith(_INNER[0]) and owner != "torch_geometric"
    return room.startswith(_INNER) and not is_derived


def _make_ours(original: type, cls: type, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = _read_arguments(original, stand_in, args, kwargs)
    with warnings.catch_warnings():
        # PyG programs request workers by habit.
        warnings.simplefilter("ignore", LoaderWarning)
        made = stand_in.ours(**arguments)
    if isinstance(made, SavedAsPyg):
        made.stand_for(original)
    text: Any = original.__repr__
    if isinstance(made, EpochLoader) and text is not object.__repr__:
        # A program prints and compares the text of its loader.
        made._repr_of_pyg = text
    if cls is not original:
        warnings.warn(f"'data.{cls.__name__}' is deprecated, use 'loader.{cls.__name__}' instead", stacklevel=3)
    note_made(cls.__name__)
    if stand_in.verbose:
        where = getattr(made, "device", None)
        announce(f"{cls.__name__} of {type(made).__module__}" + (f" on {where}" if where is not None else ""))
    if cls in type(made).__mro__:
        # Python calls `__init__` on the result of `__new__` if it is an instance of the class.
        kind: Any = type(made)
        made.__class__ = _made_class(kind)
    return made


@functools.cache
def _made_class(ours: Any) -> Any:
    """Make the class of a complete object of ours: its next `__init__` only restores our class."""

    def complete(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = ours

    return type(ours)(ours.__name__, (ours,), {"__init__": complete, "__module__": ours.__module__, "__slots__": ()})


def _is_alias(cls: type, original: type) -> bool:
    """Check if a class is a deprecated name of another, such as `torch_geometric.data.NeighborSampler`."""
    return cls.__bases__ == (original,) and cls.__module__ == "torch_geometric.deprecation"


def _tell_left(kind: type) -> None:
    """Report that objects of a subclass of PyG's class are left to PyG."""
    if is_watched(kind):
        return
    room = kind.__module__.partition(".")[0]
    if room == "torch_geometric" and kind not in _STAND_INS:
        note_left(kind.__name__)
    elif room not in ("torch_geometric", __package__.partition(".")[0]):
        rows = "; ours samples and gathers rows for it" if issubclass(kind, (NodeLoader, LinkLoader)) else ""
        note_left(kind.__name__, f"it is a class of the program, derived from PyG's{rows}")


def _read_arguments(original: type, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]
                    ) -> dict[str, Any]:  # fmt: skip
    """Convert arguments of PyG's class to arguments of ours, by name."""
    signature = inspect.signature(original.__init__)  # type: ignore[misc]
    bound = signature.bind(None, *args, **kwargs)
    arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    for name in ("self", "kwargs"):
        arguments.pop(name, None)
    taken = inspect.signature(stand_in.ours).parameters
    # The program decides options that PyG's class has too, such as the device of `CachedLoader`.
    options = {name: value for name, value in stand_in.options.items()
               if name in taken and name not in signature.parameters and value is not None}  # fmt: skip
    if options.get("device") == "data":
        options["device"] = find_device(next(iter(arguments.values())))
    if isinstance(next(iter(arguments.values()), None), tuple):
        # Stores manage their own rows.
        options.pop("feature_cache", None)
    if "transform" in taken and issubclass(stand_in.ours, EpochLoader):
        arguments["transform"] = partial(show_batch, arguments.get("transform"))
    return {**options, **arguments}


def find_device(data: Any) -> Any:
    """Find the GPU of a graph, of a part of it, or of the first graph in a data set; otherwise the CPU."""
    while isinstance(data, Subset):
        data = data.dataset
    if isinstance(data, InMemoryDataset):
        data = data._data
    elif isinstance(data, ClusterData):
        data = data.data
    elif isinstance(data, list) and data and isinstance(data[0], BaseData):
        data = data[0]
    stores = data.stores if isinstance(data, BaseData) else [data] if isinstance(data, Mapping) else [{"": data}]
    parts = [part for store in stores for part in store.values()]
    for part in parts:
        # A method of `SparseTensor`, a property of tensors.
        is_on_gpu, device = getattr(part, "is_cuda", False), getattr(part, "device", None)
        if is_on_gpu() if callable(is_on_gpu) else is_on_gpu:
            return device() if callable(device) else device
    return "cpu"


def show_batch(transform: Callable[[Any], Any] | None, *batch: Any) -> Any:
    """Give a batch PyG's form, then call the program's transform; the old sampler's batch has three parts."""
    shown = show_ids(batch[0] if len(batch) == 1 else batch)
    if transform is None:
        return shown
    return transform(shown) if len(batch) == 1 else transform(*shown)


_REFUSALS = (ArgumentError, ArgumentTypeError, DeviceError, IdError, NotImplementedError)
_NAMES = "data", "transform", "transform_sampler_output", "node_sampler", "link_sampler", "neg_sampling"


class Filters:
    """Loaders of ours that build the batches of loaders of PyG."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        names = "device", "placement", "feature_cache"
        self._options = {name: options[name] for name in names if options.get(name) is not None}
        # By loader of PyG: the attributes for which ours was made, and ours, or None if there cannot be one.
        self._made: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()

    def serves(self, loader: Any, out: Any) -> bool:
        """Test if a loader of ours can build the batch of a sampler's output.

        A worker process leaves the GPU to its parent. Stores gather their own rows.
        """
        return (isinstance(out, (SamplerOutput, HeteroSamplerOutput))
                and not isinstance(loader, EpochLoader)
                and isinstance(getattr(loader, "data", None), (Data, HeteroData))
                and torch.utils.data.get_worker_info() is None
                and self._find(loader) is not None)  # fmt: skip

    def filter(self, loader: Any, out: Any) -> Any:
        """Build the batch of a sampler's output, as `filter_fn` of PyG's loader does."""
        ours = self._find(loader)
        with glance_only():
            ours._prepare()
        return ours.filter_fn(out)

    def _find(self, loader: Any) -> Any:
        """Find or make the loader of ours, again after the program replaced an attribute of its own."""
        # Held, so that no other object gets their addresses.
        held = tuple(getattr(loader, name, None) for name in _NAMES)
        known, ours = self._made.get(loader, ((), None))
        if len(known) != len(held) or any(a is not b for a, b in zip(known, held, strict=True)):
            try:
                ours = self._make(loader)
                note_made(f"rows of {type(loader).__name__}")
            except _REFUSALS as error:
                note_left(f"rows of {type(loader).__name__}", str(error))
                ours = None
            self._made[loader] = held, ours
        return ours

    def _make(self, loader: Any) -> Any:
        options = dict(self._options)
        if options.get("device") == "data":
            options["device"] = find_device(loader.data)
        given = loader.input_data
        options |= {"transform": partial(show_batch, loader.transform), "batch_size": loader.batch_size or 1,
                    "transform_sampler_output": loader.transform_sampler_output}  # fmt: skip
        if isinstance(loader, PygNodeLoader):
            seeds = given.node if given.input_type is None else (given.input_type, given.node)
            return loaders.NodeLoader(loader.data, loader.node_sampler, seeds, **options)
        links: Any = torch.stack([given.row, given.col])
        links = links if given.input_type is None else (given.input_type, links)
        return loaders.LinkLoader(loader.data, loader.link_sampler, links, neg_sampling=loader.neg_sampling, **options)
