// Quantised activations in the two layouts that products read; both are padded with zeros to whole groups.
#pragma once

#include <cstddef>
#include <cstdint>

namespace coldstream {

inline constexpr int group_elements = 256;  // inputs that share one activation scale
inline constexpr int tile_rows = 16;

constexpr int64_t num_groups(int64_t cols) { return (cols + group_elements - 1) / group_elements; }

// One row: the layout for few rows, and what every activation is quantised into first.
struct activation_row {
  int8_t* q;      // [groups * 256]
  int16_t* sums;  // [groups * 16], over 16 consecutive q
  float* scales;  // [groups]

  static constexpr size_t bytes(int64_t cols) {
    const size_t per_group = group_elements + 16 * sizeof(int16_t) + sizeof(float);
    return (num_groups(cols) * per_group + 63) / 64 * 64;
  }

  // `memory` holds bytes(cols) bytes and is aligned to 64.
  static activation_row at(std::byte* memory, int64_t cols) {
    const int64_t groups = num_groups(cols);
    auto* q = reinterpret_cast<int8_t*>(memory);
    auto* sums = reinterpret_cast<int16_t*>(q + groups * group_elements);
    return {q, sums, reinterpret_cast<float*>(sums + groups * 16)};
  }
};

// One group of 16 rows with the row innermost: the layout for many rows. Lanes of a vector register, and
// columns of a matrix tile, are rows.
struct alignas(64) activation_tile {
  int8_t q[64][tile_rows][4];        // four consecutive inputs of each row
  int16_t sums_16[8][tile_rows][2];  // over 16 inputs, two consecutive sums
  int16_t sums_32[4][tile_rows][2];  // over 32 inputs, two consecutive sums
  float scales[tile_rows];
};
static_assert(sizeof(activation_tile) == 4928);

}  // namespace coldstream
