"""CPU loops that a wheel holds compiled, for families of processors.

The machine code is Numba's, in the form of its own cache. Only the same versions of Python, Numba and llvmlite can load
it, on a processor with all instructions of the family. Otherwise a loop is compiled at its first call.

`cpu_loops.txt` lists the loops: name, threads (`one` or `all`) and types of the arguments.
`cpu_programs.txt` has a line for each small program of `.ci/small_programs.py`: the part that it belongs to, then the
names of its loops. `pyg-direct warm` compiles the loops of a part. `.ci/list_cpu_loops.py` writes both files. Types are
dtypes as NumPy writes them, `i8[]` for an array, and `none`. An array has a comma for each further dimension, and `r`
if it is not written.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import pickle
import platform
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from pyg_direct.compiler.code_cache import COMPILER, source_digest

ARCHIVE = Path(__file__).with_name("cpu_loops.zip")
_LOOPS, _PROGRAMS = (Path(__file__).with_name(f"cpu_{name}.txt") for name in ("loops", "programs"))
_OLDER = frozenset(["avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"])
# LLVM's names of families, the best first, and the instructions that are more than every processor of 64 bits has.
FAMILIES = {"x86-64-v4": _OLDER | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}, "x86-64-v3": _OLDER}


def find_loop(loop: str, threads: str, args: Iterable[Any]) -> Any:
    """Find the code of a loop, as Numba keeps it; None if no current code of the wheel runs here.

    Args:
        loop: Its module below `kernels`, and its name.
        threads: `one` or `all`.
    """
    archive, family = _open_archive(), _find_family()
    entry = None if archive is None or family is None else name_entry(family, loop, threads, args)
    if archive is None or entry is None or entry not in archive.namelist():
        return None
    return pickle.loads(archive.read(entry))


def has_loop(loop: str, threads: str) -> bool:
    """Report whether the wheel has code of a loop for this processor, for any types."""
    archive, family = _open_archive(), _find_family()
    return archive is not None and any(name.startswith(f"{family}/{loop}-{threads}-") for name in archive.namelist())


@functools.cache
def read_parts() -> dict[str, list[frozenset[str]]]:
    """Read the loops of each program, by part."""
    # A zip archive has no such path: nothing is listed then.
    text = _PROGRAMS.read_text() if _PROGRAMS.exists() else ""
    parts: dict[str, list[frozenset[str]]] = {}
    for line in text.splitlines():
        part, *loops = line.split()
        parts.setdefault(part, []).append(frozenset(loops))
    return parts


def list_loops(part: str) -> Iterator[tuple[str, str, list[str]]]:
    """List the loops of a part: name, threads, and types of the arguments."""
    names = frozenset().union(*read_parts()[part])
    for line in _LOOPS.read_text().splitlines():
        name, threads, *codes = line.split()
        if name in names:
            yield name, threads, codes


def foresee_loops(loop: str, called: Set[str]) -> Set[str] | None:
    """Return the loops that are likely to be called later, as in the nearest small program; None if none calls `loop`.

    Args:
        loop: The loop that is called now.
        called: Loops that this process has called.
    """
    programs = [program for part in read_parts().values() for program in part if loop in program]
    nearest = max(programs, key=lambda program: len(program & called), default=None)
    return None if nearest is None else nearest - called - {loop}


def with_shipped(cache: Any, loop: str, threads: str) -> Callable[[Any, Any], Any]:
    """Return `load_overload` of a cache of Numba's that also finds the code of the wheel."""
    real = cache.load_overload

    def load_overload(signature: Any, context: Any) -> Any:
        found = real(signature, context)
        if found is None:
            payload = find_loop(loop, threads, signature)
            found = None if payload is None else cache._impl.rebuild(context, payload)
        return found

    return load_overload


@functools.cache
def _open_archive() -> zipfile.ZipFile | None:
    if COMPILER or not ARCHIVE.exists():
        return None
    # In memory, since forked processes would share the place in an open file.
    archive = zipfile.ZipFile(io.BytesIO(ARCHIVE.read_bytes()))
    return archive if archive.comment.decode() == _describe_compiler() else None


def _describe_compiler() -> str:
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    python = "{}.{}".format(*sys.version_info) + getattr(sys, "abiflags", "")
    return " ".join([source_digest(), *versions, python, sys.platform, platform.machine()])


@functools.cache
def _find_family() -> str | None:
    """Find the best family of this processor; None if the user has Numba compile for a certain one."""
    import llvmlite.binding
    from numba import config

    if config.CPU_NAME is not None or config.CPU_FEATURES is not None or not config.ENABLE_AVX:
        return None
    has = llvmlite.binding.get_host_cpu_features()
    return next((name for name, needed in FAMILIES.items() if all(map(has.get, needed))), None)


def name_entry(family: str, loop: str, threads: str, args: Iterable[Any]) -> str | None:
    """Name the code of a loop in the archive; None for types that have no spelling."""
    codes = [spell_type(arg) for arg in args]
    if None in codes:
        return None
    return f"{family}/{loop}-{threads}-{hashlib.sha256(' '.join(map(str, codes)).encode()).hexdigest()[:16]}"


def spell_type(numba_type: Any) -> str | None:
    """Spell one of Numba's types; None for a type that has no spelling here."""
    from numba import types
    from numba.np.numpy_support import as_dtype

    if isinstance(numba_type, types.NoneType):
        return "none"
    if isinstance(numba_type, types.Array):
        is_constant = not numba_type.mutable
        if numba_type != types.Array(numba_type.dtype, numba_type.ndim, "C", readonly=is_constant):
            return None
        return f"{as_dtype(numba_type.dtype).str[1:]}[{',' * (numba_type.ndim - 1)}]{'r' * is_constant}"
    return as_dtype(numba_type).str[1:] if isinstance(numba_type, (types.Number, types.Boolean)) else None


def read_type(code: str) -> Any:
    """Return the type that `spell_type` spells so."""
    # Not at the top: commands start without it.
    import numpy as np
    from numba import types
    from numba.np.numpy_support import from_dtype

    if code == "none":
        return types.none
    scalar, bracket, rest = code.partition("[")
    dtype = from_dtype(np.dtype(scalar))
    return types.Array(dtype, rest.count(",") + 1, "C", readonly=rest.endswith("r")) if bracket else dtype


def write_archive(path: Path, entries: Mapping[str, bytes]) -> None:
    """Write the archive of the sources and the compiler as they are now."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = _describe_compiler().encode()
        for name in sorted(entries):
            archive.writestr(zipfile.ZipInfo(name), entries[name], zipfile.ZIP_DEFLATED, compresslevel=9)
