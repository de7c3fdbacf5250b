"""Numba for CPU loops and numba-cuda for GPU grids; no other module imports them.

`compiler/nvrtc.py` does the work for `cuda_src/`. Nothing is imported or compiled before it is first needed. `cuda`
and `prange` are stand-ins, which `_bind` replaces by the real ones in the globals of the functions that use them.
Further stand-ins (`Deferred`) hold the place of compilers' objects in the globals of kernels until these are
compiled.

A GPU kernel is declared (`Declaration`) by its parameters, given as dtype codes, and by its foreseen
specialisations.

`lower_once` and `compile_steps_once` do once what a compiler repeats for every architecture or every call. They
replace the compilers' own functions while a kernel is compiled (`replaced`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from pyg_direct.cache_folder import hold
from pyg_direct.compiler import openmp
from pyg_direct.compiler.code_cache import (
    COMPILER,
    cache_folder,
    find_shipped,
    find_unwritable,
    place_source,
    read_or_make,
)
from pyg_direct.compiler.link_once import linked_once, readable_is_enough, replaced
from pyg_direct.compiler.nvrtc import compile_source, link_pieces, nearest_target, stamp_version
from pyg_direct.errors import ArgumentError, needs_extra
from pyg_direct.progress import announce, show_wait


@dataclass(frozen=True)
class Parameter:
    """One parameter of a GPU kernel: a scalar code such as `i8`, or a 1-D array of it (`is_array`)."""

    code: str
    is_array: bool


@dataclass(frozen=True)
class GpuCode:
    """PTX of one specialisation of a kernel, with the C++ functions it calls already inside."""

    ptx: str

    @property
    def entry(self) -> str:
        """Name of the kernel in its PTX."""
        return self.ptx.split(".entry", 1)[1].split("(", 1)[0].strip()


class Declaration:
    """Name and parameters of a GPU kernel.

    The signature lists parameters by code: `i8` is an int64 scalar, `i8[]` a contiguous 1-D int64 array; a
    capital letter (`I[]`) is a dtype that differs between specialisations, each listed in `variants`.
    """

    def __init__(self, name: str, signature: str, variants: Mapping[str, Sequence[str]]) -> None:
        self.name = name
        self.signature = signature.split()
        self.variants = {letter: tuple(codes) for letter, codes in variants.items()}

    def specialisations(self) -> Iterator[dict[str, str]]:
        """All declared choices of a dtype for each letter."""
        chosen: list[dict[str, str]] = [{}]
        for letter, codes in self.variants.items():
            chosen = [{**c, letter: code} for c in chosen for code in codes]
        return iter(chosen)

    def parameters(self, choice: Mapping[str, str]) -> list[Parameter]:
        """Parameters with every letter replaced by its chosen code."""
        tokens = [(t.removesuffix("[]"), t.endswith("[]")) for t in self.signature]
        return [Parameter(choice.get(code, code), is_array) for code, is_array in tokens]

    def choose(self, dtypes: Sequence[str]) -> dict[str, str]:
        """Choose the specialisation for the dtype codes of actual arguments, in order."""
        choice: dict[str, str] = {}
        for token, code in zip(self.signature, dtypes, strict=True):
            letter = token.removesuffix("[]")
            if letter in self.variants:
                first = choice.setdefault(letter, code)
                assert first == code, f"{self.name}: {letter} is {first} and {code}"
                assert code in self.variants[letter], f"{self.name}: {letter} has no variant {code}"
        return choice

    def file_name(self, target: tuple[int, int], choice: Mapping[str, str]) -> str:
        """Name of the file that holds the PTX of a specialisation for an architecture."""
        choices = (f"{letter}{code}" for letter, code in sorted(choice.items()))
        return "-".join([self.name, *choices, "sm{}{}".format(*target)]) + ".ptx"


# Code of scalar steps by architecture, function, types of its arguments and name.
_STEPS: dict[tuple[Any, ...], Any] = {}


def lower_once(lower: Callable[..., Any], target: tuple[int, int]) -> Callable[..., Any]:
    """numba-cuda's typing and lowering of a kernel, done for `target` and given for every architecture in a row.

    The input of NVVM is the same for all supported architectures, except for the architecture in mangled names.
    """
    # The last kernel alone, whose code takes much memory.
    kept = functools.lru_cache(maxsize=1)(functools.partial(lower, cc=target))
    return lambda *args, cc, **options: kept(*args, **options)


def compile_steps_once(compile: Callable[..., Any], target: tuple[int, int]) -> Callable[..., Any]:
    """Let numba-cuda-mlir's `compile` make code of a scalar step once, and no further than a kernel takes it in.

    Otherwise it makes machine code of the step, and of all steps that it calls, for every call.
    """

    def compile_once(dispatcher: Any, sig: Any, abi_info: Any = None, output: Any = None) -> Any:
        if not (abi_info and dispatcher.targetoptions.get("device")):
            return compile(dispatcher, sig, abi_info=abi_info, output=output)
        key = target, dispatcher.py_func, tuple(sig), abi_info["abi_name"]
        if key not in _STEPS:
            _STEPS[key] = dispatcher._compile_device_callee(sig, abi_name=abi_info["abi_name"])
        return _STEPS[key]

    return compile_once


class Deferred:
    """Stand-in for a compiler's object in a kernel's globals until that kernel is compiled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, bound when a kernel is compiled>"


