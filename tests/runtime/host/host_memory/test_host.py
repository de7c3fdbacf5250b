"""Memory of a host: of the machine, of its container, and of machines that grow."""

import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from pyg_direct.runtime.host import host_memory

GIB = 1 << 30
# Version 1 of control groups has this value without a limit.
UNLIMITED = 9223372036854771712


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Files of the kernel of a machine that has 32 GiB now, 28 of them free."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {32 << 20} kB\nMemAvailable: {28 << 20} kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_ZONES", tmp_path / "zoneinfo")
    monkeypatch.setattr(host_memory, "_GROUP", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN", tmp_path / "own")
    monkeypatch.setattr(host_memory, "_known_bytes", lambda: 32 * GIB)
    return tmp_path


def limit(machine, most, used, cached=0):
    """Put the machine's processes into a container."""
    (machine / "memory.max").write_text(f"{most}\n")
    (machine / "memory.current").write_text(f"{used}\n")
    (machine / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")


def test_free_memory_is_a_part_of_this_machine():
    assert 0 < host_memory.available_bytes() <= host_memory.total_bytes()
    assert host_memory.total_bytes() >= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_without_a_container_the_kernel_tells(machine):
    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (32 * GIB, 28 * GIB)


def test_systems_without_files_of_the_kernel_tell(machine, monkeypatch):
    (machine / "meminfo").unlink()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * GIB))

    assert host_memory.available_bytes() == 5 * GIB


@pytest.mark.parametrize(("soft", "expected"), [(8 << 20, 8 << 20), (resource.RLIM_INFINITY, None)])
def test_the_limit_of_locked_pages_is_that_of_the_system(monkeypatch, soft, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda what: {resource.RLIMIT_MEMLOCK: (soft, -1)}[what])

    assert host_memory.page_lock_limit() == expected


def test_a_system_without_such_limits_has_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)

    assert host_memory.page_lock_limit() is None


def test_a_container_may_have_less(machine):
    limit(machine, 16 * GIB, 6 * GIB, cached=2 * GIB)

    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (32 * GIB, 12 * GIB)


def test_a_container_without_a_limit_has_all(machine):
    limit(machine, "max", 6 * GIB)

    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (32 * GIB, 28 * GIB)


def test_a_machine_grows_up_to_the_limit(machine):
    limit(machine, 128 * GIB, 4 * GIB)

    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (128 * GIB, 124 * GIB)


def enter_job(machine):
    """Put this process into a group of a scheduler, two folders below the machine's; returns the job's group."""
    step = machine / "jobs" / "job" / "step"
    step.mkdir(parents=True)
    (machine / "own").write_text("1:name=systemd:/else\n0::/jobs/job/step\n")
    return step.parent


def test_a_job_of_a_scheduler_may_have_less(machine):
    job = enter_job(machine)
    limit(job / "step", "max", 5 * GIB)
    limit(job, 16 * GIB, 6 * GIB, cached=2 * GIB)

    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (32 * GIB, 12 * GIB)


def test_of_several_limits_each_holds(machine):
    job = enter_job(machine)
    limit(job / "step", 20 * GIB, 2 * GIB)
    limit(job, 24 * GIB, 21 * GIB)

    assert host_memory.available_bytes() == 3 * GIB


def test_no_machine_grows_for_a_job(machine):
    limit(enter_job(machine), 128 * GIB, 6 * GIB)

    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (32 * GIB, 28 * GIB)


