// A weight matrix, or a stack of them (experts), in GGUF's own block layout where it lies: in a mapped file
// or an array.
#pragma once

#include <cstdint>
#include <memory>

#include "quant/blocks.h"

namespace coldstream {

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
