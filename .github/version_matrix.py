"""Print the sessions of .ci/noxfile.py as a matrix of GitHub Actions, in JSON; needs no package."""

from __future__ import annotations

import ast
import json
from pathlib import Path

NOXFILE = Path(__file__).parents[1] / ".ci" / "noxfile.py"


def list_cases(text: str) -> list[tuple[str, str]]:
    """Read (Python, versions) of each session.

    Args:
        text: Of the noxfile, which is not imported, since nox may be missing.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["CASES"]:
            found: list[tuple[str, str]] = ast.literal_eval(node.value)
            return found
    raise SystemExit(f"{NOXFILE} must assign CASES")


def make_matrix(cases: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Entries of the matrix; `session` is what `nox -s` takes.

    Args:
        cases: As of `list_cases`.
    """
    return [{"python": python, "versions": versions, "session": f"tests({python}, {versions})"}
            for python, versions in cases]  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(make_matrix(list_cases(NOXFILE.read_text()))))
