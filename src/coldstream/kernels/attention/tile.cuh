// A block of 64 positions of one key/value head in shared memory.
#pragma once

#include "attention/grid.cuh"
#include "attention/turned.cuh"

namespace coldstream {

// `copy_async_16` to an address of shared memory.
__device__ __forceinline__ void copy_async_to(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Where keys or values lie: bytes between neighbouring positions and between slots.
struct cache_places {
  int64_t slot_bytes, position_bytes;
};

// With `swizzled`, piece c of row p lies at place c ^ (p mod 8), so that lanes with neighbouring positions
// meet different banks; without, lanes with neighbouring values do.
template <class cache, int head_dim>
struct kv_tile {
  static constexpr int code_chunks = cache::code_chunks(head_dim);
  static constexpr int scale_chunks = cache::scale_chunks(head_dim);
  static constexpr int row_chunks = code_chunks + scale_chunks;  // in global memory
  static constexpr int row_pieces = head_dim / cache::chunk_values;  // what is undone at once
  static constexpr int row_bytes = (code_chunks + 7) / 8 * 128;  // of codes, in shared memory
  static constexpr int code_bytes = block_positions * row_bytes;
  static constexpr int scale_bytes = scale_chunks * 16;  // of a row
  static constexpr int bytes = code_bytes + block_positions * scale_bytes;

  // Addresses of the bytes of a row.
  struct places {
    const uint8_t* tile;
    int row;
    bool swizzled;

    __device__ __forceinline__ const uint8_t* operator()(int byte) const {
      return tile + row * row_bytes + (byte / 16 ^ (swizzled ? row & 7 : 0)) * 16 + byte % 16;
    }
  };

  // Queues the copies of rows begin … end − 1 of the block whose first row is at `global`.
  template <int threads>
  static __device__ __forceinline__ void load(uint8_t* tile, const uint8_t* global, int64_t position_bytes,
                                              int begin, int end, bool swizzled) {
    if constexpr (threads % code_chunks == 0 && threads / code_chunks <= block_positions) {
      // A thread keeps its place in the row.
      constexpr int step = threads / code_chunks;
      const int chunk = threadIdx.x % code_chunks, first = threadIdx.x / code_chunks, mask = swizzled ? 7 : 0;
      const uint32_t to = shared_address(tile) + first * row_bytes, count = end - begin;
      const uint8_t* from = global + first * position_bytes + chunk * 16;
      const int64_t stride = step * position_bytes;
#pragma unroll
      for (int i = 0; i < block_positions / step; i++, from += stride) {
        const int row = first + i * step;
        if (uint32_t(row - begin) < count) {
          copy_async_to(to + (chunk ^ row & mask) * 16 + i * step * row_bytes, from);
        }
      }
    } else {
#pragma unroll 2
      for (int i = begin * code_chunks + threadIdx.x; i < end * code_chunks; i += threads) {
        const int row = i / code_chunks, chunk = i % code_chunks, place = chunk ^ (swizzled ? row & 7 : 0);
        copy_async_16(tile + row * row_bytes + place * 16, global + row * position_bytes + chunk * 16);
      }
    }
    if constexpr (scale_chunks > 0) {
#pragma unroll 1
      for (int i = begin * scale_chunks + threadIdx.x; i < end * scale_chunks; i += threads) {
        const int row = i / scale_chunks, chunk = i % scale_chunks;
        copy_async_16(tile + code_bytes + i * 16, global + row * position_bytes + (code_chunks + chunk) * 16);
      }
    }
  }

  // The scale of the value `i` of a row.
  static __device__ __forceinline__ float scale(const uint8_t* tile, int row, int i, bool swizzled) {
    if constexpr (cache::is_turned) {
      return half_to_float(cache::scale_bits_of(places{tile, row, swizzled}, head_dim, i / scale_values));
    }
    if constexpr (scale_chunks == 0) return 1.0f;
    const uint8_t* scales = tile + code_bytes + row * scale_bytes;
    return half_to_float(reinterpret_cast<const uint16_t*>(scales)[i / scale_values]);
  }

  // The codes of `chunk_values` values of a row of a swizzled tile.
  static __device__ __forceinline__ uint4 swizzled_piece(const uint8_t* tile, int row, int piece) {
    const places at = {tile, row, true};
    if constexpr (cache::is_turned) return cache::piece_of(at, head_dim, piece);
    return *reinterpret_cast<const uint4*>(at(piece * 16));
  }
};

// What a chain of merges multiplies: what came before by `ours`, what is added by `theirs`.
struct merge_factors {
  float ours, theirs;
};

__device__ __forceinline__ merge_factors factors_of(float before, float other) {
  const float after = fmaxf(before, other);
  return {exact_exp(before - after), exact_exp(other - after)};
}

}  // namespace coldstream
