"""CI says what it did not test."""

import shutil
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"


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


def test_the_wheels_environment_borrows_nothing():
    build = (CI / "run").read_text().partition("build_wheel() {")[2].partition("\n}")[0]
    clean = build.partition('python3 -m venv "$logs/venv"')[2].partition('python3 -m venv "$logs/bare"')[0]

    assert "pip" in clean
    assert "--no-deps" not in clean
    assert ".pth" not in clean