class DeviceFunction(Deferred):
    """A C++ function of `cuda_src/`, declared to numba-cuda when a kernel that calls it is compiled."""

    def __init__(self, name: str, signature: str) -> None:
        super().__init__(name)
        self.signature = signature


class SystemFunction(Deferred):
    """A function of the system's C library, found by its name when a loop that calls it is compiled or read."""

    def __init__(self, name: str, signature: str) -> None:
        super().__init__(name)
        self.signature = signature


# Kernels of the package, whose compiled code is kept by name.
_PACKAGE = f"{__name__.partition('.')[0]}.kernels."
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"
# The simulator starts one Python thread per CUDA thread.
THREADS = 8 if SIMULATED else 256

_LOCK = threading.RLock()
# A child has none of the threads that held it when it was forked.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.RLock()))
# Of each thread: `is_alone`, True if its loops run on it alone.
_OWN = threading.local()
_LOGGER = logging.getLogger(__name__)
# Numbers of the compilations of this process.
_NUMBERS = itertools.count(1)
# The folder that was announced as one where nothing is kept.
_UNKEPT: list[Path] = []
_FUNCTIONS: list[Callable[..., Any]] = []
# Scalar steps, and the functions that made them known to a compiler so far.
_BODIES: dict[Callable[..., Any], set[Callable[..., Any]]] = {}
# Copies of them that no compiler knows yet, for loops of the CPU alone.
_INLINED: list[Callable[..., Any]] = []

cuda: Any = Deferred("cuda")
prange: Any = Deferred("prange")
# See `make_intrinsics`.
prefetch: Any = Deferred("prefetch")
view_words: Any = Deferred("view_words")


class _SimulatedCuda:
    """`cuda` inside simulated kernels and the bodies they call: forwards to the grid that is running now."""

    def __init__(self) -> None:
        from numba.cuda.simulator import kernel

        self._running = kernel._get_kernel_context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._running(), name)


def device_function(name: str, signature: str) -> Any:
    """Declare a function of `cuda_src/`, for use in GPU kernels; `signature` lists its scalar parameters by code.

    The C++ side follows Numba's calling convention: `extern "C" __device__ int name(int *result, ...)` returns 0.
    """
    return DeviceFunction(name, signature)


def system_function(name: str, signature: str) -> Any:
    """Declare a function of the system's C library, for use in CPU loops.

    `signature` lists the codes of its result and of its parameters; an address is `i8`.
    """
    return SystemFunction(name, signature)


