"""Settings of the documentation site: `.ci/docs` builds it, without a warning."""

import enum
import inspect
import os
import re
import sys
import warnings
from pathlib import Path

DOCS = Path(__file__).parent
# The site describes the files beside it, not another version that may be installed; so do the kernels of tutorials.
sys.path.insert(0, str(DOCS.parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(DOCS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
# torch and PyG warn of their own functions while they are imported.
warnings.filterwarnings("ignore", category=DeprecationWarning)

import pyg_direct

project = "pyg_direct"
author = "pyg_direct contributors"
copyright = author
version = release = pyg_direct.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
# Docstrings set names in single backticks.
default_role = "code"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

nb_execution_mode = "cache"
nb_execution_raise_on_error = True
# Seconds of a cell: kernels may have to be compiled, and the machine be busy.
nb_execution_timeout = 300
nb_merge_streams = True

autosummary_generate = True
autodoc_default_options = {"members": True, "inherited-members": True}
# Servers of parts need Ray, which building the site does not.
autodoc_mock_imports = ["ray"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90
python_use_unqualified_type_names = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"pyg_direct {release}"


def write_commands(app):
    """Write the page of commands from the program itself, in Typer's own form."""
    from typer.cli import app as typer_cli
    from typer.testing import CliRunner

    arguments = ["pyg_direct.cli.app", "utils", "docs", "--name", "pyg-direct", "--title", "Commands"]
    text = CliRunner().invoke(typer_cli, arguments, catch_exceptions=False).stdout
    # Code would show these as they are written; `<` and `>` stay, which would be read as HTML.
    text = text.replace("&quot;", '"').replace("&#x27;", "'")
    write_page("commands", text)


def write_changelog(app):
    """Write the page of changes, with links from its own place."""
    text = (DOCS.parent / "CHANGELOG.md").read_text()
    write_page("changelog", re.sub(r"\]\((?!http|#)(docs/)?", lambda m: "](../../" if m[1] else "](../../../", text))


def write_page(name, text):
    """Write a page of the reference, unless it is there as it would be: then it is not read again."""
    page = DOCS / "reference" / "generated" / f"{name}.md"
    page.parent.mkdir(exist_ok=True)
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def skip_member(app, kind, name, thing, skip, options):
    """Leave out members that a class has from torch and PyG, whose own pages document them; keep members of enums."""
    if isinstance(thing, enum.Enum):
        return False
    # Fields of named tuples stand in the docstring of the class.
    if inspect.isbuiltin(thing) or type(thing).__name__ == "_tuplegetter":
        return True
    member = getattr(thing, "__func__", None) or getattr(thing, "fget", None) or inspect.unwrap(thing)
    module = getattr(getattr(member, "__objclass__", member), "__module__", None) or "pyg_direct"
    return True if not module.startswith("pyg_direct") else None


def keep_colons(app, kind, name, thing, options, lines):
    """Let the first line of a property hold a colon, before which napoleon would look for a type."""
    if kind in ("attribute", "property") and lines and ":" in lines[0]:
        # To docutils, a backslash at the end of a line is nothing at all.
        lines.insert(0, "\\")


def setup(app):
    """Connect what this file adds to Sphinx."""
    app.connect("builder-inited", write_commands)
    app.connect("builder-inited", write_changelog)
    app.connect("autodoc-skip-member", skip_member)
    # Before napoleon.
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
