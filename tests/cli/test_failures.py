"""Errors of commands are told in the words of their options, with the file and what to do."""

import errno
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pyg_direct.bench import measurements
from pyg_direct.cli import compile_ahead, machine_report
from pyg_direct.cli.app import app
from pyg_direct.cli.failures import explain_missing, explain_write, name_options
from pyg_direct.distributed.partitioning.files import ArrayFile, OpenFiles
from pyg_direct.distributed.partitioning.partition_graph import Builder
from pyg_direct.errors import FileError


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "500"}).invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("batch_size must be at least 1, got 0", "--batch-size must be at least 1, got 0"),
        ("memory must be at least 16, got memory=3", "--memory must be at least 16, got --memory=3"),
        ("rows must fit into memory, with num_parts", "rows must fit into memory, with --num-parts"),
        ("my_batch_size must be at least 1", "my_batch_size must be at least 1"),
        ("out must not exist yet", "OUT must not exist yet"),
    ],
)
def test_parameters_are_written_as_options(message, expected):
    options = {"batch_size": "--batch-size", "memory": "--memory", "num_parts": "--num-parts", "out": "OUT"}

    assert name_options(message, options) == expected


GRAPH = "doctor --nodes 5 --edges 5"
PARTITION = "partition {out} --edges {edges} --num-parts 2"


@pytest.mark.parametrize(
    ("line", "words", "never"),
    [
        ("run --feature-cache 20 {program}", "--feature-cache must have a unit", "feature_cache"),
        ("run --feature-cache 200% {program}", "--feature-cache must be at most 100%", "feature_cache"),
        ("run --placement gpu {program}", "--placement must be one of auto, cuda", " placement must"),
        ("run --device tpu {program}", "--device must", " device must"),
        (f"{GRAPH} --gpu-memory much", "--gpu-memory must look", "gpu_memory"),
        (f"{GRAPH} --gpu-memory 80", "--gpu-memory must have a unit, such as 80G, got '80'", "gpu_memory"),
        ("partition {out} --edges {edges} --num-parts 0", "--num-parts must", "num_parts"),
        (f"{PARTITION} --memory 1", "--memory must", ": memory"),
        (f"{PARTITION} --num-nodes 2", "--edges[", ": edges"),
        (f"{PARTITION} --num-nodes x", "--num-nodes", "num_nodes"),
        (f"{PARTITION} --direction up", "--direction must be", ": direction"),
        (f"{PARTITION} --node-rows x={{edges}}", "--node-rows", "node_rows"),
    ],
)
def test_bad_values_are_told_under_the_name_that_was_typed(tmp_path, line, words, never):
    np.save(tmp_path / "edges.npy", np.array([[0, 1, 2], [1, 2, 9]]))
    places = {"out": tmp_path / "parts", "edges": tmp_path / "edges.npy", "program": __file__}

    done = invoke(*[word.format(**places) for word in line.split()])

    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert never not in done.stderr
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, ["the disk is full", "MB are free", "Delete files", "--out"]),
     (errno.EDQUOT, ["the disk is full"]),
     (errno.EACCES, ["no right to write there", "Change the rights of", "--out"]),
     (errno.EROFS, ["no right to write there"]),
     (errno.EIO, ["cannot be written", "--out"])],
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_told_with_what_to_do(tmp_path, number, words):
    sentence = explain_write(OSError(number, os.strerror(number)), tmp_path / "rows.json", "--out")

    assert sentence.startswith(f"{tmp_path / 'rows.json'} cannot be written: ")
    assert all(word in sentence for word in words), sentence


def test_the_file_that_the_system_names_counts():
    error = PermissionError(errno.EACCES, "Permission denied", "/theirs/part-0")

    assert explain_write(error, "/mine", "OUT").startswith("/theirs/part-0 cannot be written")
    assert explain_write(FileError("path must lie where 5 bytes are free"), "/mine", "OUT") == (
        "path must lie where 5 bytes are free"
    )


def test_packages_that_nothing_needs_are_not_named():
    assert explain_missing(ModuleNotFoundError("No module named 'mine'", name="mine")) is None


@pytest.fixture(params=[errno.ENOSPC, errno.EACCES], ids=["full", "no right"])
def refuse(request):
    """Raises as the system does, without the name of a file, as it does while it writes."""

    def raise_error(*args, **kwargs):
        raise OSError(request.param, os.strerror(request.param))

    raise_error.words = {errno.ENOSPC: "the disk is full", errno.EACCES: "no right to write there"}[request.param]
    return raise_error


