"""A gated step whose reset comes before the product with the state, number by number."""

import math

import numpy as np


def step(x, state, weight, bias, of_gates, of_proposal):
    nodes, channels = state.shape
    out = np.zeros((nodes, channels))
    for n in range(nodes):
        inputs = [bias[g] + sum(x[n, k] * weight[g, k] for k in range(x.shape[1])) for g in range(3 * channels)]
        gates = []
        for g in range(2 * channels):
            value = inputs[g] + sum(state[n, k] * of_gates[k, g] for k in range(channels))
            gates.append(1 / (1 + math.exp(-value)))
        shown = [gates[channels + c] * state[n, c] for c in range(channels)]
        for c in range(channels):
            proposed = math.tanh(inputs[2 * channels + c] + sum(shown[k] * of_proposal[k, c] for k in range(channels)))
            out[n, c] = gates[c] * state[n, c] + (1 - gates[c]) * proposed
    return out
