// Keys or values of a block of positions as floats in shared memory, a part at a time: the first dimensions
// of all its keys, then the next, or the first positions' values, then the next. A part goes through
// registers, where the cache's type is undone once for all rows that read it.
#pragma once

#include "attention/tile.cuh"

namespace coldstream {

constexpr int power_of_two_up_to(int n) { return n < 2 ? 1 : 2 * power_of_two_up_to(n / 2); }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a < b ? b : a; }
constexpr int quotient_up(int a, int b) { return (a + b - 1) / b; }

// This thread's place in its role, of which the compiler knows no more than that: else it finds addresses
// long before they are used, and keeps them in registers that sums need.
template <int threads>
__device__ __forceinline__ uint32_t thread_of_role() {
  uint32_t thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread % threads;
}

// `key_bytes` or `value_bytes` of shared memory hold a part, which `threads` threads bring.
template <class cache, int head_dim, int threads, int key_bytes, int value_bytes>
struct kv_stage {
  static constexpr int code_chunks = cache::code_chunks(head_dim);
  static constexpr int row_bytes = (code_chunks + cache::scale_chunks(head_dim)) * 16;
  static constexpr int row_pieces = head_dim / cache::chunk_values;
  static constexpr int chunk_quads = cache::chunk_values / 4;

  // Of keys: dimensions in multiples of 32, each with its 64 positions (see `place_of_key`).
  static constexpr int key_dims = smaller(key_bytes / (4 * block_positions), quotient_up(head_dim, 32) * 32);
  static constexpr int key_parts = quotient_up(head_dim, key_dims);
  static constexpr int key_chunks = key_dims / cache::chunk_values;
  static constexpr int key_pieces = quotient_up(block_positions * key_chunks, threads);
  // Of eight dimensions, and a gap, so that eight times eight go to different banks.
  static constexpr int eight_floats = 8 * block_positions + 4;
  static constexpr int key_floats = key_dims / 8 * eight_floats;
  static_assert(key_dims % 32 == 0);

  // Of values: whole positions.
  static constexpr int value_positions =
      smaller(power_of_two_up_to(value_bytes / (4 * head_dim)), block_positions);
  static constexpr int value_parts = block_positions / value_positions;
  static constexpr int value_pieces = quotient_up(value_positions * row_pieces, threads);
  static_assert(value_positions % 4 == 0);

  uint4 pieces[larger(key_pieces, value_pieces)];
  uint16_t scales[larger(key_pieces, value_pieces)];

  // Begins to read part `part` of the keys of rows begin … end − 1 of the block that begins at `rows`.
  __device__ __forceinline__ void fetch_keys(const uint8_t* rows, int64_t position_bytes, int part, int begin,
                                             int end) {
    const uint32_t thread = thread_of_role<threads>();
#pragma unroll
    for (int i = 0; i < key_pieces; i++) {
      const key_piece piece = piece_of_key(thread, i);
      const int row = piece.row, chunk = part * key_chunks + piece.chunk;
      fetch(i, rows + row * position_bytes, chunk, row >= begin && row < end && chunk < row_pieces);
    }
  }

  __device__ __forceinline__ void store_keys(float* stage) const {
    const uint32_t thread = thread_of_role<threads>();
#pragma unroll
    for (int i = 0; i < key_pieces; i++) {
      const key_piece piece = piece_of_key(thread, i);
      if (key_pieces * threads > block_positions * key_chunks && piece.chunk >= key_chunks) return;
      const uint32_t first = piece.chunk * cache::chunk_values;
#pragma unroll
      for (int quad = 0; quad < chunk_quads; quad++) {
        const float4 x = quad_of(i, quad);
        const uint32_t dim = first + 4 * quad;
        float* to = stage + dim / 8 * eight_floats + dim % 8 * block_positions + place_of_key(piece.row);
        to[0] = x.x, to[block_positions] = x.y, to[2 * block_positions] = x.z, to[3 * block_positions] = x.w;
      }
    }
  }

  // Positions lane + 8 j lie in two quads: a thread reads them at once, and eight threads all banks.
  static __device__ __forceinline__ int place_of_key(uint32_t position) {
    return position / 32 * 32 + position % 8 * 4 + position / 8 % 4;
  }

  struct key_piece {
    uint32_t row, chunk;
  };

  // The eight pieces of a row that follow each other, of four rows, go to different banks.
  static __device__ __forceinline__ key_piece piece_of_key(uint32_t thread, int i) {
    constexpr uint32_t near = key_chunks % 8 == 0 ? 8 : key_chunks;
    const uint32_t piece = thread + i * threads;
    const uint32_t row = piece / (4 * near) % (block_positions / 4), part = piece / (block_positions * near);
    return {row / 8 * 32 + piece / near % 4 * 8 + row % 8, part * near + piece % near};
  }

  // The same of the positions of part `part`.
  __device__ __forceinline__ void fetch_values(const uint8_t* rows, int64_t position_bytes, int part,
                                               int begin, int end) {
    const uint32_t thread = thread_of_role<threads>();
#pragma unroll
    for (int i = 0; i < value_pieces; i++) {
      const uint32_t piece = thread + i * threads;
      const int row = part * value_positions + piece / row_pieces;
      fetch(i, rows + row * position_bytes, piece % row_pieces, row >= begin && row < end);
    }
  }

  __device__ __forceinline__ void store_values(float* stage) const {
    const uint32_t thread = thread_of_role<threads>();
#pragma unroll
    for (int i = 0; i < value_pieces; i++) {
      const uint32_t piece = thread + i * threads;
      if (value_pieces * threads > value_positions * row_pieces && piece >= value_positions * row_pieces) {
        return;
      }
#pragma unroll
      for (int quad = 0; quad < chunk_quads; quad++) {
        reinterpret_cast<float4*>(stage)[piece * chunk_quads + quad] = quad_of(i, quad);
      }
    }
  }

  __device__ __forceinline__ void fetch(int i, const uint8_t* row, int chunk, bool is_there) {
    pieces[i] = make_uint4(0, 0, 0, 0);
    scales[i] = 0;
    if (!is_there) return;
    if constexpr (cache::is_turned) {
      const auto at = [row](int byte) { return row + byte; };
      pieces[i] = cache::piece_of(at, head_dim, chunk);
      scales[i] = cache::scale_bits_of(at, head_dim, chunk);
      return;
    }
    pieces[i] = reinterpret_cast<const uint4*>(row)[chunk];
    if constexpr (cache::scale_chunks(head_dim) > 0) {
      const auto all = reinterpret_cast<const uint16_t*>(row + code_chunks * 16);
      scales[i] = all[chunk * cache::chunk_values / scale_values];
    }
  }

  __device__ __forceinline__ float4 quad_of(int i, int quad) const {
    constexpr bool has_scales = cache::is_turned || cache::scale_chunks(head_dim) > 0;
    const float scale = has_scales ? half_to_float(scales[i]) : 1.0f;
    return cache::four_of(pieces[i], quad, scale);
  }
};

}  // namespace coldstream
