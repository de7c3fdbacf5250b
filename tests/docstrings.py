"""What the docstring of a public function, method or class leaves out.

Every parameter stands in `Args`, or in `Attributes` of a class; `*args` and `**kwargs` may. What is annotated as a
tensor or an array has a shape in brackets and a dtype, or names what tells them. `Raises` has the errors that the
function raises, and those of the package that are raised by what it calls: functions by name, methods of its object.
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


def find_gaps(function, text, owner=None):
    """What `text` leaves out of a function, or of a method of the class `owner`, in words."""
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
    """The parts of a docstring by heading; what stands before the first one has none."""
    parts = re.split(r"^(\w+):\n(?=    )", inspect.cleandoc(text), flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def read_entries(sections):
    """What `Args` and `Attributes` say, by name."""
    lines = "\n".join(sections.get(name, "") for name in ("Args", "Attributes"))
    entries = re.findall(r"^    (\S[^:]*):(.*?)(?=^    \S|^\S|\Z)", lines, re.M | re.S)
    return {name: told for names, told in entries for name in re.findall(r"\w+", names)}


def is_tensor(annotation):
    return bool(TENSOR.search(re.sub(r"Callable\[.*\]", "", str(annotation))))


def tells_tensor(text):
    return bool(ELSEWHERE.search(text) or (SHAPE.search(text) and DTYPE.search(text)))


def families(error):
    """The names under which an error can be told: its own and those of its bases."""
    return {base.__name__ for base in (getattr(errors, error, None) or getattr(builtins, error)).__mro__}


def find_errors(function, owner=None):
    """Names of the errors that a function raises, and of those of the package that what it calls raises."""
    found = raised_in(function)
    for callee in find_callees(function, owner):
        found |= raised_in(callee) & ERRORS
    return found


def parse(function):
    function = inspect.unwrap(function)
    # That of a dataclass is written by Python.
    is_written = function.__code__.co_filename != "<string>"
    return ast.parse(textwrap.dedent(inspect.getsource(function)) if is_written else "")


def raised_in(function):
    raised = [node.exc for node in ast.walk(parse(function)) if isinstance(node, ast.Raise) and node.exc is not None]
    names = {getattr(exc.func if isinstance(exc, ast.Call) else exc, "id", "") for exc in raised}
    return {name for name in names if name in ERRORS or inspect.isclass(getattr(builtins, name, None))}


def find_callees(function, owner=None):
    """Functions of the package that a function calls by name, and methods that it calls of its own object."""
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
