"""A class that stands where one of PyG's stood: it makes ours, or PyG's own for what ours does not offer."""

from __future__ import annotations

import importlib
import inspect
import warnings
from abc import ABCMeta
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch_geometric.data.data import BaseData

from pyg_direct.errors import LoaderWarning
from pyg_direct.loader.placement import announce
from pyg_direct.noedit.ids import show_ids


class StandIn(ABCMeta):
    """Type of the classes that stand in, some of them abstract; of their subclasses too, which stay PyG's.

    Attributes:
        original: PyG's class.
        ours: The class that is made instead.
        options: Arguments that ours takes beyond PyG's, for every object.
        verbose: Whether every object made is told.
    """

    original: type
    ours: type
    options: Mapping[str, Any]
    verbose: bool

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of ours; of PyG's where ours raises `NotImplementedError`, which is told once."""
        if "original" not in vars(cls):
            announce(f"{cls.__name__} left to PyG: it is a class of the program, derived from PyG's")
            return super().__call__(*args, **kwargs)
        try:
            made = _make(cls, args, kwargs)
        except NotImplementedError as error:
            announce(f"{cls.__name__} left to PyG: {error}")
            return cls.original(*args, **kwargs)
        if cls.verbose:
            where = getattr(made, "device", None)
            announce(f"{cls.__name__} of {cls.ours.__module__}" + (f" on {where}" if where is not None else ""))
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        if "original" not in vars(cls):
            return super().__instancecheck__(instance)
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        if "original" not in vars(cls):
            return super().__subclasscheck__(subclass)
        # An abstract class would ask all that derive from it, this stand-in among them.
        return cls.original in subclass.__mro__ or cls.ours in subclass.__mro__


def make_stand_in(original: type, ours: type, options: Mapping[str, Any], verbose: bool) -> StandIn:
    """A class to put in the place of `original`, that answers for it: name, signature, documentation, subclasses.

    Args:
        original: PyG's class.
        ours: Takes the arguments of `original` and those of `options` that its signature names.
        options: Arguments beyond PyG's; `device="data"` is the device where the data is.
        verbose: Whether every object made is told.
    """
    taken = inspect.signature(ours).parameters
    known = {name: value for name, value in options.items() if name in taken and value is not None}
    body = {"__doc__": original.__doc__, "__module__": original.__module__, "__qualname__": original.__qualname__,
            "__signature__": inspect.signature(original), "original": original, "ours": ours, "options": known,
            "verbose": verbose}  # fmt: skip
    return StandIn(original.__name__, (original,), body)


def send_original(thing: Any) -> Any:
    """How an object of a class of PyG's is pickled, and copied, while a stand-in has the name of its class."""
    kind = type(thing)
    return _make_original, (kind.__module__, kind.__qualname__), *thing.__reduce_ex__(2)[2:]


def _make_original(module: str, name: str) -> Any:
    """An empty object of PyG's class, whether a stand-in has its name in this process or not."""
    found = getattr(importlib.import_module(module), name)
    kind = vars(found).get("original", found)
    return kind.__new__(kind)


def _make(cls: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(cls).bind(*args, **kwargs)
    arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    arguments.pop("kwargs", None)
    options = dict(cls.options)
    if options.get("device") == "data":
        options["device"] = _find_device(next(iter(arguments.values())))
    if isinstance(next(iter(arguments.values())), tuple):
        # Stores keep their rows themselves.
        options.pop("feature_cache", None)
    if "transform" in inspect.signature(cls.ours).parameters:
        arguments["transform"] = partial(show_batch, arguments.get("transform"))
    with warnings.catch_warnings():
        # A program of PyG's asks for workers as a matter of course.
        warnings.simplefilter("ignore", LoaderWarning)
        return cls.ours(**arguments, **{name: value for name, value in options.items() if name not in arguments})


def _find_device(data: Any) -> Any:
    """The GPU that a graph, or a part of it, lies on, else the CPU."""
    parts = [part for store in data.stores for part in store.values()] if isinstance(data, BaseData) else [data]
    for part in parts:
        # Methods of `SparseTensor`, properties of tensors.
        is_on_gpu, device = getattr(part, "is_cuda", False), getattr(part, "device", None)
        if is_on_gpu() if callable(is_on_gpu) else is_on_gpu:
            return device() if callable(device) else device
    return "cpu"


def show_batch(transform: Callable[[Any], Any] | None, *batch: Any) -> Any:
    """The batch as PyG would hand it over, then the program's own transform; the old sampler's comes in three."""
    shown = show_ids(batch[0] if len(batch) == 1 else batch)
    if transform is None:
        return shown
    return transform(shown) if len(batch) == 1 else transform(*shown)
