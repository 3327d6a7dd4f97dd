// What products with few activation rows share in all vector tiers: which blocks meet in the eight lanes that
// are the arithmetic's eight accumulators. Every byte of the weights is read once, straight from the file,
// and unpacked once for all activation rows.
//
// A `kernel` has its traits `T`, `most_fixed_rows`, and
//   add_super_blocks<rows, full, E>(data, stride, count, x, g, num_rows, p):
//     eight super-blocks, `stride` bytes apart, or fewer at the end if not full; the first one meets
//     activation group g. Each adds to a lane of p. rows is the number of activation rows, or 0 if only known
//     at run time;
//   add_small_blocks(b, count, x, g, num_rows, p):
//     small blocks of 256 inputs, one activation group; those behind the first `count` times 32 inputs belong
//     to other rows;
//   perhaps also, to take small blocks of four weight rows at a time with one activation row:
//   add_small_blocks_of_rows(data, stride, x, p):
//     those of 256 inputs of four rows, `stride` bytes apart, meet the first group of x; lanes of p[i] are
//     the accumulators of row i;
//   store_sums(out, p): the sums of these accumulators.
#pragma once

#include <cstring>

#include "quant/kernels.h"
#if defined(__aarch64__)
#include "quant/eight_lanes_neon.h"
#else
#include "quant/eight_lanes.h"
#endif

