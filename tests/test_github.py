"""What GitHub and other tools read says the same as the files that it is about. `.github/lint` checks its form."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:
    # Python 3.10, where pytest brings it.
    import tomli as tomllib

import pyg_direct
from pyg_direct.cli.app import app, main
from pyg_direct.cli.warm import read_architecture
from pyg_direct.compiler.nvrtc import PTX_VERSIONS

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


def load_script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def matrix():
    return load_script(GITHUB / "version_matrix.py")


@pytest.fixture(scope="module")
def cases(matrix):
    return matrix.list_cases(matrix.NOXFILE.read_text())


def test_the_matrix_is_the_one_of_nox(cases):
    script = GITHUB / "version_matrix.py"

    printed = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True, check=True).stdout

    entries = json.loads(printed)
    assert [(entry["python"], entry["versions"]) for entry in entries] == cases
    # As nox names them: the parameters, joined.
    assert {entry["session"] for entry in entries} == {f"tests({', '.join(case)})" for case in cases}
    workflow = (GITHUB / "workflows/versions.yml").read_text()
    assert "version_matrix.py" in workflow
    assert {"python", "versions", "session"} == set(re.findall(r"\{\{ matrix\.(\w+) \}\}", workflow))


def test_every_python_that_the_package_claims_is_tested(cases):
    claimed = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text}

    assert {python for python, _ in cases} == claimed
    assert f">={min(claimed, key=lambda python: int(python[2:]))}" == PROJECT["requires-python"]


def test_what_ci_tests_a_part_of_is_a_case_of_nox(cases):
    text = (ROOT / ".ci/versions").read_text()
    names = re.search(r'^cases="(.+)"$', text, re.M)[1].split()
    oldest = re.search(r"python=\$\(find_python (3\.\d+)", text)[1]

    found = {(oldest, "oldest") if name == "oldest" else (name.partition("-")[2], "newest") for name in names}

    assert found <= set(cases)
    assert len(found) == len(names)
    steps = (ROOT / ".ci/run").read_text()
    assert all(name in steps for name in names)


def test_the_workflow_has_the_pythons_that_ci_looks_for():
    workflow = (GITHUB / "workflows/ci.yml").read_text()
    installed = re.findall(r"^ +(3\.\d+)$", workflow, re.M)
    names = re.search(r'^cases="(.+)"$', (ROOT / ".ci/versions").read_text(), re.M)[1].split()

    assert {name.partition("-")[2] for name in names if "-" in name} | {"3.10"} <= set(installed)
    # The last one is `python3`, which constraints.txt is made for.
    assert f"Python {installed[-1]}" in (ROOT / "constraints.txt").read_text().splitlines()[0]


def test_workflows_call_what_people_call_themselves():
    workflow = (GITHUB / "workflows/ci.yml").read_text()

    runs = re.findall(r"run: (\.\S+)$", workflow, re.M)
    assert runs == [".ci/run", ".github/lint"]
    assert all((ROOT / run).stat().st_mode & 0o100 for run in runs)
    for path in (GITHUB / "workflows").iterdir():
        # A tag of a release, not a branch that somebody may write to.
        assert all(re.fullmatch(r"v\d+(\.\d+)*", tag) for tag in re.findall(r"uses: \S+@(\S+)", path.read_text()))
        assert path.read_text().count("timeout-minutes") == path.read_text().count("runs-on")


def test_lint_has_its_tools_pinned():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (GITHUB / "lint.txt").read_text(), re.M))
    called = set(re.findall(r'^(?:check\(\) \{ )?"\$tools/bin/([\w-]+)"', (GITHUB / "lint").read_text(), re.M))

    assert {name.removesuffix("-bin") for name in pins} == called - {"pip"}
    forms = {path.stem for path in (GITHUB / "ISSUE_TEMPLATE").iterdir()} - {"config"}
    named = re.search(r"ISSUE_TEMPLATE/\{(.+)\}\.yml", (GITHUB / "lint").read_text())[1]
    assert set(named.split(",")) == forms


@pytest.mark.parametrize("form", sorted(path.stem for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml")))
def test_forms_ask_for_the_doctor(form):
    text = (GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml").read_text()

    assert ("`pyg-direct doctor --json`" in text) == (form != "config")
    for line in re.findall(r"`pyg-direct (.+?)`", text):
        check_usage(line.split())


def check_usage(words):
    """Fail unless the command and its options exist."""
    import typer

    name, *others = words
    command = typer.main.get_command(app).commands[name]
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    assert {word for word in others if word.startswith("-")} <= known, words


def read_dockerfile():
    """Instructions of the Dockerfile, a list of words each; comments and line ends are gone."""
    text = re.sub(r"^#.*\n", "", (GITHUB / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line]


def test_the_image_is_built_of_files_that_are_there():
    copied = [shlex.split(words)[:-1] for name, words in read_dockerfile() if name == "COPY"]
    sources = [source for group in copied for source in group]

    assert all((ROOT / source).exists() for source in sources), sources
    needed = {"pyproject.toml", "hatch_build.py", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"],
              *BUILD["packages"], *BUILD["force-include"]}  # fmt: skip
    assert needed <= set(sources)
    let_in = re.findall(r"^!(.+)$", (GITHUB / "Dockerfile.dockerignore").read_text(), re.M)
    assert set(let_in) == set(sources)


def test_the_image_has_a_python_of_the_constraints():
    base = next(words for name, words in read_dockerfile() if name == "FROM")

    python = re.fullmatch(r"python:(3\.\d+)-slim-\w+", base)[1]
    assert f"Python {python}" in (ROOT / "constraints.txt").read_text().splitlines()[0]


def test_the_image_installs_extras_that_exist_at_known_versions():
    line = next(words for name, words in read_dockerfile() if name == "RUN" and "pip install" in words)

    extras = re.search(r'"\.\[(.+)\]"', line)[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert "-c constraints.txt" in line
    # Of the CUDA that the constraints are for.
    cuda = re.search(r"^cuda-toolkit==(\d+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert f"cu{cuda}" in extras


def test_the_image_runs_commands_that_exist():
    instructions = read_dockerfile()
    warm = next(words.split()[1:] for name, words in instructions if name == "RUN" and words.startswith("pyg-direct"))
    entry, arguments = (json.loads(next(words for name, words in instructions if name == wanted))
                        for wanted in ("ENTRYPOINT", "CMD"))  # fmt: skip

    check_usage(warm)
    check_usage(arguments)
    assert {read_architecture(text) for text in warm if text[0].isdigit()} == set(PTX_VERSIONS)
    assert [PROJECT["scripts"][name] for name in entry] == [f"{main.__module__}:{main.__name__}"]
    assert [words for name, words in instructions if name == "USER"] == ["1000"]


def test_hooks_are_tools_of_the_tests():
    entries = re.findall(r"entry: \.venv/bin/([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    installed = {re.match(r"[\w-]+", text)[0] for text in PROJECT["optional-dependencies"]["test"]}

    assert {"lint-imports": "import-linter"}.get(entries[2]) in installed
    assert {entry for entry in entries if entry != "lint-imports"} == {"ruff", "mypy"} <= installed


def test_the_citation_is_of_this_package():
    text = (ROOT / "CITATION.cff").read_text()

    fields = dict(re.findall(r"^([\w-]+): (.+)$", text, re.M))
    assert fields["version"] == pyg_direct.__version__
    assert fields["license"] == PROJECT["license"]
    assert fields["title"].strip('"').startswith("pyg_direct: ")
    assert [{"name": name} for name in re.findall(r"^  - name: (.+)$", text, re.M)] == PROJECT["authors"]
