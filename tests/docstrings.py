"""Rules for docstrings: gaps of public functions, methods and classes, and plain English everywhere.

Every parameter stands in `Args`, or in `Attributes` of a class; `*args` and `**kwargs` may. If it is annotated as a
tensor or an array, its entry has a shape in brackets and a dtype, or names another docstring that has them. `Raises`
lists the errors that the function raises, and errors of the package that its callees raise. Callees are functions by
name, and methods of its object.

No docstring begins with a word of `WRONG_STARTS`, and no sentence has more than `MOST_WORDS` words.
"""

import ast
import builtins
import inspect
import re
import textwrap

from pyg_direct import errors

ERRORS = {name for name, thing in vars(errors).items() if inspect.isclass(thing) and issubclass(thing, Exception)}
TENSOR = re.compile(r"\b(?:Unified)?Tensor\b|\bndarray\b")
SHAPE = re.compile(r"`\[[^`]*\]`")
DTYPE = re.compile(r"\b(?:int\d*|integers?|float\w*|bool|dtype)\b", re.I)
ELSEWHERE = re.compile(r"\b(?:see|as of|as in)\s+`", re.I)
WRONG_STARTS = {"what", "whether", "where", "that", "who"}
MOST_WORDS = 25
WORD = re.compile(r"[(\"']*[A-Za-z][A-Za-z'-]*[)\"',.:;!?]*")


def find_gaps(function, text, owner=None):
    """List in words the gaps of `text`, the docstring of a function, or of a method of the class `owner`."""
    sections, signature = split_sections(text), inspect.signature(function)
    told, gaps = read_entries(sections), []
    for p in signature.parameters.values():
        if p.name in ("self", "cls") or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.name not in told:
            gaps.append(p.name)
        elif is_tensor(p.annotation) and not tells_tensor(told[p.name]):
            gaps.append(f"shape or dtype of {p.name}")
    if is_tensor(signature.return_annotation) and not tells_tensor(sections[""] + sections.get("Returns", "")):
        gaps.append("shape or dtype of what is returned")
    named = set(re.findall(r"\w+", sections.get("Raises", "")))
    return gaps + sorted(error for error in find_errors(function, owner) if not named & families(error))


def split_sections(text):
    """Split a docstring into its parts by heading; the part before the first heading has an empty one."""
    parts = re.split(r"^(\w+):\n(?=    )", inspect.cleandoc(text), flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def read_entries(sections):
    """Return the entries of `Args` and `Attributes` by name."""
    lines = "\n".join(sections.get(name, "") for name in ("Args", "Attributes"))
    entries = re.findall(r"^    (\S[^:]*):(.*?)(?=^    \S|^\S|\Z)", lines, re.M | re.S)
    return {name: told for names, told in entries for name in re.findall(r"\w+", names)}


def is_tensor(annotation):
    return bool(TENSOR.search(re.sub(r"Callable\[.*\]", "", str(annotation))))


def tells_tensor(text):
    return bool(ELSEWHERE.search(text) or (SHAPE.search(text) and DTYPE.search(text)))


def families(error):
    """Return the names that may stand for an error: its own and the names of its bases."""
    return {base.__name__ for base in (getattr(errors, error, None) or getattr(builtins, error)).__mro__}


def find_errors(function, owner=None):
    """Return names of the errors that a function raises, and of the package's errors that its callees raise."""
    found = raised_in(function)
    for callee in find_callees(function, owner):
        found |= raised_in(callee) & ERRORS
    return found


def parse(function):
    function = inspect.unwrap(function)
    # Python writes the constructor of a dataclass.
    is_written = function.__code__.co_filename != "<string>"
    return ast.parse(textwrap.dedent(inspect.getsource(function)) if is_written else "")


def raised_in(function):
    raised = [node.exc for node in ast.walk(parse(function)) if isinstance(node, ast.Raise) and node.exc is not None]
    names = {getattr(exc.func if isinstance(exc, ast.Call) else exc, "id", "") for exc in raised}
    return {name for name in names if name in ERRORS or inspect.isclass(getattr(builtins, name, None))}


def find_callees(function, owner=None):
    """List functions of the package that a function calls by name, and methods of its own object that it calls."""
    scope = inspect.unwrap(function).__globals__
    for call in (node.func for node in ast.walk(parse(function)) if isinstance(node, ast.Call)):
        callee = None
        if isinstance(call, ast.Name):
            callee = scope.get(call.id)
        elif isinstance(call, ast.Attribute) and getattr(call.value, "id", None) in ("self", "cls") and owner:
            callee = inspect.getattr_static(owner, call.attr, None)
        callee = vars(callee).get("__init__") if inspect.isclass(callee) else getattr(callee, "__func__", callee)
        if inspect.isfunction(callee) and callee.__module__.startswith("pyg_direct"):
            yield callee


def list_docstrings(path):
    """List (name, docstring) of a file, its classes, functions and methods, private ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", path.name), text


def has_wrong_start(text):
    first = re.match(r"[`(\"]*([A-Za-z]+)", text)
    return first is not None and first[1].lower() in WRONG_STARTS


def find_long_sentences(text, most=MOST_WORDS):
    """List the sentences of a docstring that have more than `most` words; code counts as one word, formulas as none."""
    sentences = [part for block in split_blocks(text) for part in re.split(r"(?<=[.!?;])\s+", block)]
    return [sentence for sentence in sentences if count_words(sentence) > most]


def split_blocks(text):
    """Split a docstring into paragraphs, entries and items, without tables and examples, with code as one word."""
    blocks = [[]]
    for line in inspect.cleandoc(text).splitlines():
        # Columns of a table are two spaces or more apart.
        is_prose = line.strip() and not line.lstrip().startswith(("|", ">>>", "...", "==")) and "  " not in line.strip()
        if not is_prose or re.match(r"\s*- |\s*\d+\. |    \S[^:]*:", line):
            blocks.append([])
        if is_prose:
            blocks[-1].append(line.strip())
    return [re.sub(r"``?[^`]*``?", "code", " ".join(block)) for block in blocks if block]


def count_words(sentence):
    return sum(WORD.fullmatch(word) is not None for word in sentence.split())
