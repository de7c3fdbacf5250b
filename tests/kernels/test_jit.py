"""The door to the compilers: opened late, kept in one file, with a cache beside it."""

import ast
import importlib.metadata
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pyg_direct
from pyg_direct.kernels import jit
from pyg_direct.kernels.jit import cache_folder, get_cpu_threads, set_cpu_threads, source_folder

PACKAGE = Path(pyg_direct.__file__).parent
COMPILERS = {"numba", "llvmlite", "numba_cuda", "numba_cuda_mlir", "nvrtc"}

# The package without its own __init__, whose import of PyG imports Numba.
BARE_PACKAGE = f"""
import sys, types
package = sys.modules["pyg_direct"] = types.ModuleType("pyg_direct")
package.__path__ = [{str(PACKAGE)!r}]
"""

# The one cached folder of this process stays as it is.
find_folder = cache_folder.__wrapped__


def run_python(text, **environment):
    """Standard output of a fresh interpreter that sees the bare package."""
    done = subprocess.run([sys.executable, "-c", BARE_PACKAGE + text], env={**os.environ, **environment},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def find_imports(path):
    """Names of all modules that a file imports, anywhere in it, by their parts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from itertools.chain.from_iterable(alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


@pytest.fixture
def fresh_kernel(monkeypatch):
    """A kernel that leaves no trace in the registry of kernels."""
    monkeypatch.setattr(jit, "GPU_KERNELS", [])
    monkeypatch.setattr(jit, "_FUNCTIONS", [])

    @jit.gpu_kernel("i8 I[] T[] I[]", I=("i4", "i8"), T=("f4",))
    def copy_gpu(count, ids, values, out):
        pass

    return copy_gpu


@pytest.fixture
def threads_before():
    before = get_cpu_threads()
    yield before
    set_cpu_threads(before)


def test_only_one_file_imports_a_compiler():
    importers = [path for path in PACKAGE.rglob("*.py") if COMPILERS & set(find_imports(path))]

    assert importers == [PACKAGE / "kernels" / "jit.py"]


def test_importing_kernels_imports_no_compiler():
    found = run_python("""
import importlib, pkgutil
import pyg_direct.kernels as kernels
names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
for name in names:
    importlib.import_module(f"pyg_direct.kernels.{name}")
print("jit" in names, sorted({"numba", "llvmlite", "cuda", "torch"} & set(sys.modules)))
""")

    assert found == "True []"


def test_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path / "own"))
    own = find_folder("gpu")
    monkeypatch.delenv("PYG_DIRECT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    common = find_folder("gpu")

    assert own.is_dir()
    assert own.parents[1] == tmp_path / "own"
    assert common.is_dir()
    assert common.parents[1] == tmp_path / "xdg" / "pyg_direct"
    assert (own.name, own.parent.name) == (common.name, common.parent.name)


def test_cache_of_another_compiler_is_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))
    before = find_folder("cpu")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "99.0")

    after = find_folder("cpu")

    assert after != before


def test_cache_that_cannot_be_written_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path / "file" / "below"))

    folder = find_folder("cpu")

    assert folder.is_dir()
    assert tmp_path not in folder.parents


def test_compiled_loops_are_read_back_from_disk(tmp_path):
    script = """
import numpy as np
from pyg_direct.kernels.bitmap import rank_words_cpu as kernel
ranks = np.full(2, -1, np.int32)
kernel(np.array([7, 1], np.uint32), ranks, np.zeros(1, np.int64))
(compiled,) = kernel._compiled.values()
stats = compiled.stats
print(ranks.tolist(), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""

    outputs = [run_python(script, PYG_DIRECT_CACHE=str(tmp_path)) for _ in range(2)]

    assert outputs == ["[0, 3] 0 1", "[0, 3] 1 0"]


def test_compiled_grids_are_read_back_from_disk(fresh_kernel, tmp_path, monkeypatch):
    calls = []

    def compile_ptx(self, capability, choice):
        calls.append((capability, choice))
        return ".version 8.0\n.entry entry_name ()"

    monkeypatch.setattr(jit, "cache_folder", lambda kind: tmp_path)
    monkeypatch.setattr(jit.GpuKernel, "_compile_ptx", compile_ptx)
    choice = {"I": "i4", "T": "f4"}

    codes = [fresh_kernel.compile((9, 0), choice), fresh_kernel.compile((9, 0), choice)]
    other = fresh_kernel.compile((8, 0), choice)

    assert codes[0] == codes[1] == other == jit.GpuCode("entry_name", ".version 8.0\n.entry entry_name ()")
    assert calls == [((9, 0), choice), ((8, 0), choice)]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".ptx", ".ptx"]


def test_kernel_lists_its_specialisations(fresh_kernel):
    got = list(fresh_kernel.specialisations())

    assert got == [{"I": "i4", "T": "f4"}, {"I": "i8", "T": "f4"}]


def test_kernel_chooses_by_the_dtypes_of_its_arguments(fresh_kernel):
    choice = fresh_kernel.choose(["", "i8", "f4", "i8"])

    assert choice == {"I": "i8", "T": "f4"}
    assert fresh_kernel.parameters(choice)[1] == jit.Parameter("i8", is_array=True)


@pytest.mark.parametrize(("dtypes", "words"), [
    (["", "i8", "f4", "i4"], "copy_gpu: I is i8 and i4"),
    (["", "i8", "f8", "i8"], "copy_gpu: T has no variant f8"),
])  # fmt: skip
def test_kernel_refuses_what_it_was_not_declared_for(fresh_kernel, dtypes, words):
    with pytest.raises(AssertionError, match=words):
        fresh_kernel.choose(dtypes)


def test_c_plus_plus_errors_come_with_the_compilers_words(tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text("__device__ int broken() { return missing_name; }")
    monkeypatch.setattr(jit, "source_folder", lambda: tmp_path)

    with pytest.raises(RuntimeError, match=r"(?s)cuda_src/broken\.cu.*missing_name"):
        jit.compile_source("broken", (9, 0))


def test_sources_are_found():
    names = {path.name for path in source_folder().iterdir()}

    assert "rows.cu" in names


def test_threads_are_set_and_told(threads_before):
    first = set_cpu_threads(1)
    one = get_cpu_threads()
    second = set_cpu_threads(threads_before)

    assert (first, one, second) == (threads_before, 1, 1)
    assert get_cpu_threads() == threads_before


@pytest.mark.parametrize("count", [0, -3, 10**6])
def test_threads_stay_within_what_numba_has(threads_before, count):
    import numba

    set_cpu_threads(count)

    assert get_cpu_threads() == (1 if count < 1 else numba.config.NUMBA_NUM_THREADS)


def test_threads_share_one_region_at_a_time():
    from concurrent.futures import ThreadPoolExecutor

    from pyg_direct.kernels.bitmap import rank_words_cpu

    bits = np.arange(1 << 12, dtype=np.uint32)
    ones = [bin(word).count("1") for word in bits.tolist()]
    expected = np.cumsum([0, *ones[:-1]]).tolist()

    def rank(_):
        ranks = np.full(bits.size, -1, np.int32)
        rank_words_cpu(bits, ranks, np.zeros(2, np.int64))
        return ranks.tolist()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(rank, range(16)))

    assert results == [expected] * 16
