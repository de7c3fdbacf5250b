"""Compilation ahead of use, in several processes: the CPU loops that a wheel lists, and GPU kernels as declared."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import pyg_direct.kernels
from pyg_direct.cli.cache import Kind, list_kept
from pyg_direct.compiler.code_cache import find_shipped
from pyg_direct.compiler.jit import CPU_KERNELS, GPU_KERNELS, GpuKernel
from pyg_direct.compiler.nvrtc import nearest_target
from pyg_direct.compiler.shipped_loops import list_loops, read_type
from pyg_direct.errors import DeviceError
from pyg_direct.progress import Bar
from pyg_direct.runtime.cuda.device import abilities
from pyg_direct.runtime.cuda.launch import load_function
from pyg_direct.runtime.host.host_memory import count_cores

# Bytes that must be free: a file of compiled code is shorter.
_LEAST_ROOM = 1 << 20


class Outcome(NamedTuple):
    """Result of a compilation ahead of use.

    Attributes:
        kept, kept_bytes: Files of this version on the disk, and their size.
        failed: Code that could not be compiled and why, a sentence each.
    """

    compiled: int
    kept: int
    kept_bytes: int
    seconds: float
    notes: list[str]
    failed: list[str]


def check_folder(folder: Path) -> None:
    """Check that a folder can keep more, and make it if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_LEAST_ROOM))
    except OSError as error:
        error.filename = str(folder)
        raise


def compile_ahead(parts: Sequence[str], capabilities: Iterable[tuple[int, int]] | None, *, on_gpu: bool,
                  jobs: int | None = None) -> Outcome:  # fmt: skip
    """Compile loops and kernels, and keep them in the cache of compiled code.

    Args:
        parts: Parts of the CPU loops, as `shipped_loops.read_parts` names them.
        capabilities: Compute capabilities of GPUs; None or none for the GPUs of this machine.
        jobs: Processes; None for one a core.
    """
    begin, before = time.monotonic(), _weigh()
    targets, notes, failed = _find_targets(capabilities) if on_gpu else ([], [], [])
    kernels = _list_missing(targets) if targets else []
    if targets and not kernels:
        notes.append("the wheel holds the kernels of these GPUs: there is nothing to compile for them")
    work: dict[str, Callable[[], None]] = {f"CPU loops, {name}": partial(compile_part, name) for name in parts}
    work |= {f"GPU kernel, {GPU_KERNELS[number].name}": partial(_compile_kernel, number, targets)
             for number in kernels}  # fmt: skip
    with Bar(len(work), "compiling ahead", "part") as bar:
        for name, error in _run(work, jobs or count_cores()):
            if error is not None:
                failed.append(f"{name}: {str(error) or type(error).__name__}")
            bar.update(1)
    if on_gpu and not capabilities:
        failed += _load_all()
    count, num_bytes = _weigh()
    # A driver keeps the code that it makes of PTX elsewhere.
    return Outcome(max(0, count - before[0]), count, num_bytes, round(time.monotonic() - begin, 1), notes, failed)


def _weigh() -> tuple[int, int]:
    """Number and bytes of compiled files of this version."""
    entries = [entry for entry in list_kept() if entry.kind is Kind.kernels]
    files = [file for entry in entries for file in entry.path.rglob("*") if file.suffix in (".nbc", ".ptx")]
    return len(files), sum(file.stat().st_size for file in files)


def _find_targets(capabilities: Iterable[tuple[int, int]] | None) -> tuple[list[tuple[int, int]], list[str], list[str]]:
    """Find the architectures to compile for, remarks, and capabilities for which there is none."""
    given, failed, targets = list(capabilities or ()), [], set()
    if not given and torch.cuda.is_available():
        given = [abilities(index).compute_capability for index in range(torch.cuda.device_count())]
    if not given:
        return [], ["no kernels of GPUs: there is no GPU here; --arch 9.0 compiles for one that is elsewhere"], []
    for capability in given:
        try:
            targets.add(nearest_target(capability))
        except DeviceError as error:
            failed.append(str(error).replace("device", "--arch", 1))
    return sorted(targets), [], failed


def compile_part(name: str) -> None:
    """Compile the listed loops of a part, for one thread and for several."""
    _import_kernels()
    kernels = {kernel.title: kernel for kernel in CPU_KERNELS}
    for title, threads, codes in list_loops(name):
        kernels[title].compile(threads, [read_type(code) for code in codes])


def _import_kernels() -> None:
    """Have all kernels declare themselves."""
    for module in pkgutil.walk_packages(pyg_direct.kernels.__path__, "pyg_direct.kernels."):
        importlib.import_module(module.name)


def _list_missing(targets: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the kernels that the wheel does not hold for all of these architectures."""
    _import_kernels()

    def is_shipped(kernel: GpuKernel) -> bool:
        return all(find_shipped(kernel.file_name(target, choice)) is not None
                   for target in targets for choice in kernel.specialisations())  # fmt: skip

    return [number for number, kernel in enumerate(GPU_KERNELS) if not is_shipped(kernel)]


def _compile_kernel(number: int, targets: Sequence[tuple[int, int]]) -> None:
    """Compile all specialisations of a kernel."""
    _import_kernels()
    kernel = GPU_KERNELS[number]
    for choice in kernel.specialisations():
        kernel.compile_all(targets, choice)


def _load_all() -> list[str]:
    """Have the drivers of this machine's GPUs make machine code of all kernels, which they keep; list failures."""
    failed = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        for kernel in GPU_KERNELS:
            for choice in kernel.specialisations():
                try:
                    load_function(kernel.compile(abilities(index).compute_capability, choice), index)
                except (RuntimeError, ImportError) as error:
                    failed.append(f"GPU kernel, {kernel.name}, on GPU {index}: {error}")
    return failed


def _run(work: dict[str, Callable[[], None]], jobs: int) -> Iterator[tuple[str, Exception | None]]:
    """Run all in so many processes; yield the name of each as it ends, and its error."""
    if min(jobs, len(work)) <= 1:
        for name, call in work.items():
            yield name, _try(call)
        return
    with _one_thread_each():
        # A forked process has no threads of CPU loops.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(work)), mp_context=context) as pool:
            running = {pool.submit(_try, call): name for name, call in work.items()}
            for done in as_completed(running):
                yield running[done], done.exception() or done.result()  # type: ignore[misc]


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let processes that are started have one thread of torch's, as they share the cores."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _try(call: Callable[[], None]) -> Exception | None:
    """Return the error that a call raises, if any."""
    try:
        with warnings.catch_warnings():
            # Of small graphs, to a program that nobody wrote.
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        # Others may not come through a pipe.
        return RuntimeError(f"{type(error).__name__}: {error}")
    return None
