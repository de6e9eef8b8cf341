// Paged KV to canonical chunks and back, with a checksum of every chunk on the way.
//
// The law: one thread block moves one tile, a stretch of one block of one layer plane, whose place in the chunk is fixed
// when the engine registers. Only block ids differ between transfers; all addresses are computed here. A chunk's
// checksum is the sum over its 16-byte vectors v, at vector index i:
//     dot(v as four uint32, MULTIPLIERS) * weight(i)   (mod 2^64)
// It is linear in every byte, so tiles add up in any order and at any alignment; every multiplier and weight is odd, so
// that no change inside one word goes unseen. `kvist/device/checksum.py` is the same in numpy.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Tile {
    u64 base;          // address of its layer's block 0, of K or of V
    i64 block_stride;
    i64 outer_stride;  // between runs, in the order of the chunk: run r lies at r / num_inner, r % num_inner
    i64 inner_stride;
    u64 slot_offset;   // of the tile, from the chunk's start
    u32 start;         // of the tile, from its block's first byte in the order of the chunk
    u32 nbytes;
    u32 run_nbytes;    // contiguous in the engine's memory
    u32 num_inner;
    u32 position;      // which of the chunk's blocks
    u32 access_nbytes; // 16, 4 or 1: what addresses and sizes are multiples of
};

struct Slice {
    const Tile* tiles;
    const int* block_ids;  // [num_chunks][blocks_per_chunk]
    u8* staging;
    u64* checksums;        // [num_chunks]
    u64 start;             // of the slice, from its chunk's start; a multiple of 16
    u64 chunk_stride;      // between chunks in staging
    u32 first_chunk;
    u32 blocks_per_chunk;
    u32 num_skipped_blocks;
};

__device__ __constant__ u64 MULTIPLIERS[4] = {
    0x9E3779B97F4A7C15ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull, 0xD6E8FEB86659FD93ull};

__device__ __forceinline__ u64 weight(u64 index) {
    u64 z = (index + 1) * 0x9E3779B97F4A7C15ull;
    z ^= z >> 32;
    z *= 0xD6E8FEB86659FD93ull;
    z ^= z >> 32;
    return z | 1;
}

__device__ __forceinline__ u64 checksum_of(uint4 v, u64 offset) {
    return (v.x * MULTIPLIERS[0] + v.y * MULTIPLIERS[1] + v.z * MULTIPLIERS[2] + v.w * MULTIPLIERS[3]) *
           weight(offset >> 4);
}

__device__ __forceinline__ u64 checksum_of(u32 v, u64 offset) {
    return v * MULTIPLIERS[(offset >> 2) & 3] * weight(offset >> 4);
}

__device__ __forceinline__ u64 checksum_of(u8 v, u64 offset) {
    return ((u64)v << (8 * (offset & 3))) * MULTIPLIERS[(offset >> 2) & 3] * weight(offset >> 4);
}

enum { GATHER, SCATTER, CHECK };

template <int MODE, typename Access>
__device__ __forceinline__ u64 move(const Tile& tile, u8* engine, u8* packed, bool writes) {
    const u32 size = sizeof(Access);
    const u32 count = tile.nbytes / size, start = tile.start / size, run = tile.run_nbytes / size;
    const bool is_flat = start + count <= run;
    u64 sum = 0;
    const int UNROLL = 4;
    for (u32 first = threadIdx.x; first < count; first += UNROLL * blockDim.x) {
        Access value[UNROLL];
        Access* place[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const u32 i = first + k * blockDim.x;
            if (i >= count) continue;
            i64 at = (i64)(start + i) * size;
            if (!is_flat) {
                const u32 number = (start + i) / run;
                at = (i64)(number / tile.num_inner) * tile.outer_stride +
                     (i64)(number % tile.num_inner) * tile.inner_stride + (i64)((start + i) % run) * size;
            }
            place[k] = (Access*)(engine + at);
            value[k] = __ldcs(MODE == SCATTER ? (Access*)packed + i : place[k]);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const u32 i = first + k * blockDim.x;
            if (i >= count) continue;
            if (MODE == GATHER) ((Access*)packed)[i] = value[k];
            if (MODE == SCATTER && writes) __stcs(place[k], value[k]);
            sum += checksum_of(value[k], tile.slot_offset + (u64)i * size);
        }
    }
    return sum;
}

template <int MODE>
__device__ __forceinline__ void copy(const Slice& slice) {
    const Tile tile = slice.tiles[blockIdx.x];
    const u32 chunk = slice.first_chunk + blockIdx.y;
    const i64 block = slice.block_ids[(u64)chunk * slice.blocks_per_chunk + tile.position];
    u8* engine = (u8*)tile.base + block * tile.block_stride;
    u8* packed = slice.staging + blockIdx.y * slice.chunk_stride + (tile.slot_offset - slice.start);
    const bool writes = chunk > 0 || tile.position >= slice.num_skipped_blocks;
    u64 sum = tile.access_nbytes == 16  ? move<MODE, uint4>(tile, engine, packed, writes)
              : tile.access_nbytes == 4 ? move<MODE, u32>(tile, engine, packed, writes)
                                        : move<MODE, u8>(tile, engine, packed, writes);
    for (int step = 16; step; step >>= 1) sum += __shfl_down_sync(0xFFFFFFFFu, sum, step);
    __shared__ u64 sums[32];
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < blockDim.x >> 5; ++warp) sum += sums[warp];
        atomicAdd(slice.checksums + chunk, sum);
    }
}

extern "C" __global__ void __launch_bounds__(256) gather(const Slice slice) { copy<GATHER>(slice); }
extern "C" __global__ void __launch_bounds__(256) scatter(const Slice slice) { copy<SCATTER>(slice); }

// Only the checksums: of blocks that the copy engine moves by itself.
extern "C" __global__ void __launch_bounds__(256) check(const Slice slice) { copy<CHECK>(slice); }