def test_a_job_may_have_a_share_of_the_cores(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    (enter_job(machine) / "cpu.max").write_text("300000 100000\n")

    assert host_memory.count_cores() == 3


def enter_old_job(machine, own="/slurm/job/step"):
    """Do so with memory and cores in version 1 of control groups; returns the folders of both."""
    (machine / "own").write_text(f"7:cpu,cpuacct:{own}\n5:memory:{own}\n1:name=systemd:/else\n0::/user.slice\n")
    folders = [machine / controller / "slurm" / "job" for controller in ("memory", "cpu")]
    for folder in folders:
        (folder / "step").mkdir(parents=True)
    return folders


def limit_old(group, most, used, cached=0):
    """Give a group of version 1 a limit."""
    (group / "memory.limit_in_bytes").write_text(f"{most}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cached}\n")


def test_limits_of_version_1_hold_along_the_path_of_a_job(machine):
    job, _ = enter_old_job(machine)
    limit_old(job / "step", UNLIMITED, 5 * GIB)
    limit_old(job, 16 * GIB, 6 * GIB, cached=2 * GIB)
    limit_old(machine / "memory", UNLIMITED, 9 * GIB)

    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (32 * GIB, 12 * GIB)


def test_no_limit_of_version_1_is_none(machine):
    job, _ = enter_old_job(machine)
    for group in (job, machine / "memory"):
        limit_old(group, UNLIMITED, 6 * GIB)

    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (32 * GIB, 28 * GIB)


@pytest.mark.parametrize("own", ["/docker/0a1b", "/", "/../outside"])
def test_a_container_of_version_1_has_its_limit(machine, own):
    enter_old_job(machine, own)
    limit_old(machine / "memory", 16 * GIB, 6 * GIB)

    assert host_memory.available_bytes() == 10 * GIB


def test_a_machine_grows_up_to_the_limit_of_version_1(machine):
    enter_old_job(machine)
    limit_old(machine / "memory", 128 * GIB, 4 * GIB)

    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (128 * GIB, 124 * GIB)


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (250000, 3)])
def test_a_job_of_version_1_may_have_a_share_of_the_cores(machine, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    _, job = enter_old_job(machine)
    (job / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (job / "cpu.cfs_period_us").write_text("100000\n")

    assert host_memory.count_cores() == cores


def test_a_container_that_sees_no_more_than_its_own_group_has_its_limit(machine):
    (machine / "own").write_text("0::/../outside\n")
    limit(machine, 16 * GIB, 6 * GIB)

    assert host_memory.available_bytes() == 10 * GIB


def test_memory_that_was_lent_away_counts(machine):
    pages = 128 * GIB // os.sysconf("SC_PAGE_SIZE")
    (machine / "zoneinfo").write_text(
        f"Node 0, zone   Normal\n        spanned  {2 * pages}\n        present  {pages}\n"
    )

    assert host_memory.total_bytes() == 128 * GIB


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1)])
def test_a_container_may_have_a_share_of_the_cores(machine, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    (machine / "cpu.max").write_text(f"{quota}\n")

    assert host_memory.count_cores() == cores


FREED = """
import ctypes, os, sys
from pathlib import Path
from pyg_direct.runtime.host.host_memory import give_back_freed

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
pieces = [libc.malloc(60_000) for _ in range(2000)]
for piece in pieces:
    ctypes.memset(piece, 1, 60_000)
# The last stays, behind which no memory goes back by itself.
for piece in pieces[:-1]:
    libc.free(piece)
before = resident()
give_back_freed()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
                    reason="needs glibc")  # fmt: skip
def test_freed_memory_goes_back():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)

    assert int(done.stdout) > 100_000_000


KEPT = """
import ctypes, sys
from pyg_direct.runtime.host.host_memory import keep_blocks

class MallInfo(ctypes.Structure):
    # As in `tests.soak`, which imports torch and PyG.
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.mallinfo2.restype = ctypes.c_void_p, [ctypes.c_void_p], MallInfo
if sys.argv[1] == "kept":
    keep_blocks()
before = libc.mallinfo2().hblks
piece = libc.malloc(20 << 20)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
                    reason="needs glibc")  # fmt: skip
@pytest.mark.parametrize(("how", "count"), [("kept", "0"), ("given", "1")])
def test_large_blocks_are_not_the_systems_to_give_and_to_take(how, count):
    done = subprocess.run([sys.executable, "-c", KEPT, how], capture_output=True, text=True, check=True)

    # Blocks that the system has given one by one.
    assert done.stdout.strip() == count


def test_c_libraries_without_the_function_are_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: SimpleNamespace())
    host_memory.give_back_freed()
    host_memory.keep_blocks()
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: [][name])
    host_memory.give_back_freed()
    host_memory.keep_blocks()


def test_freed_memory_is_given_back_in_a_thousandth_of_the_time(monkeypatch):
    now, given = [100.0], []

    def give_back():
        given.append(now[0])
        now[0] += 0.01

    monkeypatch.setattr(host_memory, "give_back_freed", give_back)
    monkeypatch.setattr(host_memory, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: now[0]))
    give = host_memory._GivesBack()
    for _ in range(50):
        give()
        now[0] += 0.5

    assert given == pytest.approx([100, 110.51, 121.02], abs=0.5)
