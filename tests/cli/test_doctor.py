"""`pyg-direct doctor` tells of this machine, and finds what is wrong with others."""

import contextlib
import copy
import json
import os
import platform
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Data
from typer.testing import CliRunner

from pyg_direct.cli import machine_report
from pyg_direct.cli.app import app
from pyg_direct.cli.machine_report import (
    Graph,
    can_write,
    collect_facts,
    find_faults,
    judge_plan,
    judge_rates,
    list_outdated,
    plan_placement,
)
from pyg_direct.errors import DeviceError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.memory_placement import describe
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.runtime.cuda.device import Abilities

GB = 10**9
PRODUCTS = Graph(2_449_029, 123_718_280, 100)
PAPERS = Graph(111_059_956, 3_231_371_744, 128)


@pytest.fixture(scope="module")
def facts():
    return collect_facts()


@pytest.fixture
def gpu_machine(facts):
    """Facts about a machine with two GPUs on which nothing is wrong."""
    made = copy.deepcopy(facts)
    gpu = {"index": 0, "name": "GPU", "compute_capability": [9, 0], "total_bytes": 80 * GB, "free_bytes": 79 * GB,
           "unified_without_migration": True, "reads_ordinary_memory": False,
           "pcie": {"current_link_speed": "2.5 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe",
                    "current_link_width": "16", "max_link_width": "16"}}  # fmt: skip
    links = [{"reader": a, "owner": b, "can_read": True, "is_nvlink": True} for a, b in ((0, 1), (1, 0))]
    cuda = {"torch_cuda": "13.0", "torch_hip": None, "driver": "580.65.06", "driver_cuda": "13.0", "has_driver": True,
            "bindings_error": None, "ptx_in_wheel": True, "compiler": None, "usable": True, "reason": None}  # fmt: skip
    return made | {"gpus": [gpu, {**copy.deepcopy(gpu), "index": 1}], "links": links, "cliques": [[0, 1]], "cuda": cuda,
                   "outdated": [], "environment": {}, "optional": {**made["optional"], "numba-cuda": "0.30"},
                   "cpu": {"cores": 16, "torch_threads": 8, "kernel_threads": 16},
                   "cache": {"folder": "~/.cache/pyg_direct", "writable": True}}  # fmt: skip


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", *arguments])


def test_json_tells_the_machine_and_names_nobody(monkeypatch, tmp_path):
    home = tmp_path / "somebody"
    monkeypatch.setattr(platform, "node", lambda: "somebodys-machine")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(home / "caches"))

    done = invoke("--json", "--no-measure", "--nodes", "1000", "--edges", "5000", "--features", "8")

    told = json.loads(done.stdout)
    assert told["cpu"]["cores"] >= 1
    assert 0 < told["memory"]["available_bytes"] <= told["memory"]["total_bytes"]
    assert told["packages"]["torch"] == metadata.version("torch")
    assert len(told["gpus"]) == torch.cuda.device_count()
    assert told["plan"]["line"].startswith("topology 48.0 KB")
    assert done.exit_code == any(finding["level"] == "fix" for finding in told["findings"])
    assert told["cache"] == {"folder": "~/caches", "writable": True}
    assert "somebody" not in done.stdout


