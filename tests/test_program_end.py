"""Objects that outlive the names of their module at interpreter exit end silently."""

import subprocess
import sys

# Objects that end in other ways than by their memory.
KEPT = {
    "a block": """
from pyg_direct.runtime.cuda.memory import Block
kept = Block("pinned", 8, None)
kept._address = 8
kept._free = lambda: None
""",
    "a captured graph": """
from pyg_direct.runtime.cuda.graph_capture import CapturedGraph
kept = CapturedGraph.__new__(CapturedGraph)
kept._executable = 8
""",
    "a chunk": """
import os
from pyg_direct.runtime.cuda.peer_memory import Chunk
kept = Chunk.__new__(Chunk)
kept.handle, kept.process, kept._descriptor = 8, os.getpid(), None
""",
    "a mapping of chunks": """
from pyg_direct.runtime.cuda.peer_memory import _Mapping
kept = _Mapping.__new__(_Mapping)
kept.address, kept.process = 8, -1
""",
    "a slot": """
from types import SimpleNamespace
from pyg_direct.sampling.captured_plan import Slot
kept = Slot.__new__(Slot)
kept.sized = SimpleNamespace(synchronize=lambda: None)
""",
    "a plan": """
from pyg_direct.sampling.captured_plan import touch
class Plan:
    pass
kept = Plan()
touch(kept)
""",
    "shared memory": """
from pyg_direct.runtime.host.shared_memory import SharedMemory
kept = SharedMemory(4096).bytes
""",
    "errors of reads": """
from pyg_direct.features.tiers.base import ReadErrors
kept = ReadErrors(is_pinned=False)
kept._is_pinned = True
""",
    "a tensor with what was derived from it": """
import torch
from pyg_direct.graph.pyg_edges import derive
kept = torch.zeros(2)
derive("two", lambda tensor: 2, kept)
""",
}


def test_nothing_is_said_as_the_interpreter_ends():
    # Modules lose their names in the reverse order of their import, as long as something keeps them.
    begin = "import sys, types\nearly = sys.modules['early'] = types.ModuleType('early')\nearly.kept = []\n"
    make = "".join(f"{text}early.kept.append(kept)\ndel kept\n" for text in KEPT.values())
    keep = "sys.kept = [module for name, module in sys.modules.items() if name.startswith(('early', 'pyg_direct'))]"

    done = subprocess.run([sys.executable, "-c", begin + make + keep], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
