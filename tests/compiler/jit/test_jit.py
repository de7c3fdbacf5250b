"""The door to the compilers: opened late, kept in one file, with a cache beside it."""

import ast
import itertools

import numpy as np
import pytest

from pyg_direct.compiler import jit, nvrtc
from pyg_direct.compiler.jit import get_cpu_threads, run_alone, set_cpu_threads
from tests.interpreter import PACKAGE, run_python

COMPILERS = {"numba", "llvmlite", "numba_cuda", "numba_cuda_mlir", "nvrtc"}


def find_imports(path):
    """Names of all modules that a file imports, anywhere in it, by their parts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from itertools.chain.from_iterable(alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("pyg_direct"):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


@pytest.fixture
def fresh_kernel(monkeypatch):
    """A kernel as of the package, that leaves no trace in the registry of kernels."""
    monkeypatch.setattr(jit, "GPU_KERNELS", [])
    monkeypatch.setattr(jit, "_FUNCTIONS", [])

    def copy_gpu(count, ids, values, out):
        pass

    copy_gpu.__module__ = "pyg_direct.kernels.copy"
    return jit.gpu_kernel("i8 I[] T[] I[]", I=("i4", "i8"), T=("f4",))(copy_gpu)


@pytest.fixture
def threads_before():
    before = get_cpu_threads()
    yield before
    set_cpu_threads(before)


def test_few_files_import_compilers():
    files = {path: COMPILERS & set(find_imports(path)) for path in PACKAGE.rglob("*.py")}

    assert {path.relative_to(PACKAGE).as_posix(): names for path, names in files.items() if names} == {
        "compiler/jit.py": {"llvmlite", "numba", "numba_cuda", "numba_cuda_mlir"}, "compiler/link_once.py": {"numba"},
        "compiler/shipped_loops.py": {"llvmlite", "numba"}, "compiler/nvrtc.py": {"nvrtc"},
    }  # fmt: skip


def test_importing_kernels_imports_no_compiler():
    found = run_python("""
import importlib, pkgutil
import pyg_direct.kernels as kernels
names = [module.name for module in pkgutil.walk_packages(kernels.__path__, "pyg_direct.kernels.")]
for name in names:
    importlib.import_module(name)
print("pyg_direct.kernels.rows.gather" in names, sorted({"numba", "llvmlite", "cuda", "torch"} & set(sys.modules)))
""")

    assert found == "True []"


def test_grids_are_compiled_for_the_nearest_architecture_and_read_back(fresh_kernel, tmp_path, monkeypatch):
    calls = []

    def compile_ptx(self, target, choice):
        calls.append((target, choice))
        return ".version 9.4\n.entry entry_name ()"

    monkeypatch.setattr(jit, "cache_folder", lambda kind: tmp_path)
    monkeypatch.setattr(jit.GpuKernel, "compile_ptx", compile_ptx)
    choice = {"I": "i4", "T": "f4"}

    codes = [fresh_kernel.compile(capability, choice) for capability in [(9, 0), (9, 0), (8, 0), (8, 9), (12, 0)]]

    assert codes[:2] == [jit.GpuCode(".version 8.1\n.entry entry_name ()")] * 2
    assert codes[2:4] == [jit.GpuCode(".version 8.0\n.entry entry_name ()")] * 2
    assert codes[4] == jit.GpuCode(".version 8.6\n.entry entry_name ()")
    assert calls == [((9, 0), choice), ((8, 0), choice), ((10, 0), choice)]


def test_grids_in_the_wheel_are_not_compiled(fresh_kernel, monkeypatch):
    shipped = {"copy_gpu-Ii8-Tf4-sm80.ptx": ".version 8.0\n.entry shipped ()"}
    monkeypatch.setattr(jit, "find_shipped", shipped.get)
    monkeypatch.setattr(jit.GpuKernel, "compile_ptx", None)

    code = fresh_kernel.compile((8, 6), {"I": "i8", "T": "f4"})

    assert code.entry == "shipped"


def test_what_is_kept_is_not_given_to_a_kernel_of_that_name_elsewhere(fresh_kernel, tmp_path, monkeypatch):
    (tmp_path / "copy_gpu-Ii8-Tf4-sm80.ptx").write_text(".version 8.0\n.entry of_the_package ()")
    monkeypatch.setattr(jit, "cache_folder", lambda kind: tmp_path)
    monkeypatch.setattr(jit, "find_shipped", lambda name: None)
    monkeypatch.setattr(jit.GpuKernel, "compile_ptx", lambda *args: ".version 9.4\n.entry of_a_program ()")
    choice = {"I": "i8", "T": "f4"}
    kept = fresh_kernel.compile((8, 0), choice)
    fresh_kernel.fn.__module__ = "program"

    other = fresh_kernel.compile((8, 0), choice)

    assert (kept.entry, other.entry) == ("of_the_package", "of_a_program")
    assert len(list(tmp_path.iterdir())) == 1


def test_c_plus_plus_errors_come_with_the_compilers_words(tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text("__device__ int broken() { return missing_name; }")
    monkeypatch.setattr(nvrtc, "source_folder", lambda: tmp_path)

    with pytest.raises(RuntimeError, match=r"(?s)cuda_src/broken\.cu.*missing_name"):
        nvrtc.compile_source("broken", (9, 0))


def test_loops_are_compiled_also_for_a_program_that_compiles_nothing_of_its_own(tmp_path):
    found = run_python("""
import numba
import numpy as np
from pyg_direct.kernels.local_ids.bitmap import rank_words_cpu
ranks, totals = np.full(2, -1, np.int32), np.zeros(1, np.int64)
rank_words_cpu(np.array([7, 1], np.uint32), ranks, totals)
print(ranks.tolist(), type(numba.njit(lambda: 0)).__name__)
""", NUMBA_DISABLE_JIT="1", PYG_DIRECT_CACHE=str(tmp_path))  # fmt: skip

    assert found == "[0, 3] function"


def test_threads_are_set_and_told(threads_before):
    first = set_cpu_threads(1)
    one = get_cpu_threads()
    second = set_cpu_threads(threads_before)

    assert (first, one, second) == (threads_before, 1, 1)
    assert get_cpu_threads() == threads_before


def test_a_thread_runs_its_loops_alone_while_others_do_not(threads_before):
    from concurrent.futures import ThreadPoolExecutor

    set_cpu_threads(2)
    both = get_cpu_threads()
    with ThreadPoolExecutor(1, initializer=set_cpu_threads, initargs=(2,)) as other:
        before = run_alone(True)
        seen = get_cpu_threads(), other.submit(get_cpu_threads).result()
        # The number that was set stays what it is, and can be set meanwhile.
        was, still_alone = set_cpu_threads(1), get_cpu_threads()
        set_cpu_threads(2)
        assert run_alone(before)

    assert (seen, was, still_alone, get_cpu_threads()) == ((1, both), both, 1, both)


@pytest.mark.parametrize("count", [0, -3, 10**6])
def test_threads_stay_within_what_numba_has(threads_before, count):
    import numba

    set_cpu_threads(count)

    assert get_cpu_threads() == (1 if count < 1 else numba.config.NUMBA_NUM_THREADS)


def test_threads_share_one_region_at_a_time():
    from concurrent.futures import ThreadPoolExecutor

    from pyg_direct.kernels.local_ids.bitmap import rank_words_cpu

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
