"""Compiled code on disk: kept apart by sources and compilers, made once, and never needed."""

import errno
import importlib.metadata
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from pyg_direct import cache_folder as disk_cache
from pyg_direct.cache_folder import hold
from pyg_direct.compiler import code_cache
from pyg_direct.compiler.code_cache import cache_folder, read_or_make, source_folder
from tests.interpreter import PACKAGE, run_python, run_together

# The one cached folder of this process stays as it is.
find_folder = cache_folder.__wrapped__

LIMIT_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))"
RANK_WORDS = """
import numpy as np
from pyg_direct.kernels.local_ids.bitmap import rank_words_cpu as kernel
ranks = np.full(2, -1, np.int32)
kernel(np.array([7, 1], np.uint32), ranks, np.zeros(1, np.int64))
loop = kernel._alone or kernel._parallel
print(ranks.tolist(), sum(loop.stats.cache_hits.values()), sum(loop.stats.cache_misses.values()))
"""
# The compiler is replaced by one that takes long and is counted.
COMPILE_SLOWLY = """
import os, time
from pyg_direct.kernels.sampling.random import draw_bits_gpu
from pyg_direct.compiler.jit import GpuKernel

def compile_ptx(kernel, target, choice):
    with open(os.environ["COMPILED"], "a") as file:
        file.write(f"{kernel.name} {target}\\n")
    time.sleep(1)
    return ".version 9.4\\n.entry name ()" + 1000 * " "

GpuKernel.compile_ptx = compile_ptx
print(draw_bits_gpu.compile((9, 0), {}).entry)
"""


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
    monkeypatch.setattr(code_cache, "COMPILER", "mlir")
    chosen = find_folder("cpu")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "99.0")

    newer = find_folder("cpu")

    assert len({before, chosen, newer}) == 3


