// Where the rows of a matrix lie in shared memory for products of warpgroups: in 128 bytes a row whose chunks
// of 16 are swizzled, or in sixteens of eight rows.
#pragma once

namespace coldstream {

constexpr int swizzled_rows = 8, swizzled_row_bytes = 128;
constexpr int swizzle_bytes = swizzled_rows * swizzled_row_bytes;  // aligned to as many

// Chunk `chunk` of row `row`, of rows of any multiple of 128 bytes: those of 128 bytes of all rows come
// first.
template <int num_rows>
__device__ constexpr int swizzled_place(int row, int chunk) {
  return (chunk / 8 * num_rows + row) * swizzled_row_bytes + ((chunk ^ row) & 7) * 16;
}

// The first sixteens of eight rows, the second ones, those of the next eight rows, and so on.
constexpr int plain_half_bytes = swizzled_rows * 16, plain_bytes = 2 * plain_half_bytes;

__device__ constexpr int plain_place(int row, int half) {
  return row / swizzled_rows * plain_bytes + half * plain_half_bytes + row % swizzled_rows * 16;
}

}  // namespace coldstream
