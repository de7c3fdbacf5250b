// Rows on their way from memory while a warp adds up those before them. They wait in shared memory: in registers a
// thread would have room for two, and a copy between registers would wait for both.

#pragma once

// First rows of a list that are on their way, and threads of a block as in pyg_direct/compiler/jit.py.
#define AHEAD 2
#define THREADS_OF_BLOCK 256
#define LANES 32
#define WARP 0xffffffffu

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void copy_ahead(uint4 *to, const uint4 *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
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
__device__ __forceinline__ void end_copies() {}
template <int groups> __device__ __forceinline__ void wait_for_copies() {}
#endif

// The part of each row of a table that a warp reads: a thread has `V` pieces of 16 bytes, side by side, which all
// belong to one head. Shared memory has room for the first rows of two lists.
template <int V> struct Rows {
    static const int ROOM = 2 * AHEAD * V * THREADS_OF_BLOCK;
    uint4 *memory;
    const uint4 *table;
    unsigned pieces, lane, first, count;

    // `first` is the warp's first piece of a row of `pieces`.
    __device__ __forceinline__ Rows(uint4 *block, u64 rows, unsigned row_pieces, unsigned first_piece, unsigned thread)
        : memory(block + threadIdx.x / LANES * (ROOM / (THREADS_OF_BLOCK / LANES))),
          table(reinterpret_cast<const uint4 *>(rows)), pieces(row_pieces), lane(thread), first(first_piece),
          count(min(row_pieces - first_piece, (unsigned)(V * LANES))) {}
    __device__ __forceinline__ bool is_used() const { return lane * V < count; }
    __device__ __forceinline__ void send(int place, unsigned row) const
    {
        const uint4 *from = table + ((u64)row * pieces + first + lane);
        uint4 *to = memory + (place * V * LANES + lane);
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (lane + v * LANES < count) copy_ahead(to + v * LANES, from + v * LANES);
    }
    // Sends the first rows of a list of `num`, of which thread i has id i.
    __device__ __forceinline__ void send_first(int turn, int num, unsigned id) const
    {
        __syncwarp(WARP);
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (u < num) send(turn * AHEAD + u, __shfl_sync(WARP, id, u));
        end_copies();
    }
    // Calls `add` for each row of a list whose first rows were sent; the first ones of the next list have been sent
    // since. Ids are in `ids`, and in `id` as for `send_first`.
    template <class Kind, class Add>
    __device__ __forceinline__ void read(int turn, int num, unsigned id, const int *ids, Add add) const
    {
        wait_for_copies<1>();
        __syncwarp(WARP);
        for (int e = 0; e < num; ++e) {
            if (e >= AHEAD) {
                wait_for_copies<AHEAD - 1>();
                __syncwarp(WARP);
            }
            const int place = turn * AHEAD + (e & (AHEAD - 1)), far = e + AHEAD;
            float value[V * Kind::items];
#pragma unroll
            for (int v = 0; v < V; ++v)
                unpack(Kind(), memory[place * V * LANES + lane * V + v], value + v * Kind::items);
            if (num > AHEAD) {
                __syncwarp(WARP);
                if (far < num) {
                    if ((far & (LANES - 1)) == 0) id = ids[min(far + (int)lane, num - 1)];
                    send(place, __shfl_sync(WARP, id, far & (LANES - 1)));
                }
                end_copies();
            }
            add(e, value);
        }
    }
};