@pytest.mark.parametrize("name", ["rows.cu", "items.cuh"])
def test_an_edit_of_a_source_gives_another_digest(tmp_path, monkeypatch, name):
    before = code_cache.source_digest()
    shutil.copytree(source_folder(), tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text((source_folder() / name).read_text() + "\n")
    monkeypatch.setattr(code_cache, "source_folder", lambda: tmp_path)

    after = code_cache.source_digest.__wrapped__()

    assert after != before


def zip_package(path, **additions):
    """An archive of the package, with something more at the end of some files of `kernels/` and `cuda_src/`."""
    with zipfile.ZipFile(path, "w") as archive:
        for folder, below in [(PACKAGE, "pyg_direct"), (source_folder(), "pyg_direct/cuda_src")]:
            for file in sorted([*folder.rglob("*.py"), *folder.glob("*.cu*")]):
                text = file.read_text() + additions.get(file.name.replace(".", "_"), "")
                archive.writestr(f"{below}/{file.relative_to(folder).as_posix()}", text)
    return path


@pytest.mark.parametrize("additions", [{"bitmap_py": "# other\n"}, {"rows_cu": "// other\n"}], ids=str)
def test_packages_in_archives_have_a_folder_for_each_state_of_their_sources(tmp_path, additions):
    texts = [f"""
package.__path__ = ["{zip_package(tmp_path / name, **added)}/pyg_direct"]
from pyg_direct.compiler.code_cache import cache_name, source_digest
print(source_digest(), cache_name())
""" for name, added in [("same.zip", {}), ("other.zip", additions)]]  # fmt: skip

    same, other = (run_python(text).split() for text in texts)

    assert same == [code_cache.source_digest(), code_cache.cache_name()]
    assert other[0] != same[0]
    assert other[1] != same[1]


def test_sources_in_an_archive_are_compiled(tmp_path):
    compiled = run_python(f"""
package.__path__ = ["{zip_package(tmp_path / "package.zip")}/pyg_direct"]
from pyg_direct.compiler import nvrtc
print(nvrtc.__file__, len(nvrtc.compile_source("narrow", (9, 0))) > 0)
""")

    assert compiled == f"{tmp_path}/package.zip/pyg_direct/compiler/nvrtc.py True"


def test_sources_of_a_room_are_found_in_its_folders_without_what_python_keeps_there(tmp_path):
    for name in ("a.py", "a.txt", "rows/b.pyc", "rows/__pycache__/b.pyc", "__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    found = code_cache.read_sources(tmp_path, ".py", ".pyc")

    assert found == {"a.py": b"a.py", "rows/b.pyc": b"rows/b.pyc"}


def test_sources_are_found():
    names = {path.name for path in source_folder().iterdir()}

    assert "rows.cu" in names


def test_folder_that_cannot_be_made_is_replaced_until_the_process_ends(tmp_path):
    (tmp_path / "file").write_text("")

    folder = Path(run_python("""
from pyg_direct.compiler.code_cache import cache_folder
print(cache_folder("gpu") if cache_folder("gpu").is_dir() else None)
""", PYG_DIRECT_CACHE=str(tmp_path / "file" / "below")))  # fmt: skip

    assert folder.is_absolute()
    assert tmp_path not in folder.parents
    assert not folder.exists()


def test_processes_that_end_leave_no_folder_but_that_of_their_parent(tmp_path):
    (tmp_path / "file").write_text("")

    said = run_python("""
import multiprocessing, os, sys
from pyg_direct.compiler.code_cache import cache_folder
def say():
    cache_folder.cache_clear()
    print(cache_folder("gpu"), flush=True)
say()
own = cache_folder("gpu")
child = multiprocessing.get_context("fork").Process(target=say)
child.start()
child.join()
forked = os.fork()
if forked == 0:
    sys.exit()
os.waitpid(forked, 0)
print(own.is_dir())
""", PYG_DIRECT_CACHE=str(tmp_path / "file" / "below"))  # fmt: skip

    own, of_child, is_there = said.splitlines()
    assert is_there == "True"
    assert own != of_child
    assert not os.path.exists(own)
    assert not os.path.exists(of_child)


def test_folder_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)

    gpu, cpu = find_folder("gpu"), find_folder("cpu")

    assert tmp_path in gpu.parents
    assert tmp_path in cpu.parents
    assert code_cache.find_unwritable("cpu") == cpu


# As for a user without rights to write, which a test that runs as root is not.
FORBID_WRITES = """
import os, tempfile
access, open_file, make_file = os.access, os.open, tempfile.TemporaryFile
cache = os.environ["PYG_DIRECT_CACHE"]

def forbid(path, flags, *args, **options):
    if str(path).startswith(cache) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise PermissionError(13, "Permission denied", str(path))
    return open_file(path, flags, *args, **options)

def forbid_file(*args, dir=None, **options):
    if str(dir).startswith(cache):
        raise PermissionError(13, "Permission denied", str(dir))
    return make_file(*args, dir=dir, **options)

os.access = lambda path, mode, **options: mode != os.W_OK and access(path, mode, **options)
os.open, tempfile.TemporaryFile = forbid, forbid_file
import sys
sys.stderr = sys.stdout
"""


def test_loops_are_read_from_a_folder_that_cannot_be_written_and_nothing_is_said(tmp_path):
    run_python(RANK_WORDS, PYG_DIRECT_CACHE=str(tmp_path))

    found = run_python(FORBID_WRITES + RANK_WORDS, PYG_DIRECT_CACHE=str(tmp_path))

    assert found == "[0, 3] 1 0"


def test_loops_that_cannot_be_kept_are_told_once_with_the_folder(tmp_path):
    make_folders = "from pyg_direct.compiler.code_cache import cache_folder\nfor kind in ('cpu', 'cpu_one_thread'):\n"
    run_python(f"{make_folders}    cache_folder(kind)", PYG_DIRECT_CACHE=str(tmp_path))

    found = run_python(FORBID_WRITES + RANK_WORDS.replace("print(", "kernel(np.array([1.0]).view(np.uint64), ranks, "
                       "np.zeros(1, np.int64))\nprint(").replace("(loop,)", "loop, *_"),
                       PYG_DIRECT_CACHE=str(tmp_path))  # fmt: skip

    said, _, result = found.rpartition("\n")
    assert said.count("cannot be kept") == 1
    assert f"compiled kernels cannot be kept: {tmp_path}" in said
    assert "PYG_DIRECT_CACHE" in said
    assert result.endswith("0 2")


def test_folder_below_one_of_somebody_else_is_replaced(tmp_path, monkeypatch):
    stat = os.stat

    def refuse(path, *args, **options):
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "no right to enter", str(path))
        return stat(path, *args, **options)

    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(os, "mkdir", lambda path, *args: refuse(path))
    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(code_cache.tempfile, "mkdtemp", lambda prefix: "mine")

    assert [find_folder(kind) for kind in ("gpu", "cpu")] == [Path("mine")] * 2


