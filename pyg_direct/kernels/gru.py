"""The step of a small GRU and its gradient, on a CPU, where calls of products would take longer than the numbers.

reset and update = sigmoid of what input and state add; content = tanh(of input + reset * of state); out = content +
update * (state - content). Weights are `[3 * C, F]` and `[3 * C, C]`, gate by gate as `nn.GRU` has them.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import cpu_kernel
from pyg_direct.kernels.lstm import admit, bend

_ONE = np.float32(1)


@cpu_kernel
def step_gru_cpu(x, state, of_input, of_state, bias, state_bias, kept, out):
    """`kept` `[N, 4 * C]`: reset, update, content and what the state adds to that, which the gradient needs."""
    size, width = state.shape[1], x.shape[1]
    # So that a loop does all gates of a number at once.
    input_rows, state_rows = of_input.T.copy(), of_state.T.copy()
    gates, adds = np.empty(3 * size, np.float32), np.empty(3 * size, np.float32)
    for r in range(state.shape[0]):
        gates[:] = bias
        adds[:] = state_bias
        for k in range(width):
            factor, row = x[r, k], input_rows[k]
            for u in range(3 * size):
                gates[u] += factor * row[u]
        for k in range(size):
            factor, row = state[r, k], state_rows[k]
            for u in range(3 * size):
                adds[u] += factor * row[u]
        reset, update = kept[r, :size], kept[r, size : 2 * size]
        content, added = kept[r, 2 * size : 3 * size], kept[r, 3 * size :]
        for u in range(size):
            reset[u] = admit(gates[u] + adds[u])
        for u in range(size):
            update[u] = admit(gates[size + u] + adds[size + u])
        for u in range(size):
            added[u] = adds[2 * size + u]
            content[u] = bend(gates[2 * size + u] + reset[u] * added[u])
        for u in range(size):
            out[r, u] = content[u] + update[u] * (state[r, u] - content[u])


@cpu_kernel
def pull_gru_cpu(grad, x, state, of_input, of_state, kept, grad_x, grad_state, grad_input, grad_of_state, grad_bias,
                 grad_state_bias):  # fmt: skip
    """Gradients of all that went in, of that of the state, `[N, C]`."""
    size, width = state.shape[1], x.shape[1]
    grad_x[:] = 0
    grad_input[:] = 0
    grad_of_state[:] = 0
    grad_bias[:] = 0
    grad_state_bias[:] = 0
    gates, adds = np.empty(3 * size, np.float32), np.empty(3 * size, np.float32)
    for r in range(state.shape[0]):
        for u in range(size):
            reset, update = kept[r, u], kept[r, size + u]
            content, added = kept[r, 2 * size + u], kept[r, 3 * size + u]
            of_content = grad[r, u] * (_ONE - update) * (_ONE - content * content)
            of_update = grad[r, u] * (state[r, u] - content) * update * (_ONE - update)
            of_reset = of_content * added * reset * (_ONE - reset)
            gates[u], gates[size + u], gates[2 * size + u] = of_reset, of_update, of_content
            adds[u], adds[size + u], adds[2 * size + u] = of_reset, of_update, of_content * reset
            grad_state[r, u] = grad[r, u] * update
        for k in range(3 * size):
            gate, added = gates[k], adds[k]
            grad_bias[k] += gate
            grad_state_bias[k] += added
            for u in range(width):
                grad_x[r, u] += gate * of_input[k, u]
                grad_input[k, u] += gate * x[r, u]
            for u in range(size):
                grad_state[r, u] += added * of_state[k, u]
                grad_of_state[k, u] += added * state[r, u]
