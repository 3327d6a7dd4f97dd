// A weight matrix, or a stack of them (experts), in GGUF's own block layout where it lies: in a mapped file
// or an array.
#pragma once

#include <cstdint>
#include <memory>

namespace coldstream {

enum class QuantType : int {
  // clang-format off
  f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q2_k = 10, q3_k = 11, q4_k = 12,
  q5_k = 13, q6_k = 14, iq2_xxs = 16, iq2_xs = 17, iq3_xxs = 18, iq1_s = 19, iq4_nl = 20, iq3_s = 21,
  iq2_s = 22, iq4_xs = 23, iq1_m = 29, bf16 = 30, tq2_0 = 35, mxfp4 = 39, q2_0 = 42,
  // clang-format on
};

struct Weight {
  const uint8_t* data;  // first block of the first row; null if there is a table of addresses
  QuantType type;
  int64_t num_matrices;  // 1, or the number of experts
  int64_t num_rows;      // output features of one matrix
  int64_t num_cols;      // input features
  int64_t row_bytes;
  int64_t matrix_bytes;         // from one matrix to the next: more than its rows, for a view of some of them
  std::shared_ptr<void> owner;  // keeps `data` or `addresses` valid
  const uint8_t* const* addresses = nullptr;  // [num_matrices] if each lies where its entry says
  int64_t first_byte = 0;  // from a matrix's address to the first row: not 0 for a view of later ones

  const uint8_t* row(int64_t matrix, int64_t index) const {
    const uint8_t* first = addresses ? addresses[matrix] + first_byte : data + matrix * matrix_bytes;
    return first + index * row_bytes;
  }
};

}  // namespace coldstream