def test_text_is_made_once_and_then_read(tmp_path):
    texts = iter(["first", "second"])

    got = [read_or_make(tmp_path / "name", lambda: next(texts)) for _ in range(2)]

    assert got == ["first", "first"]
    assert {path.name for path in tmp_path.iterdir()} <= {"name", "name.lock"}


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_text_that_cannot_be_kept_is_made_anew(tmp_path, monkeypatch, reason):
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(reason, os.strerror(reason), path)
        return real(path, flags, *args, **kwargs)

    texts = iter(["first", "second"])
    monkeypatch.setattr(os, "open", refuse)

    got = [read_or_make(tmp_path / "name", lambda: next(texts)) for _ in range(2)]

    assert got == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_who_waited_long_enough_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_PATIENCE_SECONDS", 0.1)

    with hold(tmp_path / "name"):
        got = run_python(f"""
from pathlib import Path
from pyg_direct import cache_folder as disk
from pyg_direct.compiler import code_cache as cache
disk._PATIENCE_SECONDS = 0.1
print(cache.read_or_make(Path({str(tmp_path)!r}, "name"), lambda: "made"))
""")

    assert got == "made"


def test_processes_that_start_at_once_compile_a_grid_once(tmp_path):
    log = tmp_path / "log"

    entries = run_together(4, COMPILE_SLOWLY, PYG_DIRECT_CACHE=str(tmp_path / "cache"), COMPILED=str(log))

    assert entries == ["name"] * 4
    assert log.read_text() == "draw_bits_gpu (9, 0)\n"


@pytest.mark.full
def test_processes_that_start_at_once_compile_a_loop_once(tmp_path):
    outputs = run_together(4, RANK_WORDS, PYG_DIRECT_CACHE=str(tmp_path))

    assert sorted(outputs) == ["[0, 3] 0 1", "[0, 3] 1 0", "[0, 3] 1 0", "[0, 3] 1 0"]


def test_compiled_code_that_does_not_fit_the_disk_is_used_all_the_same(tmp_path):
    grid = run_python(LIMIT_FILES + COMPILE_SLOWLY, PYG_DIRECT_CACHE=str(tmp_path), COMPILED=str(tmp_path / "log"))
    loop = run_python(LIMIT_FILES + RANK_WORDS, PYG_DIRECT_CACHE=str(tmp_path))

    assert (grid, loop) == ("name", "[0, 3] 0 1")
    assert [path for path in tmp_path.rglob("gpu/*") if path.suffix != ".lock"] == []


@pytest.mark.full
def test_environments_with_the_same_sources_share_compiled_loops(tmp_path):
    (tmp_path / "other").mkdir()
    for name in ("pyg_direct", "cuda_src"):
        shutil.copytree(PACKAGE.parent / name, tmp_path / "other" / name)
    moved = f"package.__path__ = [{str(tmp_path / 'other' / 'pyg_direct')!r}]\n"
    cache = str(tmp_path / "cache")

    outputs = [run_python(moved + RANK_WORDS, PYG_DIRECT_CACHE=cache), run_python(RANK_WORDS, PYG_DIRECT_CACHE=cache)]

    assert outputs == ["[0, 3] 0 1", "[0, 3] 1 0"]