class _GpuCompiler(NamedTuple):
    """Parts of numba-cuda, or of the successor that takes the same kernels, that kernels and their compilation need."""

    cuda: Any
    types: Any
    register_jitable: Callable[..., Any]


@functools.cache
def _gpu_compiler() -> _GpuCompiler:
    if COMPILER == "mlir":
        from numba_cuda_mlir import cuda as mlir_cuda, extending, types as mlir_types

        register = functools.partial(extending.register_jitable, typing_registry=extending.typing_registry)
        return _GpuCompiler(mlir_cuda, mlir_types, register)
    if COMPILER not in ("", "numba"):
        raise ArgumentError(f"PYG_DIRECT_COMPILER must be numba or mlir, got {COMPILER!r}")
    # Numba may have a `cuda` of its own, which is not this compiler.
    with needs_extra("the compiler of GPU kernels, which an installation without compiled ones calls,", "compile13",
                     "compile12"):  # fmt: skip
        import numba_cuda  # noqa: F401
    from numba import cuda, types
    from numba.extending import register_jitable

    return _GpuCompiler(cuda, types, register_jitable)


def _bind(on_gpu: bool) -> None:
    """Put the real compilers' objects into the globals of every function decorated so far."""
    import numba
    from numba.extending import register_jitable

    real: dict[str, Any] = {"prange": numba.prange, **make_intrinsics()}
    registers = {register_jitable}
    if on_gpu:
        real["cuda"] = _SimulatedCuda() if SIMULATED else _gpu_compiler().cuda
        registers.add(_gpu_compiler().register_jitable)
    # Functions of a file share them.
    for names in {id(fn.__globals__): fn.__globals__ for fn in _FUNCTIONS}.values():
        for name, value in list(names.items()):
            if isinstance(value, DeviceFunction) and on_gpu and not SIMULATED:
                names[name] = _declare(value)
            elif isinstance(value, SystemFunction):
                result, *parameters = (
                    getattr(numba.types, np.dtype(_SCALARS[c]).name) for c in value.signature.split()
                )
                names[name] = numba.types.ExternalFunction(value.name, result(*parameters))
            elif isinstance(value, Deferred) and value.name in real:
                names[name] = real[value.name]
    for fn, registered in _BODIES.items():
        for register in registers - registered:
            register(fn)
        registered |= registers
    while _INLINED:
        register_jitable(forceinline=True)(_INLINED.pop())


@functools.cache
def _declare(function: DeviceFunction) -> Any:
    signature = _type("i4")(*map(_type, function.signature.split()))
    return _gpu_compiler().cuda.declare_device(function.name, signature)


def _type(code: str, is_array: bool = False) -> Any:
    scalar = getattr(_gpu_compiler().types, np.dtype(_SCALARS[code]).name)
    return scalar[::1] if is_array else scalar


