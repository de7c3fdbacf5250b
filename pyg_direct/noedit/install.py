"""`install` and `uninstall`: PyG's classes create objects of ours, and its models are accelerated at their creation.

`REPLACEMENTS` lists the replaced classes of PyG and their replacements. `accelerate_what_is_made` accelerates PyG's
convolutions as they are made, loaded or copied. `make_inference` serves PyG's `model.inference(loader)` if the loader
is one of ours.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from multiprocessing import util as spawning
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import loader as pyg_loader, sampler as pyg_sampler
from torch_geometric.nn import HeteroConv, MessagePassing, models as pyg_models
from torch_geometric.nn.models import tgn as pyg_tgn
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import batched_negative_sampling, negative_sampling

from pyg_direct import loader, sampler
from pyg_direct.errors import ArgumentError
from pyg_direct.graph.placed_topology import AUTO_PLACEMENTS
from pyg_direct.loader import tgn, walk_models
from pyg_direct.loader.inference import check_inference_loader, infer
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate_one
from pyg_direct.nn.conv.table import SPECS, find_spec
from pyg_direct.nn.hetero.hetero_conv import watch_relations
from pyg_direct.nn.paths import Paths
from pyg_direct.nn.replay.model_replay import SearchingPaths, replays_by_default
from pyg_direct.nn.trimming import watch_trimming
from pyg_direct.noedit.optimizers import FUSED, fuse_steps, hook_steps, make_step, make_zero_grad
from pyg_direct.noedit.program_record import LEFT, forget_left, note_made, note_process, watch_left
from pyg_direct.noedit.replaced_class import Filters, StandIn, give_back, replace, replace_function, show_batch
from pyg_direct.ops.argument_checks import check_choice, check_flag
from pyg_direct.ops.run_kernel import is_ordinary
from pyg_direct.progress import announce
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.host_memory import check_size
from pyg_direct.sampling.negative_links import sample_batched_negative_edges, sample_negative_edges
from pyg_direct.sampling.random_key import check_seed
from pyg_direct.typing import Device

# Environment variable with the options for processes that a program under `run` starts.
_HANDED = "PYG_DIRECT_RUN"
# Functions of `os` that start a program with the environment of this process, and with a given one.
_INHERITING, _GIVING = ("system", "execv"), ("execve", "posix_spawn", "posix_spawnp")
# Methods that fill an object at its creation and after unpickling.
_METHODS = ("__init__", "__setstate__")
# Wrapped methods, and the class's own method of this name: None if it inherits one.
_REPLACED: list[tuple[type, str, Callable[..., None] | None]] = []


def accelerate_what_is_made(*, replay: bool = False) -> None:
    """Accelerate every convolution and every PyG model that is made or loaded from now on.

    Args:
        replay: Replay the models in which convolutions are called.
    """
    paths = SearchingPaths if replay else Paths
    for spec in SPECS:
        _extend(spec.kind, partial(accelerate_one, paths=paths))
    _extend(MessagePassing, partial(_accelerate_other, paths))
    _extend(BasicGNN, watch_trimming)
    _extend(HeteroConv, watch_relations)


def _accelerate_other(paths: type[Paths], module: Any) -> None:
    """Accelerate a layer without `ConvSpec`; others have no attributes yet after `MessagePassing.__init__`."""
    if find_spec(type(module)) is None:
        accelerate_one(module, paths)


def leave_what_is_made() -> None:
    """Undo `accelerate_what_is_made`; models that exist stay accelerated."""
    while _REPLACED:
        kind, name, own = _REPLACED.pop()
        if own is None:
            delattr(kind, name)
        else:
            setattr(kind, name, own)


def _take_over(original: type, ours: Any, options: Mapping[str, Any], model: Any) -> None:
    """Change a loaded model of PyG's class to our class, which draws its walks."""
    kind: Any = type(model)
    if kind is original:
        model.__class__ = ours
        device = options.get("device")
        model.settle_walks("cpu" if device == "data" else device, options.get("seed"))
        model.stand_for(original)


def _extend(kind: type, change: Callable[[Any], object], methods: Sequence[str] = _METHODS) -> None:
    """Call `change` on the object at the end of the methods that fill it."""
    for name in methods:
        method = getattr(kind, name)
        _REPLACED.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, _follow(method, change))


