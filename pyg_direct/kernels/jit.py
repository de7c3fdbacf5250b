"""The one door to the compilers: Numba for CPU loops, numba-cuda for GPU grids, NVRTC for `cuda_src/`.

No other file imports a compiler. Nothing is imported or compiled before it is first needed: `cuda` and `prange`
are stand-ins that `_bind` replaces by the real ones in the globals of the functions that use them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import threading
import types as pytypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"
# The simulator starts one Python thread per CUDA thread.
THREADS = 8 if SIMULATED else 256

_LOCK = threading.RLock()
_FUNCTIONS: list[Callable[..., Any]] = []


class _Deferred:
    """Stands for a compiler's object in a kernel's globals until that kernel is compiled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, bound when a kernel is compiled>"


cuda: Any = _Deferred("cuda")
prange: Any = _Deferred("prange")


class _SimulatedCuda:
    """`cuda` inside simulated kernels and the bodies they call: forwards to the grid that is running now."""

    def __getattr__(self, name: str) -> Any:
        from numba.cuda.simulator import kernel

        return getattr(kernel._get_kernel_context(), name)


class _DeviceFunction(_Deferred):
    """A C++ function of `cuda_src/`, declared to numba-cuda when a kernel that calls it is compiled."""

    def __init__(self, name: str, signature: str) -> None:
        super().__init__(name)
        self.signature = signature


def device_function(name: str, signature: str) -> Any:
    """A function defined in `cuda_src/`, for use in GPU kernels; `signature` lists its scalar parameters by code.

    The C++ side follows Numba's calling convention: `extern "C" __device__ int name(int *unused, ...)`.
    """
    return _DeviceFunction(name, signature)


def _bind(on_gpu: bool) -> None:
    """Put the real compilers' objects into the globals of every function decorated so far."""
    import numba
    from numba.extending import register_jitable

    real: dict[str, Any] = {"prange": numba.prange}
    if on_gpu:
        from numba import cuda as numba_cuda

        real["cuda"] = _SimulatedCuda() if SIMULATED else numba_cuda
    for fn in _FUNCTIONS:
        for name, value in list(fn.__globals__.items()):
            if isinstance(value, _DeviceFunction) and on_gpu and not SIMULATED:
                fn.__globals__[name] = _declare(value)
            elif isinstance(value, _Deferred) and value.name in real:
                fn.__globals__[name] = real[value.name]
        if fn.__dict__.pop("_is_unregistered_body", False):
            register_jitable(fn)


@functools.cache
def _declare(function: _DeviceFunction) -> Any:
    from numba import cuda as numba_cuda

    return numba_cuda.declare_device(function.name, _types("i4")(*map(_types, function.signature.split())))


def _types(code: str, is_array: bool = False) -> Any:
    from numba import types

    scalar = getattr(types, np.dtype(_SCALARS[code]).name)
    return scalar[::1] if is_array else scalar


