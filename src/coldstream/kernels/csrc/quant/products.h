// One weight slice times a batch of activations: chooses the kernel, and divides the batch by its size. Used
// by every op; runs on one worker.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/blocks.h"
#include "quant/kernels.h"

namespace coldstream {

// Private memory that `multiply` needs for products over `cols` inputs, 64-byte aligned.
size_t multiply_bytes(const QuantKernels& k, int64_t cols);

// Whether a batch of `num_rows` rows is better packed into tiles for weights of this type.
inline bool prefers_tiles(const QuantKernels& k, QuantType type, int64_t num_rows) {
  return k.gemm != nullptr && quant_is_integer(type) && num_rows >= k.gemm_min_rows(type);
}

inline constexpr int64_t pass_rows = int64_t{gemm_max_tiles} * tile_rows;

// Sources and outputs of the rows of a product. A source that no weight needs may be null.
struct ProductRows {
  const float* const* x;        // for float and dequantised weights
  const ActivationRow* q;       // for integer types, in the form of the weights'
  const ActivationTile* tiles;  // the same, if packed; then `q` is not read
  float* const* out;            // element n of the slice goes to out[t][n]
  int count;                    // at most pass_rows; with tiles, `out` is padded with null to whole tiles
};

void multiply(const QuantKernels& k, const WeightRows& w, const ProductRows& rows, std::byte* memory);

}  // namespace coldstream
