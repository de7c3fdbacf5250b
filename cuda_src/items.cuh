// Pieces of 16 bytes as the fp32 numbers that they hold.

#pragma once

typedef unsigned long long u64;

// Kinds of items, as in pyg_direct/ops/aggregate/sum_rows.py.
struct Float32 { static const int items = 4; };
struct Float16 { static const int items = 8; };
struct Bfloat16 { static const int items = 8; };

__device__ __forceinline__ void unpack(Float32, uint4 raw, float *value)
{
    value[0] = __uint_as_float(raw.x), value[1] = __uint_as_float(raw.y);
    value[2] = __uint_as_float(raw.z), value[3] = __uint_as_float(raw.w);
}

__device__ __forceinline__ float widen(Float16, unsigned bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

__device__ __forceinline__ float widen(Bfloat16, unsigned bits) { return __uint_as_float(bits << 16); }

template <class Kind>
__device__ __forceinline__ void unpack(Kind kind, uint4 raw, float *value)
{
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[2 * i] = widen(kind, word[i] & 0xffff);
        value[2 * i + 1] = widen(kind, word[i] >> 16);
    }
}

__device__ __forceinline__ unsigned narrow(Float16, float value)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// To the nearest, ties to even; a NaN stays a NaN.
__device__ __forceinline__ unsigned narrow(Bfloat16, float value)
{
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// Two items in a word, the first in its lower half.
template <class Kind>
__device__ __forceinline__ unsigned narrow_two(Kind kind, float low, float high)
{
    return narrow(kind, low) | narrow(kind, high) << 16;
}

#if __CUDA_ARCH__ >= 800
// In one instruction, with the same bits.
__device__ __forceinline__ unsigned narrow_two(Float16, float low, float high)
{
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ unsigned narrow_two(Bfloat16, float low, float high)
{
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
#endif

template <class Kind>
__device__ __forceinline__ void store(Kind kind, u64 to, int piece, const float *value)
{
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = narrow_two(kind, value[2 * i], value[2 * i + 1]);
    reinterpret_cast<uint4 *>(to)[piece] = make_uint4(word[0], word[1], word[2], word[3]);
}

template <int items>
__device__ __forceinline__ void store_fp32(u64 to, int piece, const float *value)
{
    float4 *at = reinterpret_cast<float4 *>(to) + piece * (items / 4);
#pragma unroll
    for (int i = 0; i < items / 4; ++i)
        at[i] = make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
}

// Piece of a row of fp32 that belongs to a piece of 16 bytes.
template <int items> __device__ __forceinline__ void load_fp32(const float *from, float *value)
{
    const float4 *at = reinterpret_cast<const float4 *>(from);
#pragma unroll
    for (int i = 0; i < items / 4; ++i) {
        const float4 part = at[i];
        value[4 * i] = part.x, value[4 * i + 1] = part.y, value[4 * i + 2] = part.z, value[4 * i + 3] = part.w;
    }
}

// Adds four items to a row of fp32, to which other threads may add at the same time.
__device__ __forceinline__ void add_4(float *to, float a, float b, float c, float d)
{
#if __CUDA_ARCH__ >= 900
    atomicAdd(reinterpret_cast<float4 *>(to), make_float4(a, b, c, d));
#else
    atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}
