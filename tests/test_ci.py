"""CI reports the tests it left out, and runs the skipped ones of a step in another."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pyg_direct.cli import warm

ROOT = Path(__file__).parents[1]
CI = ROOT / ".ci"
# Files that need PyTorch Frame.
FRAMES = ["tests/loader/collate/attributes/test_frames.py", "tests/benchmarks/test_databases.py",
          "tests/nn/replay/model_replay/test_frames.py"]  # fmt: skip


@pytest.mark.parametrize(
    ("without", "code"),
    [("", 1), ("newest-3.12", 77), ("oldest newest-3.12", 77), ("newest-3.13", 1), ("newest-3", 1)],
)
def test_an_environment_that_cannot_be_had_fails_unless_it_is_listed(tmp_path, without, code):
    root = tmp_path / "build/ci/versions"
    root.mkdir(parents=True)
    (root / "newest-3.12.missing").touch()
    (root / "newest-3.12.log").write_text("there is no Python 3.12\n")
    (tmp_path / ".ci").mkdir()
    shutil.copy(CI / "versions", tmp_path / ".ci")

    done = subprocess.run(["bash", tmp_path / ".ci/versions", "test", "newest-3.12"], capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "PYG_DIRECT_CI_WITHOUT": without}, check=False)  # fmt: skip

    assert done.returncode == code, done.stderr
    assert "there is no Python 3.12\nNOT TESTED: the environment newest-3.12" in done.stdout
    assert ("PYG_DIRECT_CI_WITHOUT" in done.stdout) == (code == 1)


def test_an_environment_that_could_not_be_had_is_tried_once_more(tmp_path):
    root = tmp_path / "build/ci/versions"
    (root / "oldest/lib").mkdir(parents=True)
    (root / "newest-3.12.missing").touch()
    (root / "newest-3.12.log").write_text("No space left on device\n")
    (tmp_path / ".ci").mkdir()
    shutil.copy(CI / "versions", tmp_path / ".ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # A Python whose environments have a Python and a pip that succeed in all.
    python = tmp_path / "bin/python3.12"
    python.parent.mkdir()
    python.write_text("""#!/bin/bash
if [ "$1$2" = -mvenv ]; then
    mkdir -p "$3/bin"
    printf '#!/bin/bash\\ncat\\n[ "$2" != pytest ] || echo tested' > "$3/bin/python"
    printf '#!/bin/bash\\n' > "$3/bin/pip"
    chmod +x "$3/bin/python" "$3/bin/pip"
fi
""")
    python.chmod(0o755)

    path = f"{python.parent}:/usr/bin:/bin"
    done = subprocess.run(["bash", tmp_path / ".ci/versions", "test", "newest-3.12"], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, env={"PATH": path}, check=False)  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    first, _, second = done.stdout.partition("== newest-3.12, once more\n")
    assert "No space left on device\nNOT TESTED" in first
    assert "\ntested\n" in second
    assert [path for path in root.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(("ends_with", "code"), [("exit 0", 0), ("exit 1", 1), ("exit 77", 77), ("kill -9 $PPID", 2)])
def test_tests_with_other_versions_end_their_step_as_they_ended_beside_others(tmp_path, ends_with, code):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/versions").write_text(f"#!/bin/bash\necho tested $*\n{ends_with}\n")
    (tmp_path / ".ci/versions").chmod(0o755)
    named = "begin_versions test_versions wait_for"
    program = f"""
eval "$(for name in {named}; do sed -n "/^$name() {{/,/^}}/p" {CI}/run; done)"
export -f {named}
bash -uo pipefail -ec begin_versions > versions.log 2>&1 &
versions_tests=$! bash -uo pipefail -ec test_versions
"""

    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "wheels": f"{tmp_path}"}, check=False)  # fmt: skip

    assert done.returncode == code, done.stderr
    assert "tested test oldest newest-3.12 newest-3.13\n" in done.stdout


def test_the_wheels_environment_borrows_nothing():
    build = (CI / "run").read_text().partition("build_wheel() {")[2].partition("\n}")[0]
    clean, _, later = build.partition('python3 -m venv "$logs/venv"')[2].partition('touch "$logs/venv/ready"')

    assert "pip" in clean
    assert "--no-deps" not in clean
    # Then the wheel itself takes the place of the one without kernels.
    assert re.search(r'venv/bin/pip" install .* "\$logs"/dist/pyg_direct-\*.whl\n', later)
    assert ".pth" not in build


def test_what_is_skipped_for_want_of_a_package_is_run_by_another_step():
    lines = (ROOT / "tests/allowed_skips.txt").read_text().splitlines()
    listed = [line.split(" | ") for line in lines if not line.startswith("#")]
    run = (CI / "run").read_text()
    program = "eval \"$(sed -n '/^list_ray_files() {/,/^}/p' .ci/run)\"; list_ray_files"
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    files = {f"{path.relative_to(ROOT)}": path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for package in ("ray", "lightning", "torch_frame"):
        skipping = {file for file, text in files.items() if f'reason="needs {package}"' in text}
        assert skipping == {re.sub("::.*", "", test) for test, reason in listed if reason == f"needs {package}"}
        elsewhere = {*FRAMES, *(file for file in files if "/guides/" in file)}
        assert skipping <= {*done.stdout.split(), *elsewhere}
    assert re.search(r"^    PYTHONPATH=\$PWD .* -m pytest .* \\\n        -n 3 \$\(list_ray_files\)$", run, re.M)
    assert re.search(rf"-m pytest \\\n        {' '.join(FRAMES)}$", run, re.M)
    assert re.search(r"-o pythonpath= tests/guides\) \|\| failed=1$", run, re.M)
    assert {f"test_{name}" for name in ("ray", "sparse", "wheel")} <= {*re.findall(r"^step \w+ \d+m (\w+)$", run, re.M)}


def test_files_that_ci_names_are_there():
    named = set(re.findall(r"tests/[\w/{},]+\.py", (CI / "versions").read_text() + (CI / "run").read_text()))

    assert len(named) > 10
    for name in named:
        pieces = re.split(r"[{,}]", name) if "{" in name else [name]
        names = [name] if len(pieces) == 1 else [pieces[0] + piece + pieces[-1] for piece in pieces[1:-1]]
        assert all((ROOT / one).exists() for one in names), name


def load_programs():
    spec = importlib.util.spec_from_file_location("small_programs", CI / "small_programs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAMS = load_programs()


def test_the_parts_of_listed_loops_are_those_of_the_programs():
    assert tuple(PROGRAMS.CASES) == warm.PARTS


@pytest.mark.slow
@pytest.mark.parametrize("name", warm.PARTS)
def test_every_small_program_runs(name):
    PROGRAMS.run_case(name)