namespace coldstream {

// Where eight super-blocks lie: one behind the other in a weight row, or below each other in eight rows.
enum class Eight { of_a_row, of_rows };

// The activation rows that there is room for.
template <int rows>
inline constexpr int capacity_of = rows != 0 ? rows : gemv_max_rows;

inline constexpr int64_t prefetch_distance = 8192;  // in bytes

// How far before its use a super-block is asked for. Eight rows that are read side by side are near each
// other: a block at the usual distance would often be of these rows too, and be read at once.
template <Eight E>
inline __attribute__((always_inline)) int64_t distance_ahead(int64_t stride) {
  if constexpr (E == Eight::of_a_row) return prefetch_distance;
  const int64_t eight_rows = 8 * stride;
  return (prefetch_distance + eight_rows - 1) / eight_rows * eight_rows;
}

// The hardware does not prefetch across page boundaries. Always inline, as every function of prefetches: GCC
// leaves out calls of functions that do nothing else, because they have no result.
static inline __attribute__((always_inline)) void prefetch_weights(const void* block, size_t bytes,
                                                                   int64_t distance = prefetch_distance) {
  const auto* p = static_cast<const char*>(block) + distance;
  for (size_t i = 0; i < bytes; i += 64) prefetch_line(p + i);
}

// Weight rows n … n + count - 1, at most eight, which are the lanes: for rows that do not fill eight lanes
// with their own super-blocks. With several streams also those `distance` further on, and so on.
template <typename Kernel, int rows, bool full, int streams>
inline __attribute__((always_inline)) void multiply_eight_rows(const WeightRows& w, int64_t n,
                                                               int64_t distance, int count,
                                                               const ActivationRow* x, int num_rows,
                                                               float* const* out) {
  using Block = typename Kernel::T::Block;
  FloatLanes p[streams][8][capacity_of<rows>];
  for (int s = 0; s < streams; s++) {
    for (int lane = 0; lane < 8; lane++) {
      for (int t = 0; t < num_rows; t++) p[s][lane][t] = zero_lanes();
    }
  }
  for (int64_t g = 0; g < w.cols / group_elements; g++) {
    for (int s = 0; s < streams; s++) {
      const uint8_t* data =
          w.data + (n + s * distance) * w.row_bytes + g * static_cast<int64_t>(sizeof(Block));
      Kernel::template add_super_blocks<rows, full, Eight::of_rows>(data, w.row_bytes, count, x, g, num_rows,
                                                                    p[s][g % 8]);
    }
  }
  for (int s = 0; s < streams; s++) {
    for (int t = 0; t < num_rows; t++) {
      const auto& lanes = p[s];
      const FloatLanes of_row[8] = {lanes[0][t], lanes[1][t], lanes[2][t], lanes[3][t],
                                    lanes[4][t], lanes[5][t], lanes[6][t], lanes[7][t]};
      float* to = out[t] + n + s * distance;
      if constexpr (full) {
        store_lanes(to, sum_accumulators(of_row));
      } else {
        store_first_lanes(to, count, sum_accumulators(of_row));
      }
    }
  }
}

// Weight rows n, n + distance, … of which each fills the eight lanes with its own super-blocks.
template <typename Kernel, int rows, int streams>
inline __attribute__((always_inline)) void multiply_whole_rows(const WeightRows& w, int64_t n,
                                                               int64_t distance, const ActivationRow* x,
                                                               int num_rows, float* const* out) {
  using Block = typename Kernel::T::Block;
  FloatLanes p[streams][capacity_of<rows>];
  for (int s = 0; s < streams; s++) {
    for (int t = 0; t < num_rows; t++) p[s][t] = zero_lanes();
  }
  for (int64_t b = 0; b < w.cols / group_elements; b += 8) {
    for (int s = 0; s < streams; s++) {
      const uint8_t* data =
          w.data + (n + s * distance) * w.row_bytes + b * static_cast<int64_t>(sizeof(Block));
      Kernel::template add_super_blocks<rows, true, Eight::of_a_row>(data, sizeof(Block), 8, x, b, num_rows,
                                                                     p[s]);
    }
  }
  for (int s = 0; s < streams; s++) {
    for (int t = 0; t < num_rows; t++) out[t][n + s * distance] = sum_lanes(p[s][t]);
  }
}

template <typename Kernel, int rows>
void gemv_of_super_blocks(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  if constexpr (rows != 0) num_rows = rows;
  // One activation row waits for memory, which gives more bytes to two places that are read in turn. Four are
  // better still on some processors, and three times slower on others, where they meet in the same sets of a
  // cache.
  constexpr int streams = rows == 1 ? 2 : 1;
  int64_t n = 0;
  if (w.cols / group_elements % 8 != 0) {
    if constexpr (streams > 1) {
      const int64_t distance = w.count / (8 * streams) * 8;
      for (; n < distance; n += 8)
        multiply_eight_rows<Kernel, rows, true, streams>(w, n, distance, 8, x, num_rows, out);
      n *= streams;
    }
    for (; n + 8 <= w.count; n += 8) multiply_eight_rows<Kernel, rows, true, 1>(w, n, 0, 8, x, num_rows, out);
    if (n < w.count) {
      multiply_eight_rows<Kernel, rows, false, 1>(w, n, 0, static_cast<int>(w.count - n), x, num_rows, out);
    }
    return;
  }
  if constexpr (streams > 1) {
    const int64_t distance = w.count / streams;
    for (; n < distance; n++) multiply_whole_rows<Kernel, rows, streams>(w, n, distance, x, num_rows, out);
    n *= streams;
  }
  for (; n < w.count; n++) multiply_whole_rows<Kernel, rows, 1>(w, n, 0, x, num_rows, out);
}

// The small blocks of a group.
template <typename Kernel>
inline constexpr int blocks_in_group = group_elements / Kernel::T::block_inputs;

// The last `rest` blocks of weight row n. Blocks of the next rows are read with them, if there are any.
template <typename Kernel>
inline __attribute__((always_inline)) void add_last_blocks(const WeightRows& w, int64_t n, int64_t b,
                                                           int rest, const ActivationRow* x, int num_rows,
                                                           FloatLanes* p) {
  using Block = typename Kernel::T::Block;
  constexpr int per_group = blocks_in_group<Kernel>;
  const uint8_t* data = w.data + n * w.row_bytes + b * static_cast<int64_t>(sizeof(Block));
  const uint8_t* end =
      w.data + (w.count - 1) * w.row_bytes + w.cols / Kernel::T::block_inputs * sizeof(Block);
  const int count = rest * blocks_per_group / per_group;
  if (data + per_group * sizeof(Block) <= end) {
    prefetch_weights(data, static_cast<size_t>(rest) * sizeof(Block));
    Kernel::add_small_blocks(reinterpret_cast<const Block*>(data), count, x, b / per_group, num_rows, p);
  } else {
    Block padded[per_group] = {};
    std::memcpy(padded, data, static_cast<size_t>(rest) * sizeof(Block));
    Kernel::add_small_blocks(padded, count, x, b / per_group, num_rows, p);
  }
}

// Whether a kernel takes small blocks of four weight rows at a time.
template <typename Kernel>
concept TakesFourRows = requires { &Kernel::add_small_blocks_of_rows; };

// Weight rows n … n + 3 of small blocks with one activation row, which is read and summed up once for them.
template <typename Kernel>
inline __attribute__((always_inline)) void multiply_four_rows(const WeightRows& w, int64_t n,
                                                              const ActivationRow& x, float* out) {
  using Block = typename Kernel::T::Block;
  constexpr int per_group = blocks_in_group<Kernel>;
  const int64_t num_blocks = w.cols / Kernel::T::block_inputs;
  FloatLanes p[4] = {zero_lanes(), zero_lanes(), zero_lanes(), zero_lanes()};
  const uint8_t* data = w.data + n * w.row_bytes;
  ActivationRow group = x;  // moves on, as addresses with an index cost an instruction each
  int64_t b = 0;
  for (; b + per_group <= num_blocks; b += per_group) {
    Kernel::add_small_blocks_of_rows(data, w.row_bytes, group, p);
    data += per_group * sizeof(Block);
    group = {group.q + group_elements, group.sums + group_elements / 16, group.scales + blocks_per_group,
             x.form};
  }
  for (int i = 0; i < 4 && b < num_blocks; i++)
    add_last_blocks<Kernel>(w, n + i, b, static_cast<int>(num_blocks - b), &x, 1, p + i);
  Kernel::store_sums(out + n, p);
}

template <typename Kernel, int rows>
void gemv_of_small_blocks(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  using Block = typename Kernel::T::Block;
  constexpr int per_group = blocks_in_group<Kernel>;
  if constexpr (rows != 0) num_rows = rows;
  const int64_t num_blocks = w.cols / Kernel::T::block_inputs;
  int64_t n = 0;
  if constexpr (rows == 1 && TakesFourRows<Kernel>) {
    for (; n + 4 <= w.count; n += 4) multiply_four_rows<Kernel>(w, n, *x, out[0]);
  }
  for (; n < w.count; n++) {
    const auto* row = reinterpret_cast<const Block*>(w.data + n * w.row_bytes);
    FloatLanes p[capacity_of<rows>];
    for (int t = 0; t < num_rows; t++) p[t] = zero_lanes();
    int64_t b = 0;
    for (; b + per_group <= num_blocks; b += per_group) {
      prefetch_weights(row + b, per_group * sizeof(Block));
      Kernel::add_small_blocks(row + b, blocks_per_group, x, b / per_group, num_rows, p);
    }
    if (b < num_blocks) add_last_blocks<Kernel>(w, n, b, static_cast<int>(num_blocks - b), x, num_rows, p);
    for (int t = 0; t < num_rows; t++) out[t][n] = sum_lanes(p[t]);
  }
}

template <typename Kernel, int rows>
void gemv_of_rows(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  if constexpr (Kernel::T::super_block) {
    gemv_of_super_blocks<Kernel, rows>(w, x, num_rows, out);
  } else {
    gemv_of_small_blocks<Kernel, rows>(w, x, num_rows, out);
  }
}

// With the number of activation rows known to the compiler if it is at most kernel::most_fixed_rows.
template <typename Kernel, int rows = 1>
void gemv_of_type(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  if constexpr (rows > Kernel::most_fixed_rows) {
    gemv_of_rows<Kernel, 0>(w, x, num_rows, out);
  } else if (num_rows == rows) {
    gemv_of_rows<Kernel, rows>(w, x, rows, out);
  } else {
    gemv_of_type<Kernel, rows + 1>(w, x, num_rows, out);
  }
}

}  // namespace coldstream