def test_one_look_gives_tables_and_json(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr(machine_report, "collect_facts", lambda: looks.append(1) or collect_facts())

    done = invoke("--no-measure", "--out", str(tmp_path / "machine.json"))

    told = json.loads((tmp_path / "machine.json").read_text())
    assert len(looks) == 1
    assert (
        f"{told['memory']['total_bytes'] / 1e9:.1f} GB, {told['memory']['available_bytes'] / 1e9:.1f} GB free"
        in done.stdout
    )
    assert all(finding["level"] in done.stdout for finding in told["findings"])
    assert done.exit_code == int(any(finding["level"] == "fix" for finding in told["findings"]))


def test_a_file_that_cannot_be_written_is_bad_usage(tmp_path, monkeypatch):
    done = invoke("--no-measure", "--out", str(tmp_path))

    assert done.exit_code == 2
    assert "--out must be a file" in done.output
    # Before anything is looked at, where that is known.
    monkeypatch.setattr(machine_report, "collect_facts", lambda: pytest.fail("looked at the machine"))
    done = invoke("--no-measure", "--out", str(tmp_path / "nowhere" / "machine.json"))
    assert done.exit_code == 2
    assert "--out must be a file in a folder" in done.output


def test_tables_tell_every_part(monkeypatch, gpu_machine):
    rates = {"gpu": 0, "table_bytes": 2 << 30, "row_bytes": 512, "copy": 55e9, "unified_random": 48e9,
             "unified_ascending": 49e9, "pinned_random": 20e9, "pinned_ascending": None, "seconds": 4.2}  # fmt: skip
    monkeypatch.setattr(machine_report, "collect_facts", lambda: gpu_machine)
    monkeypatch.setattr(machine_report, "choose_host_memory", lambda index: "unified")
    monkeypatch.setattr(machine_report, "measure_host_memory", lambda index: rates)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    done = invoke("--nodes", str(PAPERS.num_nodes), "--edges", str(PAPERS.num_edges), "--features", "128")

    assert done.exit_code == (1 if "of host memory, of which" in done.output else 0)
    for words in ("580.65.06, CUDA up to 13.0", "compiled in the wheel", "2.5 GT/s PCIe, 16 lanes; at most 32.0 GT/s",
                  "0 reads 1", "over NVLink", "0, 1", "55.0 GB/s", "48.0 GB/s at random, 49.0 GB/s in ascending",
                  "20.0 GB/s at random, not measured", "x 56.9 GB unified ("):  # fmt: skip
        assert words in done.output, words


def test_nothing_is_to_fix_where_all_is_well(gpu_machine):
    assert find_faults(gpu_machine) == []


@pytest.mark.parametrize(
    ("where", "value", "level", "words"),
    [
        ("cuda.torch_cuda", None, "fix", "torch is built without CUDA"),
        ("cuda.torch_hip", "6.4", "fix", "ROCm 6.4"),
        ("cuda.reason", "driver too old", "fix", "torch cannot use the GPU: driver too old"),
        ("cuda.bindings_error", "needs the CUDA bindings", "fix", "needs the CUDA bindings"),
        ("cuda.ptx_in_wheel", False, "fix", "nothing to compile with"),
        ("cuda.has_driver", False, "note", "no NVIDIA driver"),
        ("environment.CUDA_VISIBLE_DEVICES", "", "note", "CUDA_VISIBLE_DEVICES hides all GPUs"),
        ("environment.NUMBA_ENABLE_CUDASIM", "1", "hint", "simulator"),
        ("gpus.0.compute_capability", [7, 0], "fix", "compute capability 7.0, and needs 7.5"),
        ("gpus.1.unified_without_migration", False, "hint", "concurrentManagedAccess is 0"),
        ("gpus.1.pcie.current_link_width", "8", "hint", "GPU 1 (GPU) uses 8 PCIe lanes of 16"),
        ("links.0.can_read", False, "note", "0 and 1"),
        ("cpu.kernel_threads", 1, "hint", "CPU kernels use 1 of 16 cores"),
        ("cpu.kernel_threads", 64, "hint", "64 threads, but this process may use 16 cores"),
        ("cache.writable", False, "fix", "cannot be written"),
        ("packages.numba", None, "fix", "numba is missing"),
        ("outdated", ["numpy must be <2.5, got 2.5.0"], "fix", "numpy must be <2.5"),
    ],
)
def test_what_is_wrong_is_found(gpu_machine, where, value, level, words):
    *path, last = where.split(".")
    place = gpu_machine
    for key in path:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value

    found = find_faults(gpu_machine)

    assert [finding.level for finding in found] == [level]
    assert words in found[0].what
    assert found[0].how


def test_a_compiler_without_the_libraries_it_calls_or_they_without_it_compile_nothing(gpu_machine):
    gpu_machine["cuda"] |= {"ptx_in_wheel": False, "compiler": "nvidia-nvvm"}
    both = find_faults(gpu_machine)

    gpu_machine["optional"]["numba-cuda"] = None
    (found,) = find_faults(gpu_machine)

    assert both == []
    assert found.how == 'pip install ".[compile13]" in the clone of pyg_direct'


@pytest.mark.parametrize(
    ("driver", "words"), [("12.4", "update the driver"), ("13.1", "nvidia-smi"), (None, "nvidia-smi")]
)
def test_an_old_driver_is_told_from_one_that_does_not_work(gpu_machine, driver, words):
    gpu_machine["cuda"] |= {"reason": "no", "driver_cuda": driver}

    assert words in find_faults(gpu_machine)[0].how


def test_a_gpu_and_its_slot_are_told(monkeypatch, tmp_path):
    """With a driver of a machine that has one GPU, in a slot that the system tells of."""
    slot = tmp_path / "0001:3b:00.0"
    slot.mkdir()
    (slot / "current_link_width").write_text("8\n")
    (slot / "max_link_width").write_text("16\n")
    numbers = {"DOMAIN": 1, "BUS": 0x3B, "DEVICE": 0}
    names = {f"CU_DEVICE_ATTRIBUTE_PCI_{name}_ID": number for name, number in numbers.items()}
    monkeypatch.setattr(machine_report, "_SLOTS", tmp_path)
    monkeypatch.setattr(
        machine_report, "load_driver", lambda: SimpleNamespace(CUdevice_attribute=SimpleNamespace(**names))
    )
    monkeypatch.setattr(machine_report, "call", lambda name, *args: args[0] if name == "cuDeviceGetAttribute" else 7)
    monkeypatch.setattr(machine_report, "abilities", lambda index: Abilities((9, 0), 132, True, False, 13000, 233_472))
    monkeypatch.setattr(machine_report, "free_bytes", lambda index: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda index: SimpleNamespace(name="GPU", total_memory=9))  # fmt: skip

    told = machine_report._ask_gpu(0)

    link = {"current_link_speed": None, "max_link_speed": None, "current_link_width": "8", "max_link_width": "16"}
    assert told == {"index": 0, "name": "GPU", "compute_capability": [9, 0], "total_bytes": 9, "free_bytes": 5,
                    "unified_without_migration": True, "reads_ordinary_memory": False, "pcie": link}  # fmt: skip


def test_what_cannot_be_measured_is_left_out(monkeypatch):
    """With a GPU that has no unified memory."""

    def fill(num_bytes, placement):
        if placement == "unified":
            raise DeviceError("concurrentManagedAccess is 0")
        return None, torch.zeros(num_bytes // 4, dtype=torch.int32)

    monkeypatch.setattr(machine_report, "_TABLE_BYTES", machine_report._LEAST_TABLE)
    monkeypatch.setattr(machine_report, "_load_kernel", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr("pyg_direct.bench.gather.fill_host_table", fill)
    monkeypatch.setattr(
        "pyg_direct.bench.gather.time_cold_rows", lambda table, width, ascending: [1e9, 3e9 + ascending]
    )
    monkeypatch.setattr("pyg_direct.bench.limits.pinned_copy_rate", lambda num_bytes, repeats: 55e9)

    rates = machine_report.measure_host_memory(0)

    assert rates.pop("seconds") < 10
    assert rates == {"gpu": 0, "table_bytes": 64 << 20, "row_bytes": 512, "copy": 55e9, "unified_random": None,
                     "unified_ascending": None, "pinned_random": 2e9, "pinned_ascending": 2e9 + 0.5}  # fmt: skip


def test_torch_on_one_thread_is_told_where_somebody_said_so(gpu_machine):
    gpu_machine["environment"] = {"OMP_NUM_THREADS": "1"}
    gpu_machine["cpu"]["torch_threads"] = 1

    assert [finding.what for finding in find_faults(gpu_machine)] == ["torch uses 1 of 16 cores"]


def test_a_slower_choice_of_host_memory_is_told():
    rates = {"unified_random": 10e9, "pinned_random": 30e9}

    found = list(judge_rates(rates, "unified"))

    assert "pinned memory is read 3.0 times as fast as unified" in found[0].what
    assert list(judge_rates(rates, "pinned")) == []
    assert list(judge_rates({"unified_random": None, "pinned_random": 30e9}, "unified")) == []


def test_packages_of_other_versions_are_told(monkeypatch):
    monkeypatch.setattr("pyg_direct.cli.machine_report.metadata.requires", lambda name: [
        "numpy>=999", "torch>=2.6", "no-such-package>=1", 'no-such-extra; extra == "cu13"'])  # fmt: skip

    found = list_outdated()

    assert [sentence.partition(" must")[0] for sentence in found] == ["numpy", "no-such-package"]


def test_a_checkout_that_is_not_installed_asks_for_no_versions(monkeypatch):
    def refuse(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("pyg_direct.cli.machine_report.metadata.requires", refuse)

    assert list_outdated() == []


def test_a_folder_that_cannot_be_made_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")

    assert can_write(tmp_path / "new" / "below")
    assert not can_write(tmp_path / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_below_one_of_somebody_else_cannot_be_written(monkeypatch, tmp_path):
    stat = os.stat

    def refuse(path, *args, **options):
        if "theirs" in str(path):
            raise PermissionError("no right to enter")
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(machine_report.tempfile, "TemporaryFile", lambda dir: refuse(f"{dir}/theirs"))

    assert not can_write(tmp_path / "theirs" / "below")


@pytest.mark.parametrize("num_edges", [0, 1, 4000])
def test_the_planned_topology_is_as_large_as_a_real_one(num_edges):
    edge_index = torch.randint(700, (2, num_edges))

    assert Graph(700, num_edges).topology_bytes == CSRTopo(edge_index, num_nodes=700).num_bytes


@pytest.mark.parametrize(
    ("graph", "free", "expected"),
    [
        (PRODUCTS, None, ["cpu", "cpu", "cpu"]),
        (PRODUCTS, 80 * GB, ["cuda", "cuda", "cuda"]),
        (PRODUCTS, int(2.4 * GB), ["cuda", "unified", "cuda"]),
        (PAPERS, 140 * GB, ["cuda", "cuda", "cuda"]),
        (PAPERS, 80 * GB, ["cuda", "unified", "cuda"]),
        (PAPERS, 16 * GB, ["unified", "unified", "cuda"]),
    ],
)
def test_the_plan_fills_the_gpu_from_the_topology_on(graph, free, expected):
    plan = plan_placement(graph, free)

    assert [(part.name, part.where) for part in plan.parts] == list(zip(("topology", "x", "y"), expected, strict=True))
    total = sum(part.num_bytes for part in plan.parts)
    assert plan.gpu_bytes <= (free or 0)
    assert plan.host_bytes <= total <= plan.gpu_bytes + plan.host_bytes
    assert "fix" in {finding.level for finding in judge_plan(plan, plan.host_bytes - 1)} or plan.host_bytes == 0
    assert list(judge_plan(plan, plan.host_bytes)) == []


def test_a_graph_that_does_not_fit_is_something_to_fix(monkeypatch, tmp_path):
    # A cache that cannot be written would be told before.
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))

    done = invoke("--json", "--no-measure", "--nodes", "10000000000", "--edges", "90000000000", "--gpu-memory", "80G")

    assert done.exit_code == 1
    worst = json.loads(done.stdout)["findings"][0]
    assert worst["level"] == "fix"
    assert "of host memory, of which" in worst["what"]
    assert "pyg-direct partition" in worst["how"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--nodes", "5"], "--nodes and --edges"), (["--features", "5"], "must come with"),
     (["--gpu-memory", "8G"], "must come with"),
     (["--nodes", "1", "--edges", "1", "--gpu-memory", "much"], "--gpu-memory must look like"),
     (["--nodes", "-1", "--edges", "1"], "got '-1'"), (["--nodes", "1e6", "--edges", "1"], "got '1e6'"),
     (["--nodes", "9" * 400, "--edges", "1"], "below 2^63"), (["--nodes", "1", "--edges", "9" * 5000], "below 2^63"),
     (["--nodes", "1", "--edges", "1", "--features", str(2**63)], "got '9223372036854775808'"),
     (["--nodes", "1", "--edges", "1", "--gpu-memory", f"{'9' * 400}G"], "--gpu-memory must be less than 2^63 bytes")],
)  # fmt: skip
def test_bad_usage_is_told(arguments, words):
    done = invoke(*arguments)

    assert done.exit_code == 2
    assert words in done.output


@pytest.mark.gpu
def test_a_gpu_is_measured_within_ten_seconds():
    done = invoke("--json")

    told = json.loads(done.stdout)
    (rates,) = told["measured"]
    assert rates["seconds"] < 10
    assert rates["copy"] > 0
    assert rates["pinned_random"] > 0
    assert told["host_memory"] in ("unified", "pinned")
    assert told["gpus"][0]["free_bytes"] > 0


@pytest.mark.gpu
def test_the_plan_is_what_a_loader_announces(caplog):
    num_nodes = 50_000
    data = Data(x=torch.rand(num_nodes, 32), y=torch.zeros(num_nodes, dtype=torch.int64),
                edge_index=torch.randint(num_nodes, (2, 400_000)))  # fmt: skip
    plan = plan_placement(Graph(num_nodes, 400_000, 32), torch.cuda.mem_get_info()[0])

    with caplog.at_level("INFO", "pyg_direct"):
        next(iter(NeighborLoader(data, [3], batch_size=8)))

    said = "".join(record.getMessage() for record in caplog.records).replace("on cuda:0", "cuda")
    for part in plan.parts:
        assert describe([part]) in said


def test_brackets_in_paths_are_shown_as_they_are(monkeypatch, tmp_path):
    folder = tmp_path / "au[" / "red]x"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(folder))

    done = invoke("--no-measure")

    assert done.exit_code in (0, 1), done.output
    assert "red]x" in done.stdout
