"""What a gated step with reset states does between its products, number by number, and its adjoint.

update and reset = sigmoid(inputs + state @ weights); proposed = tanh(inputs + (reset * state) @ weights); the next
state is proposed + update * (state - proposed). `inputs`, `[N, 3 * C]`, are what features `x`, `[N, F]`, add to update,
reset and proposal: x @ weight.T + bias, computed here where `inputs` is empty. For GPUs: on a CPU torch has vector
instructions for exponentials, which Numba's loops have not. Narrow steps of fp32 are whole kernels, products and all:
`cuda_src/gated.cu`.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.kernels.jit import THREADS, body, cuda, device_function, gpu_kernel

# What whole steps take at most: channels, and features.
MOST_CHANNELS, MOST_FEATURES = 32, 8
# Their blocks, on the way to the next state and back: threads, how many a multiprocessor holds at once, and nodes that
# one sees to at once, up to `FEW_CHANNELS` and beyond.
FEW_CHANNELS = 16
STEP_THREADS, STEP_RESIDENT, STEP_NODES = 256, 2, (256, 128)
PULL_THREADS, PULL_RESIDENT, PULL_NODES = 64, 4, (64, 32)

step_gated = device_function("step_gated", "u8 u8 u8 i8 i4 i4 u8")
pull_gated = device_function("pull_gated", "u8 u8 u8 u8 i8 i4 i4 u8 u8 u8")


@body
def add_input(inputs, x, weight, bias, n, at, width, features):
    """What the features of node n add to the gate `at` of `width`."""
    if inputs.shape[0] > 0:
        return inputs[n * width + at]
    total = bias[at]
    for k in range(features):
        total += x[n * features + k] * weight[at * features + k]
    return total


@body
def sigmoid(value, one):
    """1 / (1 + exp(-value)); 1 is given in the precision of the value."""
    return one / (one + math.exp(-value))


@gpu_kernel("T[] T[] T[] T[] T[] i8 i4 i4 T[] T[]", T=("f4", "f8"))
def open_gates_gpu(inputs, x, weight, bias, state, count, channels, features, gates, shown):
    """Update and reset in the place of what the state adds to them, `gates` `[N, 2 * C]`, and reset * state, `shown`
    `[N, C]`; a thread for each of the N * C numbers.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    one = state.dtype.type(1)
    while i < count:
        n = i // channels
        c = i - n * channels
        at = n * 2 * channels + c
        value = gates[at] + add_input(inputs, x, weight, bias, n, c, 3 * channels, features)
        gates[at] = sigmoid(value, one)
        value = gates[at + channels] + add_input(inputs, x, weight, bias, n, channels + c, 3 * channels, features)
        reset = sigmoid(value, one)
        gates[at + channels] = reset
        shown[i] = reset * state[i]
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("T[] T[] T[] T[] T[] T[] i8 i4 i4 T[] T[]", T=("f4", "f8"))
def close_gates_gpu(inputs, x, weight, bias, state, gates, count, channels, features, proposed, out):
    """The proposal in the place of what `shown` adds to it, `proposed` `[N, C]`, and the next state, `out`."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < count:
        n = i // channels
        c = i - n * channels
        value = proposed[i] + add_input(inputs, x, weight, bias, n, 2 * channels + c, 3 * channels, features)
        value = math.tanh(value)
        proposed[i] = value
        out[i] = value + gates[n * 2 * channels + c] * (state[i] - value)
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("T[] T[] T[] T[] i8 i4 T[]", T=("f4", "f8"))
def pull_close_gpu(grad, state, gates, proposed, count, channels, to_inputs):
    """Gradients of what goes into update and proposal, in `to_inputs` `[N, 3 * C]`."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    one = state.dtype.type(1)
    while i < count:
        n = i // channels
        c = i - n * channels
        update, value = gates[n * 2 * channels + c], proposed[i]
        at = n * 3 * channels + c
        to_inputs[at] = grad[i] * (state[i] - value) * update * (one - update)
        to_inputs[at + 2 * channels] = grad[i] * (one - update) * (one - value * value)
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("T[] T[] T[] T[] i8 i4 T[] T[]", T=("f4", "f8"))
def pull_open_gpu(grad, state, gates, to_shown, count, channels, to_inputs, to_state):
    """Gradient of what goes into the reset, in `to_inputs`, and of the state but for what the gates' weights bring."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    one = state.dtype.type(1)
    while i < count:
        n = i // channels
        c = i - n * channels
        at = n * 2 * channels + c
        update, reset = gates[at], gates[at + channels]
        to_inputs[n * 3 * channels + channels + c] = to_shown[i] * state[i] * reset * (one - reset)
        to_state[i] = grad[i] * update + to_shown[i] * reset
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("u8 u8 u8 i8 i4 i4 f4[] u8", sources=("gated",), resident_blocks=STEP_RESIDENT, threads=STEP_THREADS)
def step_gated_gpu(x, state, weights, num_nodes, channels, features, out, place):
    """The next state of all nodes; all by address, also `out`. `weights` are as `fold_gates_gpu` has them."""
    step_gated(x, state, weights, num_nodes, channels, features, place)


@gpu_kernel("u8 u8 u8 u8 i8 i4 i4 u8 u8 f4[] u8", sources=("gated",), resident_blocks=PULL_RESIDENT,
            threads=PULL_THREADS)  # fmt: skip
def pull_gated_gpu(grad, x, state, weights, num_nodes, channels, features, to_state, to_inputs, sums, place):
    """Gradients of states and of what features add, `[N, 3 * C]`, where their addresses are not 0, and what each block
    adds to those of weights, `sums` `[blocks, C + F + 1, 3 * C]`.
    """
    pull_gated(grad, x, state, weights, num_nodes, channels, features, to_state, to_inputs, place)


@body
def pick(g, at, update, reset, proposal):
    """A number of what belongs to a gate."""
    if g == 0:
        return update[at]
    return reset[at] if g == 1 else proposal[at]


_PARAMETERS = " ".join(["f4[]"] * 12)


@gpu_kernel(f"{_PARAMETERS} i4 i4 f4[]")
def fold_gates_gpu(conv_z, conv_r, conv_h, conv_bias_z, conv_bias_r, conv_bias_h, linear_z, linear_r, linear_h,
                   linear_bias_z, linear_bias_r, linear_bias_h, channels, features, weights):  # fmt: skip
    """What takes states and features to the gates, `weights` `[C + F + 1, 3 * C]`: rows of states, of features, and the
    bias. Of convolutions `[C, F]` and `[C]`, and of linear layers behind them, `[C, 2 * C]` and `[C]`, whose right half
    sees the state. A thread for each number.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < 3 * channels * (channels + features + 1):
        row = i // (3 * channels)
        g = i // channels % 3
        c = i % channels
        at = c * 2 * channels
        f = row - channels
        if row < channels:
            total = pick(g, at + channels + row, linear_z, linear_r, linear_h)
        elif f < features:
            total = np.float32(0)
            for k in range(channels):
                left = pick(g, at + k, linear_z, linear_r, linear_h)
                total += left * pick(g, k * features + f, conv_z, conv_r, conv_h)
        else:
            total = pick(g, c, linear_bias_z, linear_bias_r, linear_bias_h)
            for k in range(channels):
                left = pick(g, at + k, linear_z, linear_r, linear_h)
                total += left * pick(g, k, conv_bias_z, conv_bias_r, conv_bias_h)
        weights[i] = total
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel(f"f4[] {_PARAMETERS} i4 i4 f4[]")
def unfold_gates_gpu(grad, conv_z, conv_r, conv_h, conv_bias_z, conv_bias_r, conv_bias_h, linear_z, linear_r, linear_h,
                     linear_bias_z, linear_bias_r, linear_bias_h, channels, features, out):  # fmt: skip
    """Gradients of what was folded, of that of `weights`: one behind the other, `[3, C, F]`, `[3, C]`, `[3, C, 2 * C]`
    and `[3, C]`. A thread for each number.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    of_bias = 3 * channels * features
    of_linear = of_bias + 3 * channels
    of_last = of_linear + 6 * channels * channels
    wide = 3 * channels
    inputs = channels * wide
    last = (channels + features) * wide
    while i < of_last + 3 * channels:
        total = np.float32(0)
        if i < of_linear:
            # Of a row k of a convolution: a feature of it, or its bias.
            at = i if i < of_bias else i - of_bias
            size = features if i < of_bias else 1
            g = at // (channels * size)
            k = at // size % channels
            source = (inputs + at % size * wide if i < of_bias else last) + g * channels
            for c in range(channels):
                total += pick(g, c * 2 * channels + k, linear_z, linear_r, linear_h) * grad[source + c]
        elif i < of_last:
            at = i - of_linear
            g = at // (2 * channels * channels)
            c = at // (2 * channels) % channels
            k = at % (2 * channels)
            if k >= channels:
                total = grad[(k - channels) * wide + g * channels + c]
            else:
                total = pick(g, k, conv_bias_z, conv_bias_r, conv_bias_h) * grad[last + g * channels + c]
                for f in range(features):
                    own = grad[inputs + f * wide + g * channels + c]
                    total += pick(g, k * features + f, conv_z, conv_r, conv_h) * own
        else:
            total = grad[last + i - of_last]
        out[i] = total
        i += np.int64(cuda.gridDim.x) * THREADS
