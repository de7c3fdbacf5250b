"""The letters used in shapes, and the type aliases of the public surface.

`N` nodes, `E` edges, `B` seeds of a batch, `K` fanout, `H` hops, `F` features of a row, `W` 32-bit words of a bitmap.
"""

import torch

Device = str | int | torch.device | None
