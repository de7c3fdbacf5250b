"""Which lines and branches the tests of a CPU reach, room by room, of those that a CPU can reach.

    coverage run -m pytest -m "not gpu"; coverage combine; coverage json -o build/coverage.json
    python .ci/lines.py build/coverage.json [--missing ROOM]

Left out is what is compiled instead of traced (bodies and loops of kernels), and what only a GPU reaches:

- what an `if` on the device (`is_cuda`, `type == "cuda"`, `runs_on_gpu`, ...) leaves to GPUs, also behind a `return` of
  the CPU, and calls of `run_gpu` and of the driver;
- what `.ci/gpu_only.txt` lists, by file and name;
- private functions that nothing but such code uses in their file.

Each is a block of lines. A block of which a test reaches any line on a CPU, as with a driver of the test's own in the
place of the real one, is not left out: all of it counts.
"""

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path

COMPILED = {"body", "cpu_kernel", "gpu_kernel"}
GPU_TESTS = {"is_cuda", "runs_on_gpu", "on_gpu", "is_on_gpu", "_on_gpu", "is_available"}
GPU_CALLS = {"run_gpu", "call", "bind_thread"}
LISTED = [line.partition(" > ")[::2] for line in Path(__file__).with_name("gpu_only.txt").read_text().splitlines()
          if not line.startswith("#")]  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def name_of(node):
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def says_gpu(test, truth):
    """Whether an `if` is on a GPU for sure where its test gives `truth`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return says_gpu(test.operand, not truth)
    if isinstance(test, ast.BoolOp):
        every = any if isinstance(test.op, ast.And) == truth else all
        return every(says_gpu(value, truth) for value in test.values)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        is_equal, value = isinstance(test.ops[0], ast.Eq), test.comparators[0].value
        return value == ("cuda" if is_equal == truth else "cpu") and isinstance(test.ops[0], (ast.Eq, ast.NotEq))
    return truth and name_of(test) in GPU_TESTS


def lines_of(nodes):
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


def is_simple(node):
    return isinstance(node, ast.stmt) and not hasattr(node, "body")


def text_of(path):
    return Path(path).read_text()


def find_left_out(path, tree, executed):
    """Lines of GPU code and of compiled bodies, the first lines of functions not among them."""
    out, functions = set(), []
    listed = [(where.split()[-1], text) for where, text in LISTED if where.rpartition(" ")[0] == path]
    source = text_of(path).splitlines()

    def leave_out(lines):
        if not lines & executed:
            out.update(lines)

    def visit_block(block, names):
        for place, node in enumerate(block):
            visit(node, names)
            for name, text in listed:
                if text and name == ".".join(names) and source[node.lineno - 1].strip().startswith(text):
                    leave_out(lines_of(block[place:]))
            if isinstance(node, ast.If):
                if says_gpu(node.test, True):
                    leave_out(lines_of(node.body))
                if says_gpu(node.test, False):
                    leave_out(lines_of(node.orelse))
                    if isinstance(node.body[-1], ENDS):
                        leave_out(lines_of(block[place + 1 :]))

    def visit(node, names):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names = [*names, node.name]
            inside = lines_of(node.body)
            if isinstance(node, FUNCTIONS):
                functions.append((node.name, inside))
                if {name_of(d) for d in node.decorator_list} & COMPILED:
                    leave_out(inside)
                if any((name, "") in listed for name in ("*", ".".join(names), *names[:-1])):
                    leave_out(inside)
        elif any(isinstance(n, ast.Call) and name_of(n) in GPU_CALLS for n in ast.walk(node)) and is_simple(node):
            leave_out(lines_of([node]))
        for block in ("body", "orelse", "finalbody"):
            visit_block(getattr(node, block, []), names)
        for handler in getattr(node, "handlers", []):
            visit_block(handler.body, names)

    visit_block(tree.body, [])
    used = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            used[name_of(node)].add(node.lineno)
    before = None
    while before != len(out):
        before = len(out)
        for name, inside in functions:
            is_private = name.startswith("_") and not name.endswith("__")
            if is_private and used[name] - inside and used[name] - inside <= out:
                leave_out(inside)
    return out


def list_gone():
    """Listed names that are in no file any more."""
    gone = []
    for where, text in LISTED:
        path, _, name = where.rpartition(" ")
        source = text_of(path) if Path(path).exists() else ""
        part = ast.parse(source)
        for inner in [] if name == "*" else name.split("."):
            named = (node for node in ast.walk(part) if isinstance(node, (*FUNCTIONS, ast.ClassDef)))
            part = next((node for node in named if node.name == inner), ast.Pass())
        segment = source if name == "*" else ast.get_source_segment(source, part) or ""
        if not any(line.strip().startswith(text) for line in segment.splitlines()):
            gone.append(where)
    return gone


def main(report, *options):
    rooms = defaultdict(lambda: [0] * 5)
    for path, found in sorted(json.loads(Path(report).read_text())["files"].items()):
        room = path.split("/")[1] if path.count("/") > 1 else "no room"
        text = text_of(path)
        executed, missing = set(found["executed_lines"]), set(found["missing_lines"])
        out = find_left_out(path, ast.parse(text), executed)
        branches = {kind: [pair for pair in found[f"{kind}_branches"] if not {abs(line) for line in pair} & out]
                    for kind in ("executed", "missing")}  # fmt: skip
        counts = (len(executed | missing - out), len(missing - out), sum(map(len, branches.values())),
                  len(branches["missing"]), len(missing & out))  # fmt: skip
        rooms[room] = [total + count for total, count in zip(rooms[room], counts, strict=True)]
        if options[:1] == ("--missing",) and {room, path} & set(options):
            for line in sorted(missing - out):
                print(f"{path}:{line}: {text.splitlines()[line - 1].strip()}")
    rooms["all"] = [sum(column) for column in zip(*rooms.values(), strict=True)]
    print("| room | statements | missed | covered | branches | missed | covered | for GPUs |\n" + "| --- " * 8 + "|")
    for room, (lines, missed, branches, uncovered, left_out) in rooms.items():
        print(f"| {room} | {lines:,} | {missed:,} | {1 - missed / max(1, lines):.1%} | {branches:,} | {uncovered:,} | "
              f"{1 - uncovered / max(1, branches):.1%} | {left_out:,} |")  # fmt: skip
    for where in list_gone():
        print(f"gpu_only.txt lists what is gone: {where}")


if __name__ == "__main__":
    main(*sys.argv[1:])
