// Scores of attention, and the threads that share a head.

#pragma once

// Less than every score, and finite: the difference of two of them is zero.
#define LEAST -3.402823466e+38f
#define NO_SCORE __uint_as_float(0xff800000)
#define NOT_A_NUMBER __uint_as_float(0x7fffffff)
// As in pyg_direct/kernels/aggregate/softmax.py.
#define TINY 1e-16f

__device__ __forceinline__ float bend(float value, float slope) { return value > 0.0f ? value : value * slope; }

// Threads that share a head: each computes one piece of it.
struct Group {
    int lane, lanes;
    unsigned mask;
    // If the compiler does not know the mask, each shuffle first finds the threads with an equal one, which takes longer
    // than all sums of an edge.
    __device__ __forceinline__ float sum(float value) const
    {
        if (mask == 0xffffffff) {
            if (lanes > 8) value = add_far<16, 8>(value);
            return add_far<4, 1>(value);
        }
        for (int step = lanes >> 1; step > 0; step >>= 1) value += __shfl_xor_sync(mask, value, step);
        return value;
    }
    // Adds the values of threads that are `most` to `least` away, of a whole warp.
    template <int most, int least> __device__ __forceinline__ float add_far(float value) const
    {
#pragma unroll
        for (int step = most; step >= least; step >>= 1) {
            const float other = __shfl_xor_sync(0xffffffff, value, step);
            if (step < lanes) value += other;
        }
        return value;
    }
    // The value of thread i of the group, of a whole warp.
    __device__ __forceinline__ float get(float value, int i) const
    {
        return __shfl_sync(0xffffffff, value, i, lanes);
    }
};