def _exchange(kind: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by one that `make` makes of it."""
    method = getattr(kind, name)
    _REPLACED.append((kind, name, vars(kind).get(name)))
    setattr(kind, name, make(method))


def _follow(method: Callable[..., None], change: Callable[[Any], object]) -> Callable[..., None]:
    @functools.wraps(method)
    def extended(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        change(self)

    return extended


def make_inference(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a replacement of `BasicGNN.inference`; cases that ours does not support go to `original`."""

    @wraps(original)
    def inference(model: Any, loader: Any, device: Any = None, embedding_device: Any = "cpu",
                  progress_bar: bool = False, cache: bool = False) -> Tensor:  # fmt: skip
        if not _is_ours(model, loader, device):
            return original(model, loader, device, embedding_device, progress_bar, cache)
        note_made("model.inference")
        return infer(model, loader, progress_bar=progress_bar).to(embedding_device)

    return inference


def _samples_on_gpu(*args: Any, **kwargs: Any) -> bool:
    """Report whether the edges of a call lie on a GPU."""
    edge_index = args[0] if args else kwargs.get("edge_index")
    return isinstance(edge_index, Tensor) and edge_index.is_cuda and is_ordinary()


def _count_calls(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        note_made(name)
        return ours(*args, **kwargs)

    return counted


def _is_ours(model: Any, loader: Any, device: Any) -> bool:
    if not isinstance(loader, NeighborLoader) or model.training or model.jk_mode not in (None, "last"):
        return False
    places = {parameter.device for parameter in model.parameters()}
    places |= set() if device is None else {torch.empty(0, device=device).device}
    transform = loader.transform
    is_bare = transform is None or (isinstance(transform, partial) and transform.func is show_batch
                                    and transform.args == (None,))  # fmt: skip
    if places - {loader.device} or not is_bare or not isinstance(getattr(loader.data, "x", None), Tensor):
        return False
    try:
        check_inference_loader(loader)
    except ArgumentError:
        return False
    return True


class Replacement(NamedTuple):
    """A class of PyG and its replacement."""

    original: type
    ours: type

    @property
    def path(self) -> str:
        """The name in import statements, such as `loader.NeighborLoader`."""
        return f"{self.original.__module__.split('.')[1]}.{self.original.__name__}"


REPLACEMENTS = (
    *(Replacement(getattr(pyg_loader, name), getattr(loader, name))
      for name in ("NeighborLoader", "LinkNeighborLoader", "NodeLoader", "LinkLoader", "NeighborSampler", "HGTLoader",
                   "ShaDowKHopSampler", "DataLoader", "DataListLoader", "DenseDataLoader", "PrefetchLoader",
                   "CachedLoader", "ClusterData", "ClusterLoader", "RandomNodeLoader", "GraphSAINTSampler",
                   "GraphSAINTNodeSampler", "GraphSAINTEdgeSampler", "GraphSAINTRandomWalkSampler",
                   "TemporalDataLoader")),
    *(Replacement(getattr(pyg_sampler, name), getattr(sampler, name)) for name in ("NeighborSampler", "HGTSampler")),
    *(Replacement(getattr(pyg_models, name), getattr(walk_models, name)) for name in ("Node2Vec", "MetaPath2Vec")),
    *(Replacement(getattr(pyg_tgn, name), getattr(tgn, name)) for name in ("LastNeighborLoader", "TGNMemory")),
)  # fmt: skip

# Functions of PyG that loop on the host, and ours for edges on a GPU.
_FUNCTIONS = (
    (negative_sampling, sample_negative_edges),
    (batched_negative_sampling, sample_batched_negative_edges),
)
# Replaced attributes: (object, name of the attribute, its value before).
_BOUND: list[tuple[Any, str, Any]] = []


def install(*, device: Device = None, placement: str = "auto", feature_cache: int | str | None = None,
            seed: int | None = None, accelerate: bool = True, replay: bool | None = None, verbose: bool = False
            ) -> None:  # fmt: skip
    """Make PyG's loader classes create our loaders, and accelerate models that are made, loaded or copied from now on.

    The classes keep PyG's names, arguments and form of batches, in every module that imported them. `n_id`, `e_id`,
    `input_id` and the fields of seed links are on the host, as in PyG, copied there at the first read. All other
    tensors of a batch are on `device`. PyG's `model.inference(loader)` calls `infer`. `negative_sampling` and
    `batched_negative_sampling` of `torch_geometric.utils` draw edges of a GPU there, from torch's generator.

    Options that ours does not support, and the program's own subclasses of PyG's classes, are left to PyG. Subclasses
    of PyG's `NodeLoader` and `LinkLoader` get our samplers, and our loaders gather the rows of their batches.

    The logger `pyg_direct` reports in one line that PyG's classes are replaced. It also names each class that is left
    to PyG, once, with the reason, when the program makes an object of it. This includes classes that are not replaced,
    such as `BidirectionalNeighborSampler`. A second call changes the arguments.

    Args:
        device: Device that samples and holds the batches; None is the current GPU if there is one, otherwise the CPU;
            `"data"` is the device of each loader's data.
        placement: See `NeighborLoader`.
        feature_cache: See `NeighborLoader`.
        seed: See `NeighborLoader`.
        accelerate: Accelerate PyG's convolutions at their creation; see `accelerate`. Also let torch's `Adam` and
            `AdamW` take fused steps for parameters on a GPU, unless the program chooses `foreach` or `fused`.
        replay: Replay the passes of models on a GPU, as `accelerate(model, replay="auto")`; None does so if there is a
            GPU. A model is the outermost module that the program calls, and that holds an accelerated convolution.
        verbose: Report every replaced name, and every kind of loader that is made.

    Raises:
        ArgumentError, ArgumentTypeError: `placement`, `feature_cache` or `seed` is a value that no loader takes.
        DeviceError: `device` is a GPU that does not exist.

    Example:
        >>> import torch_geometric.loader
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> install(device="cpu")
        >>> type(torch_geometric.loader.NeighborLoader(ring, [-1])).__module__
        'pyg_direct.loader.neighbor_loader'
        >>> uninstall()
    """
    check_choice("placement", placement, AUTO_PLACEMENTS)
    check_size(0 if feature_cache is None else feature_cache, "feature_cache")
    check_seed(seed)
    accelerate, replay = check_flag("accelerate", accelerate), None if replay is None else check_flag("replay", replay)
    verbose = check_flag("verbose", verbose)
    if device is not None and device != "data":
        place = resolve_device(device)
        # Without an index it is the current GPU at the creation of a loader, which differs between processes.
        device = device if str(device) == place.type else place
    start(device=device, placement=placement, feature_cache=feature_cache, seed=seed, accelerate=accelerate,
          replay=replay, verbose=verbose)  # fmt: skip
    models = "models are accelerated" if accelerate else "models are left as they are"
    announce(f"{len(REPLACEMENTS)} loaders and samplers of PyG are replaced by ours; {models}")
    if verbose:
        names = ", ".join(entry.path for entry in REPLACEMENTS)
        left = ", ".join(name for names in LEFT.values() for name in names)
        functions = ", ".join(f"utils.{function.__name__}" for function, _ in _FUNCTIONS)
        announce(f"replaced: {names}, {functions} on a GPU, and model.inference")
        announce(f"left to PyG: {left}")


def start(*, accelerate: bool = True, replay: bool | None = None, verbose: bool = False, **options: Any) -> None:
    """Install without checks and without a report, as in a process that another one has started.

    Args:
        accelerate, replay, verbose: See `install`.
    """
    uninstall()
    for original, ours in REPLACEMENTS:
        replace(original, StandIn(ours, options, verbose))
        if issubclass(ours, walk_models.WalkModel):
            _extend(original, partial(_take_over, original, ours, options), ("__setstate__",))
    for function, own in _FUNCTIONS:
        replace_function(function, _count_calls(function.__name__, own), _samples_on_gpu)
    filters = Filters(options)
    for kind in (pyg_loader.NodeLoader, pyg_loader.LinkLoader):
        replace_function(kind.filter_fn, filters.filter, filters.serves)
    watch_left()
    inference = BasicGNN.inference
    _BOUND.append((BasicGNN, "inference", inference))
    BasicGNN.inference = make_inference(inference)
    if accelerate:
        accelerate_what_is_made(replay=replays_by_default() if replay is None else replay)
        for optimizer in FUSED:
            _extend(optimizer, fuse_steps, ("__init__",))
            hook_steps(optimizer)
            _exchange(optimizer, "step", make_step)
        _exchange(torch.optim.Optimizer, "zero_grad", make_zero_grad)


def hand_down(**options: Any) -> None:
    """Make PyG's classes create ours in Python processes that this one starts from now on, as soon as they import PyG.

    They find `startup/sitecustomize.py` through environment variables, and so do their own child processes.

    Args:
        options: Arguments of `start` that JSON can represent.
    """
    os.environ[_HANDED] = json.dumps({"prefix": sys.prefix, "options": options})
    os.environ.update(_with_startup(os.environ))
    follow_processes()


def follow_processes() -> None:
    """Give the environment of `hand_down` to processes that are started with another one, and note that there are some.

    A program may set `PYTHONPATH`, or start a process with an environment of its own. If this environment has an empty
    `PYG_DIRECT_RUN`, the process is left to PyG.
    """
    begin, handed = subprocess.Popen.__init__, os.environ[_HANDED]
    if hasattr(begin, "__wrapped__"):
        return
    signature = inspect.signature(begin)

    @wraps(begin)
    def begin_with_startup(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        env = given.arguments.get("env")
        found = _with_startup(os.environ if env is None else env, handed)
        if env is not None or found != dict(os.environ):
            given.arguments["env"] = found
        begin(*given.args, **given.kwargs)
        if _is_python(given.arguments["args"]):
            note_process()

    subprocess.Popen.__init__ = begin_with_startup  # type: ignore[method-assign]
    for module, names in ((spawning, ("spawnv_passfds",)), (os, _INHERITING)):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, _inherit_startup(getattr(module, name), handed))
    for name in _GIVING:
        if hasattr(os, name):
            setattr(os, name, _give_startup(getattr(os, name), handed))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_parent=note_process)


def _inherit_startup(start: Callable[..., Any], handed: str) -> Callable[..., Any]:
    """Wrap a function that starts a process with the environment of this one."""

    @wraps(start)
    def start_with_startup(*args: Any, **kwargs: Any) -> Any:
        before = os.environ.get("PYTHONPATH")
        os.environ.update(_with_startup(os.environ, handed))
        try:
            return start(*args, **kwargs)
        finally:
            if before is None:
                os.environ.pop("PYTHONPATH", None)
            else:
                os.environ["PYTHONPATH"] = before
            if "python" in repr(args) and "resource_tracker" not in repr(args):
                note_process()

    return start_with_startup


def _give_startup(start: Callable[..., Any], handed: str) -> Callable[..., Any]:
    """Wrap a function that starts a process with an environment of its own, its third argument."""

    @wraps(start)
    def start_with_startup(path: Any, args: Any, env: Any, *more: Any, **kwargs: Any) -> Any:
        found = _with_startup(os.environ if env is None else env, handed)
        return start(path, args, found, *more, **kwargs)

    return start_with_startup


def _with_startup(env: Mapping[Any, Any], handed: str | None = None) -> dict[str, str]:
    """Return an environment with the folder of our start-up file first in `PYTHONPATH`, and with the options."""
    found = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    if found.setdefault(_HANDED, handed or ""):
        folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
        paths = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", folder)]
        found["PYTHONPATH"] = os.pathsep.join([folder, *paths])
    return found


def _is_python(args: Any) -> bool:
    """Report whether a command starts a Python process, as far as its first word says."""
    words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
    return bool(words) and "python" in os.path.basename(os.fsdecode(words[0]))


def uninstall() -> None:
    """Make PyG's classes create PyG's objects again; loaders and models that exist do not change.

    Example:
        >>> import torch_geometric.loader
        >>> install(device="cpu")
        >>> uninstall()
        >>> type(torch_geometric.loader.RandomNodeLoader(Data(num_nodes=4), num_parts=2)).__module__
        'torch_geometric.loader.random_node_loader'
    """
    leave_what_is_made()
    forget_left()
    give_back()
    while _BOUND:
        setattr(*_BOUND.pop())
