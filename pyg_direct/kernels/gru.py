"""The step of a small GRU and its gradient, of which calls of products would take longer than the numbers.

reset and update = sigmoid of what input and state add; content = tanh(of input + reset * of state); out = content +
update * (state - content). Weights are `[3 * C, F]` and `[3 * C, C]`, gate by gate as `nn.GRU` has them.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel
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


@gpu_kernel("f4[] f4[] f4[] f4[] f4[] f4[] i4 i4 i4 f4[] f4[]")
def step_gru_gpu(x, state, of_input, of_state, bias, state_bias, rows, width, size, kept, out):
    """As `step_gru_cpu`, a thread for each number of `out`."""
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    while i < rows * size:
        r = i // size
        u = i - r * size
        reset, update, content = bias[u], bias[size + u], bias[2 * size + u]
        to_reset, to_update, added = state_bias[u], state_bias[size + u], state_bias[2 * size + u]
        for k in range(width):
            factor = x[r * width + k]
            reset += factor * of_input[u * width + k]
            update += factor * of_input[(size + u) * width + k]
            content += factor * of_input[(2 * size + u) * width + k]
        for k in range(size):
            factor = state[r * size + k]
            to_reset += factor * of_state[u * size + k]
            to_update += factor * of_state[(size + u) * size + k]
            added += factor * of_state[(2 * size + u) * size + k]
        reset = _ONE / (_ONE + math.exp(-(reset + to_reset)))
        update = _ONE / (_ONE + math.exp(-(update + to_update)))
        content = math.tanh(content + reset * added)
        at = r * 4 * size + u
        kept[at], kept[at + size], kept[at + 2 * size], kept[at + 3 * size] = reset, update, content, added
        out[i] = content + update * (state[i] - content)
        i += cuda.gridDim.x * THREADS


@body
def pull_gate(grad, state, kept, size, r, k, is_of_state):
    """The gradient of what input, or state, adds to a gate, number k of the 3 * C of row r."""
    g = k // size
    u = k - g * size
    at = r * 4 * size + u
    reset, update, content = kept[at], kept[at + size], kept[at + 2 * size]
    given = grad[r * size + u]
    if g == 1:
        return given * (state[r * size + u] - content) * update * (_ONE - update)
    of_content = given * (_ONE - update) * (_ONE - content * content)
    if g == 0:
        return of_content * kept[at + 3 * size] * reset * (_ONE - reset)
    return of_content * reset if is_of_state else of_content


@gpu_kernel("f4[] f4[] f4[] f4[] f4[] f4[] i4 i4 i4 f4[]")
def pull_gru_gpu(grad, x, state, of_input, of_state, kept, rows, width, size, out):
    """Gradients of all that went in, one behind the other: of x, of the state, of the weights of inputs and of states,
    and of both biases. A thread for each number, which adds up what it needs in one order.
    """
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    to_state = rows * width
    to_input = to_state + rows * size
    to_weight = to_input + 3 * size * width
    to_bias = to_weight + 3 * size * size
    while i < to_bias + 6 * size:
        total = np.float32(0)
        if i < to_state:
            r = i // width
            f = i - r * width
            for k in range(3 * size):
                total += pull_gate(grad, state, kept, size, r, k, False) * of_input[k * width + f]
        elif i < to_input:
            at = i - to_state
            r = at // size
            u = at - r * size
            total = grad[at] * kept[r * 4 * size + size + u]
            for k in range(3 * size):
                total += pull_gate(grad, state, kept, size, r, k, True) * of_state[k * size + u]
        elif i < to_weight:
            k = (i - to_input) // width
            f = i - to_input - k * width
            for r in range(rows):
                total += pull_gate(grad, state, kept, size, r, k, False) * x[r * width + f]
        elif i < to_bias:
            k = (i - to_weight) // size
            u = i - to_weight - k * size
            for r in range(rows):
                total += pull_gate(grad, state, kept, size, r, k, True) * state[r * size + u]
        else:
            k = (i - to_bias) % (3 * size)
            for r in range(rows):
                total += pull_gate(grad, state, kept, size, r, k, i - to_bias >= 3 * size)
        out[i] = total
        i += cuda.gridDim.x * THREADS
