// Rows on their way from memory while a thread adds up those before them. They wait in shared memory: in registers a
// thread would have room for two, and a copy between registers would wait for both.

#pragma once

// Rows of a thread on their way, a power of two, and threads of a block as in pyg_direct/compiler/jit.py.
#define AHEAD 4
#define THREADS_OF_BLOCK 256

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void copy_ahead(uint4 *to, const uint4 *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ __forceinline__ void copy_ahead(float *to, const float *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of copies but the last `groups`.
template <int groups> __device__ __forceinline__ void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" :: "n"(groups) : "memory");
}
#else
__device__ __forceinline__ void copy_ahead(uint4 *to, const uint4 *from) { *to = *from; }
__device__ __forceinline__ void copy_ahead(float *to, const float *from) { *to = *from; }
__device__ __forceinline__ void end_copies() {}
template <int groups> __device__ __forceinline__ void wait_for_copies() {}
#endif

// A thread's place `at`, modulo AHEAD, in memory of a block with AHEAD places for each thread.
template <class T> __device__ __forceinline__ T &place_of(T *memory, int at)
{
    return memory[(at & (AHEAD - 1)) * THREADS_OF_BLOCK + threadIdx.x];
}