def body(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar step, callable from CPU loops, from GPU grids and from plain Python."""
    fn.__dict__["_is_unregistered_body"] = True
    _FUNCTIONS.append(fn)
    return fn


class CpuKernel:
    """A loop over arrays, compiled by Numba for this machine when first called and cached on disk."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._compiled: dict[bool, Any] = {}
        _FUNCTIONS.append(fn)

    def __call__(self, *args: Any) -> Any:
        if get_cpu_threads() == 1:
            # No parallel region, which takes 40 us to enter and leave, and any number of callers at a time.
            return self._get(False)(*args)
        # One parallel region at a time: Numba's portable thread pool is not re-entrant.
        with _LOCK:
            return self._get(True)(*args)

    def _get(self, parallel: bool) -> Any:
        if parallel not in self._compiled:
            with _LOCK:
                if parallel not in self._compiled:
                    self._compiled[parallel] = self._compile(parallel)
        return self._compiled[parallel]

    def _compile(self, parallel: bool) -> Callable[..., Any]:
        import numba

        _choose_threading_layer()
        _bind(on_gpu=False)
        # Numba's cache does not tell the two apart.
        folder = cache_folder("cpu" if parallel else "cpu_one_thread")
        previous, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            return numba.njit(self._fn, parallel=parallel, nogil=True, cache=True, error_model="numpy")
        finally:
            numba.config.CACHE_DIR = previous


def cpu_kernel(fn: Callable[..., Any]) -> CpuKernel:
    """Declare a CPU loop over arrays (`prange` runs it on all of Numba's threads)."""
    return CpuKernel(fn)


def _choose_threading_layer() -> None:
    """Take a layer that survives forking, unless the user chose one: GNU OpenMP aborts in forked children, which
    PyTorch's DataLoader makes. Must run before Numba starts its threads.
    """
    import numba

    if "NUMBA_THREADING_LAYER" not in os.environ and numba.config.THREADING_LAYER == "default":
        numba.config.THREADING_LAYER = "forksafe"


def set_cpu_threads(count: int) -> int:
    """Use `count` threads in CPU kernels that the calling thread runs; returns the number used before.

    Threads of the caller's that take 1 each run kernels at the same time.
    """
    import numba

    _choose_threading_layer()
    before = int(numba.get_num_threads())
    numba.set_num_threads(max(1, min(count, numba.config.NUMBA_NUM_THREADS)))
    return before


def get_cpu_threads() -> int:
    """Number of threads a CPU kernel uses."""
    import numba

    _choose_threading_layer()
    return int(numba.get_num_threads())


_SCALARS = {"i1": np.int8, "u1": np.uint8, "i2": np.int16, "u2": np.uint16, "i4": np.int32, "u4": np.uint32,
            "i8": np.int64, "u8": np.uint64, "f4": np.float32, "f8": np.float64}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One parameter of a GPU kernel: a scalar code such as `i8`, or a 1-D array of it (`is_array`)."""

    code: str
    is_array: bool


@dataclass(frozen=True)
class GpuCode:
    """PTX of one specialisation of a kernel, with the C++ functions it calls already inside."""

    entry: str
    ptx: str


class GpuKernel:
    """A grid over arrays, compiled by numba-cuda for an explicit signature.

    The signature lists parameters by code: `i8` is an int64 scalar, `i8[]` a contiguous 1-D int64 array; a
    capital letter (`I[]`) is a dtype that differs between specialisations, each listed in `variants`.
    """

    def __init__(self, fn: Callable[..., Any], signature: str, variants: dict[str, Sequence[str]],
                 sources: Sequence[str], resident_blocks: int | None) -> None:  # fmt: skip
        self.__doc__ = fn.__doc__
        self.fn = fn
        self.name = fn.__name__
        self.signature = signature.split()
        self.variants = {letter: tuple(codes) for letter, codes in variants.items()}
        self.sources = tuple(sources)
        self.launch_bounds = None if resident_blocks is None else (THREADS, resident_blocks)
        _FUNCTIONS.append(fn)
        GPU_KERNELS.append(self)

    def specialisations(self) -> Iterator[dict[str, str]]:
        """All declared choices of a dtype for each letter."""
        chosen: list[dict[str, str]] = [{}]
        for letter, codes in self.variants.items():
            chosen = [{**c, letter: code} for c in chosen for code in codes]
        return iter(chosen)

    def parameters(self, choice: dict[str, str]) -> list[Parameter]:
        """Parameters with every letter replaced by its chosen code."""
        tokens = [(t.removesuffix("[]"), t.endswith("[]")) for t in self.signature]
        return [Parameter(choice.get(code, code), is_array) for code, is_array in tokens]

    def choose(self, dtypes: Sequence[str]) -> dict[str, str]:
        """The specialisation for the dtype codes of actual arguments, in order."""
        choice: dict[str, str] = {}
        for token, code in zip(self.signature, dtypes, strict=True):
            letter = token.removesuffix("[]")
            if letter in self.variants:
                assert choice.setdefault(letter, code) == code, f"{self.name}: {letter} is {choice[letter]} and {code}"
                assert code in self.variants[letter], f"{self.name}: {letter} has no variant {code}"
        return choice

    def compile(self, compute_capability: tuple[int, int], choice: dict[str, str]) -> GpuCode:
        """PTX for a compute capability; needs no GPU. Read from the disk cache where it has been compiled before."""
        tag = "-".join([self.name, *(f"{k}{v}" for k, v in sorted(choice.items())),
                        "sm{}{}".format(*compute_capability)])  # fmt: skip
        path = cache_folder("gpu") / f"{tag}.ptx"
        if path.exists():
            entry, ptx = path.read_text().split("\n", 1)
        else:
            ptx = self._compile_ptx(compute_capability, choice)
            entry = ptx.split(".entry", 1)[1].split("(", 1)[0].strip()
            _write_whole(path, f"{entry}\n{ptx}")
        return GpuCode(entry, ptx)

    def _compile_ptx(self, compute_capability: tuple[int, int], choice: dict[str, str]) -> str:
        assert not SIMULATED, "the simulator has no code generator"
        with _LOCK, _pretend_device(compute_capability):
            from numba import cuda as numba_cuda, types

            _bind(on_gpu=True)
            args = [_types(p.code, p.is_array) for p in self.parameters(choice)]
            # With C++ functions, both sides meet before code is generated, so that no call is left in a hot loop.
            code, _ = numba_cuda.compile(self.fn, types.void(*args), device=False, abi="numba",
                                         cc=compute_capability, output="ltoir" if self.sources else "ptx",
                                         launch_bounds=self.launch_bounds)  # fmt: skip
        if not self.sources:
            return str(code)
        return _link([code, *(compile_source(name, compute_capability) for name in self.sources)], compute_capability)

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
               **variants: Sequence[str]) -> Callable[[Callable[..., Any]], GpuKernel]:  # fmt: skip
    """Declare a GPU grid; see `GpuKernel` for the signature.

    `sources` names the files of `cuda_src/` it calls; `resident_blocks` makes the compiler keep to as few registers
    as let that many blocks run on a multiprocessor at once.
    """
    return lambda fn: GpuKernel(fn, signature, variants, sources, resident_blocks)


@contextlib.contextmanager
def _pretend_device(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Let numba-cuda compile nested functions for this capability, with or without a driver."""
    import numba.cuda.dispatcher as dispatcher

    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: pytypes.SimpleNamespace(compute_capability=compute_capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = real


@functools.cache
def cache_folder(kind: str) -> Path:
    """Folder of compiled code, one for each state of the sources and each version of the compilers."""
    import importlib.metadata as metadata

    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), *sorted(source_folder().glob("*.cu"))]:
        digest.update(path.read_bytes())
    for package in ("numba", "numba-cuda", "llvmlite", "numpy", "nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"{package}{metadata.version(package)}".encode())
    root = os.environ.get("PYG_DIRECT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pyg_direct")  # fmt: skip
    folder = Path(root) / digest.hexdigest()[:16] / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="pyg_direct"))
    return folder