def test_bench_shows_what_it_cannot_keep(monkeypatch, tmp_path, refuse):
    monkeypatch.setattr(measurements, "measure", lambda *args: ([measurements.Row.of("rows", "ours", "GB/s", [1])], []))
    monkeypatch.setattr("pyg_direct.cache_folder.os.fsync", refuse)

    shown, as_json = invoke("bench", "--out", tmp_path), invoke("bench", "--out", tmp_path, "--json")

    assert (shown.exit_code, as_json.exit_code) == (1, 1)
    assert "ours" in shown.stdout
    assert f"not written: {tmp_path}/pyg_direct_bench_" in shown.stdout
    assert refuse.words in shown.stdout
    told = json.loads(as_json.stdout)
    assert told["file"] is None
    assert refuse.words in told["failed"][0]
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_the_file_that_it_cannot_write(monkeypatch, tmp_path, refuse):
    monkeypatch.setattr(machine_report, "examine", lambda *args, **options: {"findings": []})
    monkeypatch.setattr(Path, "write_text", refuse)

    done = invoke("doctor", "--out", tmp_path / "machine.json")

    assert done.exit_code == 2
    assert f"{tmp_path / 'machine.json'} cannot be written" in done.stderr
    assert refuse.words in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one(monkeypatch):
    monkeypatch.setattr(machine_report, "examine", lambda *args, **options: {"findings": []})

    done = invoke("doctor", "--out", "/dev/full")

    assert done.exit_code == 2
    assert "/dev/full cannot be written: the disk is full" in done.stderr


def test_warm_names_the_folder_that_it_cannot_write(monkeypatch, tmp_path, refuse):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead.tempfile, "TemporaryFile", refuse)

    done = invoke("warm", "--only", "uniform")

    assert done.exit_code == 1
    assert f"{tmp_path / 'cache'} cannot be written" in done.stderr
    assert refuse.words in done.stderr
    assert "PYG_DIRECT_CACHE" in done.stderr


def test_partition_names_the_file_that_it_cannot_write(monkeypatch, tmp_path, refuse):
    np.save(tmp_path / "edges.npy", np.arange(40).reshape(2, 20) % 7)
    arguments = ["partition", tmp_path / "parts", "--edges", tmp_path / "edges.npy", "--num-parts", "2"]

    with monkeypatch.context() as patched:
        patched.setattr(OpenFiles, "at_end", refuse)
        done = invoke(*arguments)

    assert done.exit_code == 1
    assert refuse.words in done.stderr
    assert str(tmp_path / "parts.partial" / "") in done.stderr
    assert "the same command goes on from there" in done.stderr
    assert invoke(*arguments).exit_code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the size of a file, as Linux has them")
def test_rows_that_do_not_fit_are_told_by_file(tmp_path):
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = ArrayFile(tmp_path / "rows", np.int64, None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            file.append(np.arange(1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        file.close()

    assert caught.value.filename == str(tmp_path / "rows")


def test_a_folder_in_which_nothing_was_done_is_taken_away(monkeypatch, tmp_path):
    np.save(tmp_path / "edges.npy", np.arange(40).reshape(2, 20) % 7)

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("pyg_direct.distributed.partitioning.partition_graph.Journal", stop)

    done = invoke("partition", tmp_path / "parts", "--edges", tmp_path / "edges.npy", "--num-parts", "2")

    assert done.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["edges.npy"]


@pytest.mark.parametrize(("parts", "words"), [("2", "holds work of an earlier run: going on from there"),
                                              ("3", "was begun with other arguments or cannot be gone on with: it is "
                                               "begun anew")])  # fmt: skip
def test_partition_says_whether_it_goes_on(monkeypatch, tmp_path, caplog, parts, words):
    np.save(tmp_path / "edges.npy", np.arange(40).reshape(2, 20) % 7)
    arguments = ["partition", tmp_path / "parts", "--edges", tmp_path / "edges.npy", "--num-parts"]

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Builder, "build", stop)
        assert invoke(*arguments, "2").exit_code != 0
    with caplog.at_level("INFO", logger="pyg_direct.notice"):
        done = invoke(*arguments, parts)

    assert done.exit_code == 0
    assert f"{tmp_path / 'parts.partial'} {words}" in caplog.messages
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.npy", "parts"]
