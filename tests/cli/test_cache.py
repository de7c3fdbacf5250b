"""`pyg-direct cache` shows what is kept, and clears that alone."""

import json

import pytest
from typer.testing import CliRunner

from pyg_direct.cli import cache as cache_module
from pyg_direct.cli.app import app
from pyg_direct.compiler.code_cache import cache_folder, cache_name

OLD = "0123456789abcdef"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A cache with kernels of this version, old ones, facts, and what is none of it."""
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))
    cache_folder.cache_clear()
    current = cache_folder("cpu").parent
    for folder, size in ((current / "gpu", 10), (tmp_path / OLD / "cpu", 1000)):
        folder.mkdir(parents=True)
        (folder / "kernel.ptx").write_bytes(bytes(size))
    (tmp_path / "rates.json").write_text('{"GPU": 3}')
    (tmp_path / "rates.json.lock").touch()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "fedcba9876543210").symlink_to(tmp_path / "data")
    yield tmp_path
    cache_folder.cache_clear()


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["cache", *arguments])


def test_what_is_kept_is_shown(root):
    done = invoke("--json")

    told = json.loads(done.stdout)
    assert done.exit_code == 0
    assert told["folder"] == str(root)
    found = {entry["name"]: (entry["kind"], entry["files"], entry["bytes"], entry["facts"])
             for entry in told["entries"]}  # fmt: skip
    current = cache_name()
    assert found == {OLD: ("old", 1, 1000, None), current: ("kernels", 1, 10, None),
                     "rates.json": ("facts", 1, 10, {"GPU": 3}), "broken.json": ("facts", 1, 1, None)}  # fmt: skip
    table = invoke().stdout
    assert all(name in table for name in found)


@pytest.mark.parametrize("only", [None, "kernels", "old", "facts"])
def test_what_is_meant_is_cleared_and_nothing_else(root, only):
    current = cache_name()
    names = {"kernels": {current}, "old": {OLD}, "facts": {"rates.json", "rates.json.lock", "broken.json"}}
    gone = set().union(*names.values()) if only is None else names[only]
    before = {path.name for path in root.iterdir()}

    done = invoke("clear", *([] if only is None else ["--only", only]))

    assert done.exit_code == 0
    assert {path.name for path in root.iterdir()} == before - gone
    assert (root / "thesis.txt").read_text() == "mine"


def test_what_cannot_be_deleted_is_told(root, monkeypatch):
    def refuse(path):
        raise PermissionError("no right")

    monkeypatch.setattr(cache_module.shutil, "rmtree", refuse)

    done = invoke("clear", "--only", "old", "--json")

    assert done.exit_code == 1
    assert json.loads(done.stdout)["failed"] == [f"{root / OLD}: no right"]
    told = invoke("clear", "--only", "old").stdout
    assert f"cleared 0 of 1 in {root}" in told
    assert f"{root / OLD}: no right" in told


def test_a_folder_that_is_not_there_holds_nothing(root, monkeypatch):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(root / "none"))
    cache_folder.cache_clear()

    assert json.loads(invoke("--json").stdout)["entries"] == []
    assert not (root / "none").exists()


def test_kernels_that_cannot_be_written_are_of_this_version(root, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    cache_folder.cache_clear()

    kinds = {entry["name"]: entry["kind"] for entry in json.loads(invoke("--json").stdout)["entries"]}

    assert kinds[cache_name()] == "kernels"


@pytest.mark.parametrize("action", ["show", "clear"])
def test_a_folder_that_cannot_be_read_is_told(root, monkeypatch, action):
    def refuse(path):
        raise PermissionError("no right")

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)

    done, as_json = invoke(action), invoke(action, "--json")

    assert (done.exit_code, as_json.exit_code) == (1, 1)
    assert f"{root}: no right" in done.stdout
    assert json.loads(as_json.stdout)["failed"] == [f"{root}: no right"]


def test_an_unknown_action_is_bad_usage():
    assert invoke("burn").exit_code == 2


def test_brackets_in_paths_are_shown_as_they_are(monkeypatch, tmp_path):
    folder = tmp_path / "au[" / "red]x"
    folder.mkdir(parents=True)
    (folder / "[bold]rates.json").write_text("{}")
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(folder))

    shown, cleared = invoke(), invoke("clear")

    assert (shown.exit_code, cleared.exit_code) == (0, 0)
    assert "au[/red]x" in shown.stdout.replace("\n", "")
    assert "[bold]rates.json" in shown.stdout
    assert "au[/red]x" in cleared.stdout.replace("\n", "")


def test_only_what_could_be_deleted_is_counted(root, monkeypatch):
    plain = cache_module.remove

    def refuse(entry):
        if entry.kind is cache_module.Kind.old:
            raise OSError("no right")
        plain(entry)

    monkeypatch.setattr(cache_module, "remove", refuse)

    done = invoke("clear")

    assert done.exit_code == 1
    assert "cleared 3 of 4" in done.stdout
    assert "21 B" in done.stdout


def test_old_kernels_are_told_of_where_there_are_some(root):
    assert "--only old" in invoke().stdout

    invoke("clear", "--only", "old")

    assert "--only old" not in invoke().stdout