def _write_whole(path: Path, text: str) -> None:
    # Several processes may compile the same kernel: readers see all of a file or none of it.
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(name, path)


def source_folder() -> Path:
    """Where `cuda_src/` lies: inside the installed package, or beside it in a checkout."""
    inside = Path(__file__).parents[1] / "cuda_src"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "cuda_src"


def compile_source(name: str, compute_capability: tuple[int, int]) -> bytes:
    """LTO-IR of `cuda_src/<name>.cu`, compiled by NVRTC; needs no GPU."""
    from cuda.bindings import nvrtc

    def call(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC could not compile cuda_src/{name}.cu: {result[0].name}\n{read_log()}")
        return result[1] if len(result) == 2 else None

    def read_log() -> str:
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.decode(errors="replace")

    text = (source_folder() / f"{name}.cu").read_bytes()
    program = call(nvrtc.nvrtcCreateProgram(text, f"{name}.cu".encode(), 0, [], []))
    architecture = "--gpu-architecture=compute_{}{}".format(*compute_capability)
    options = [architecture.encode(), b"--relocatable-device-code=true", b"-dlto", b"--std=c++17"]
    call(nvrtc.nvrtcCompileProgram(program, len(options), options))
    code = b" " * call(nvrtc.nvrtcGetLTOIRSize(program))
    call(nvrtc.nvrtcGetLTOIR(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _link(pieces: Sequence[bytes], compute_capability: tuple[int, int]) -> str:
    """PTX of LTO-IR pieces linked together."""
    from cuda.bindings import nvjitlink

    options = ["-lto", "-ptx", "-arch=sm_{}{}".format(*compute_capability)]
    handle = nvjitlink.create(len(options), options)
    try:
        for number, piece in enumerate(pieces):
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, piece, len(piece), f"piece {number}")
        nvjitlink.complete(handle)
        ptx = bytearray(nvjitlink.get_linked_ptx_size(handle))
        nvjitlink.get_linked_ptx(handle, ptx)
    finally:
        nvjitlink.destroy(handle)
    return ptx.decode().rstrip("\0")