def body(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Declare a scalar step, callable from CPU loops, from GPU grids and from plain Python."""
    _BODIES[fn] = set()
    _FUNCTIONS.append(fn)
    return fn


def inlined(fn: Callable[..., Any], **steps: Callable[..., Any]) -> Callable[..., Any]:
    """Make a copy of a body for CPU loops, with these steps in place of steps of the same names.

    It becomes part of each loop that calls it, however long it is; only such loops take vector instructions.
    """
    copy = FunctionType(fn.__code__, {**fn.__globals__, **steps}, fn.__name__, fn.__defaults__, fn.__closure__)
    _INLINED.append(copy)
    return copy


CPU_KERNELS: list[CpuKernel] = []


class CpuKernel:
    """A loop over arrays, compiled by Numba for this machine when first called and cached on disk."""

    def __init__(self, fn: Callable[..., Any], any_order: bool = False, one_thread: bool = False) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._any_order, self._one_thread = fn, any_order, one_thread
        self._alone: Callable[..., Any] | None = None
        self._parallel: Callable[..., Any] | None = None
        self.title = f"{fn.__module__.removeprefix(_PACKAGE)}.{fn.__name__}"
        _FUNCTIONS.append(fn)
        CPU_KERNELS.append(self)

    def __call__(self, *args: Any) -> Any:
        """Run the loop."""
        if self._one_thread or get_cpu_threads() == 1:
            # No parallel region, which takes 40 us to enter and leave, and any number of callers at a time.
            return (self._alone or self._make(False))(*args)
        # One parallel region at a time: Numba's portable thread pool is not re-entrant, and cores are shared once.
        with _LOCK:
            return (self._parallel or self._make(True))(*args)

    def list_compiled(self) -> list[str]:
        """List the types it has code for by now, as lines of `cpu_loops.txt`."""
        from pyg_direct.compiler.shipped_loops import spell_type

        lines = []
        for threads, made in (("one", self._alone), ("all", self._parallel)):
            for args in [] if made is None else made.overloads:  # type: ignore[attr-defined]
                codes = [spell_type(arg) for arg in args]
                if None not in codes:
                    lines.append(" ".join([self.title, threads, *map(str, codes)]))
        return lines

    def compile(self, threads: str, args: Sequence[Any]) -> bytes:
        """Compile it for Numba's types of arguments, and return the code as Numba keeps it."""
        from numba.core.serialize import dumps

        made: Any = self._make(threads == "all")
        made.compile(tuple(args))
        return bytes(dumps(made._cache._impl.reduce(made.overloads[tuple(args)])))

    def _make(self, parallel: bool) -> Callable[..., Any]:
        """Make Numba's dispatcher, which compiles for types that are new to it, or reads code of another process."""
        import numba

        # Numba's cache does not tell loops for one thread and for several apart.
        folder = cache_folder("cpu" if parallel else "cpu_one_thread")
        # A program that has Numba compile nothing (`NUMBA_DISABLE_JIT`) means functions of its own.
        with _LOCK, replaced(numba.config, "DISABLE_JIT", 0):
            made = self._parallel if parallel else self._alone
            if made is None:
                made = self._declare(parallel, folder)
                self._parallel, self._alone = (made, self._alone) if parallel else (self._parallel, made)
        return made

    def _declare(self, parallel: bool, folder: Path) -> Callable[..., Any]:
        import numba

        from pyg_direct.compiler.shipped_loops import with_shipped

        _choose_threading_layer()
        _bind(on_gpu=False)
        with replaced(numba.config, "CACHE_DIR", str(folder)), readable_is_enough():
            fn = place_source(self._fn, folder)
            made = numba.njit(fn, parallel=parallel, nogil=True, cache=True, error_model="numpy",
                              fastmath={"reassoc", "nsz", "contract"} if self._any_order else False)  # fmt: skip
        if self._fn.__module__.startswith(_PACKAGE):
            made._cache.load_overload = with_shipped(made._cache, self.title, "all" if parallel else "one")
        # Numba calls it if neither disk nor wheel has code for these types.
        make, name = made._compiler.compile, self._fn.__name__

        def compile_loop(*args: Any) -> Any:
            with (
                _compiling(name, "cpu" if parallel else "cpu_one_thread", self._count_later(parallel)),
                linked_once(fn.__qualname__),
            ):
                return make(*args)

        made._compiler.compile = compile_loop
        # Numba calls it for types that are new to this process.
        made.compile = self._compiling_alone(made.compile, folder)
        return made  # type: ignore[no-any-return]

    def _count_later(self, parallel: bool) -> int | None:
        """Estimate how many loops will be compiled after this one, from the small program that is nearest."""
        from pyg_direct.compiler.shipped_loops import foresee_loops

        later = foresee_loops(self.title, {kernel.title for kernel in CPU_KERNELS if kernel._has_code()})
        return None if later is None else sum(not kernel._is_kept(parallel) for kernel in CPU_KERNELS
                                              if kernel.title in later)  # fmt: skip

    def _has_code(self) -> bool:
        return any(made is not None and made.overloads for made in (self._alone, self._parallel))  # type: ignore[attr-defined]

    def _is_kept(self, parallel: bool) -> bool:
        """Report whether the disk or the wheel has code of the loop, for any types."""
        from pyg_direct.compiler.shipped_loops import has_loop

        if has_loop(self.title, "all" if parallel else "one"):
            return True
        made: Any = self._make(parallel)
        return os.path.exists(made._cache._cache_file._index_path)

    def _compiling_alone(self, compile_for: Callable[..., Any], folder: Path) -> Callable[..., Any]:
        """Keep other threads and processes from Numba's index of the loop, which is read, added to and written back."""
        import numba

        def run(*args: Any) -> Any:
            # With its first loop Numba loads modules of some hundred thousand objects. In another thread, the program
            # may disable the collector meanwhile, which the end of a pause would undo.
            is_alone = threading.current_thread() is threading.main_thread()
            with (
                _LOCK,
                hold(folder / self._fn.__name__),
                replaced(numba.config, "DISABLE_JIT", 0),
                pause_collector() if is_alone else contextlib.nullcontext(),
            ):
                try:
                    return compile_for(*args)
                except OSError as error:
                    # Without room on the disk, the loop that has been compiled is not kept there.
                    _announce_unkept(folder, error.strerror or str(error))
                    return compile_for(*args)

        return run


@contextlib.contextmanager
def pause_collector() -> Iterator[None]:
    """Keep Python's cyclic collector from running inside.

    It runs after every few hundred new objects. Now and then it searches all objects, which takes a third of a second
    after the imports of torch and PyG.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cpu_kernel(fn: Callable[..., Any]) -> CpuKernel:
    """Declare a CPU loop over arrays (`prange` runs it on all of Numba's threads)."""
    return CpuKernel(fn)


def cpu_sequence(fn: Callable[..., Any]) -> CpuKernel:
    """Declare a CPU loop whose steps need those before: one thread runs it."""
    return CpuKernel(fn, one_thread=True)


def cpu_reduction(fn: Callable[..., Any]) -> CpuKernel:
    """Declare a CPU loop whose sums are added up in the order of vector instructions, which differs by processor."""
    return CpuKernel(fn, any_order=True)


@contextlib.contextmanager
def _compiling(name: str, kind: str, later: int | None = None) -> Iterator[None]:
    """Report a compilation, which takes long; reads of compiled code from the disk are not reported.

    Args:
        later: Estimated number of compilations after it; None if it is not known.
    """
    begin, unwritable = time.perf_counter(), find_unwritable(kind)
    if unwritable is not None:
        _announce_unkept(unwritable, "no right to write there")
    number = next(_NUMBERS)
    # A program may call loops that no small program calls together.
    count = f"number {number}" if later is None else f"{number} of about {number + later}"
    with show_wait("compiling kernels" + (", once for this machine" if unwritable is None else ""),
                   f": {count}, {name}"):  # fmt: skip
        yield
    _LOGGER.info("compiled %s in %.1f s", name, time.perf_counter() - begin)


def _announce_unkept(folder: Path, why: str) -> None:
    """Say once that each process compiles again."""
    if _UNKEPT:
        return
    _UNKEPT.append(folder)
    announce(f"compiled kernels cannot be kept: {folder} ({why}); set PYG_DIRECT_CACHE to a folder that can be written")


@functools.cache
def _choose_threading_layer() -> None:
    """Take OpenMP, whose threads wait for the next loop awake, unless the user chose a layer.

    If Numba's OpenMP cannot be loaded, the best other layer is taken. This must run before Numba starts its threads;
    it runs once, as each loop asks for it.
    """
    import numba

    if "NUMBA_THREADING_LAYER" not in os.environ and numba.config.THREADING_LAYER == "default":
        numba.config.THREADING_LAYER = "omp" if openmp.load() else "forksafe"


def set_cpu_threads(count: int) -> int:
    """Use `count` threads in CPU kernels that the calling thread runs, and return the number used before.

    Threads of the caller's that take 1 each run kernels at the same time. A process forked from one that has used
    threads keeps to 1, if they are GNU OpenMP's.
    """
    import numba

    before = _count_threads()
    if not openmp.is_orphaned():
        numba.set_num_threads(max(1, min(count, numba.config.NUMBA_NUM_THREADS)))
    return before


def get_cpu_threads() -> int:
    """Number of threads a CPU kernel uses."""
    return 1 if getattr(_OWN, "is_alone", False) else _count_threads()


def run_alone(is_alone: bool) -> bool:
    """Let CPU kernels of the calling thread run on it alone or not, despite `set_cpu_threads`; return the last setting.

    Numba's own number is read and set under locks, which takes longer than many a small loop.
    """
    before = getattr(_OWN, "is_alone", False)
    _OWN.is_alone = is_alone
    return before


def _count_threads() -> int:
    import numba

    if openmp.is_orphaned():
        return 1
    _choose_threading_layer()
    return int(numba.get_num_threads())


_SCALARS = {"i1": np.int8, "u1": np.uint8, "i2": np.int16, "u2": np.uint16, "i4": np.int32, "u4": np.uint32,
            "i8": np.int64, "u8": np.uint64, "f4": np.float32, "f8": np.float64}  # fmt: skip


class GpuKernel(Declaration):
    """A grid over arrays, compiled for an explicit signature; see `Declaration` for how it is written."""

    def __init__(self, fn: Callable[..., Any], signature: str, variants: dict[str, Sequence[str]],
                 sources: Sequence[str], resident_blocks: int | None, threads: int | None, shared_bytes: int
                 ) -> None:  # fmt: skip
        super().__init__(fn.__name__, signature, variants)
        self.__doc__ = fn.__doc__
        self.fn = fn
        self.sources = tuple(sources)
        self.threads = THREADS if threads is None else threads
        self.launch_bounds = None if resident_blocks is None else (self.threads, resident_blocks)
        self.shared_bytes = shared_bytes
        _FUNCTIONS.append(fn)
        GPU_KERNELS.append(self)

    def compile(self, compute_capability: tuple[int, int], choice: dict[str, str]) -> GpuCode:
        """PTX that a compute capability runs: from the wheel, from the disk cache, or compiled now. Needs no GPU."""
        target = nearest_target(compute_capability)
        if not self.fn.__module__.startswith(_PACKAGE):
            # Kept code is found by the sources of the package, and by name.
            return GpuCode(stamp_version(self.compile_ptx(target, choice), target))
        name = self.file_name(target, choice)
        ptx = find_shipped(name)
        if ptx is None:
            make = _compiling(self.fn.__name__, "gpu")(self.compile_ptx)
            ptx = read_or_make(cache_folder("gpu") / name, lambda: stamp_version(make(target, choice), target))
        return GpuCode(ptx)

    def compile_all(self, targets: Sequence[tuple[int, int]], choice: dict[str, str]) -> list[GpuCode]:
        """`compile` for several architectures, for which a kernel is typed and lowered once."""
        with _LOCK, _lower_once(targets[0]):
            return [self.compile(target, choice) for target in targets]

    def compile_ptx(self, compute_capability: tuple[int, int], choice: dict[str, str]) -> str:
        """PTX as the compiler makes it."""
        assert not SIMULATED, "the simulator has no code generator"
        with _LOCK, _pretend_device(compute_capability):
            compiler = _gpu_compiler()
            _bind(on_gpu=True)
            args = [_type(p.code, p.is_array) for p in self.parameters(choice)]
            # With C++ functions, both sides meet before code is generated, so that no call is left in a hot loop.
            code, _ = compiler.cuda.compile(self.fn, compiler.types.void(*args), device=False, abi="numba",
                                            cc=compute_capability, output="ltoir" if self.sources else "ptx",
                                            launch_bounds=self.launch_bounds)  # fmt: skip
        if not self.sources:
            return str(code)
        pieces = [compile_source(name, compute_capability) for name in self.sources]
        return link_pieces([code, *pieces], compute_capability)

    def simulate(self, grid: int, block: int, args: Sequence[Any]) -> None:
        """Run on the CPU through numba-cuda's simulator; array arguments are NumPy arrays."""
        from numba import cuda as numba_cuda

        _bind(on_gpu=True)
        typed = [a if isinstance(a, np.ndarray) else _SCALARS[p.code](a)
                 for a, p in zip(args, self.parameters(next(self.specialisations())), strict=True)]  # fmt: skip
        with np.errstate(over="ignore"):
            numba_cuda.jit(self.fn)[grid, block](*typed)


GPU_KERNELS: list[GpuKernel] = []


def gpu_kernel(signature: str, *, sources: Sequence[str] = (), resident_blocks: int | None = None,
               threads: int | None = None, shared_bytes: int = 0, **variants: Sequence[str]
               ) -> Callable[[Callable[..., Any]], GpuKernel]:  # fmt: skip
    """Declare a GPU grid; see `GpuKernel` for the signature.

    `sources` names the files of `cuda_src/` it calls; `resident_blocks` makes the compiler keep to as few registers
    as let that many blocks run on a multiprocessor at once; `threads` is the size of its blocks if not `THREADS`.
    `shared_bytes` is the memory of a multiprocessor that stays shared while the kernel runs, so that the rest is cache;
    the driver would choose as much as lets the most blocks run. Kernels that differ in it do not run side by side.
    """
    return lambda fn: GpuKernel(fn, signature, variants, sources, resident_blocks, threads, shared_bytes)


@contextlib.contextmanager
def _pretend_device(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Let the compiler take this capability for the capability of a device, with or without a driver."""
    if COMPILER == "mlir":
        from numba_cuda_mlir import tools
        from numba_cuda_mlir.descriptor import MLIRDispatcher
        from numba_cuda_mlir.numba_cuda.cudadrv.driver import _Linker

        compile_once = compile_steps_once(MLIRDispatcher.compile, compute_capability)
        # The driver makes machine code of the PTX: that of the compiler takes half of the time, and nobody reads it.
        no_code = SimpleNamespace(code=b"")
        with (
            replaced(tools, "_cached_cc", compute_capability),
            replaced(MLIRDispatcher, "compile", compile_once),
            replaced(_Linker, "complete", lambda linker: no_code),
        ):
            yield
    else:
        import numba.cuda.dispatcher as asked

        device = SimpleNamespace(compute_capability=compute_capability)
        with replaced(asked, "get_current_device", lambda: device):
            yield


def _lower_once(target: tuple[int, int]) -> contextlib.AbstractContextManager[None]:
    """Let a kernel that is compiled for several architectures be typed and lowered for this one alone."""
    if COMPILER == "mlir":
        return contextlib.nullcontext()
    import numba.cuda.compiler as asked

    name = "_compile_pyfunc_with_fixup"
    return replaced(asked, name, lower_once(getattr(asked, name), target))


@functools.cache
def make_intrinsics() -> dict[str, Callable[..., Any]]:
    """Make the intrinsics, by name.

    `prefetch(address)` asks for the cache line of an address. It never fails, whatever the address is.
    `view_words(address, count)` is the array of int64 there, which must be valid.
    """
    from llvmlite import ir
    from numba import carray
    from numba.core import cgutils, types
    from numba.extending import intrinsic, register_jitable

    byte, half, word = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64).as_pointer()

    @intrinsic  # type: ignore[untyped-decorator]
    def prefetch(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [byte, half, half, half])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            # A read of data that is soon read again.
            builder.call(function, [builder.inttoptr(args[0], byte), half(0), half(3), half(1)])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def as_pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], word)

        return types.CPointer(types.int64)(types.int64), generate  # type: ignore[attr-defined]

    @register_jitable  # type: ignore[untyped-decorator]
    def view_words(address: Any, count: Any) -> Any:
        return carray(as_pointer(address), count)

    return {"prefetch": prefetch, "view_words": view_words}
