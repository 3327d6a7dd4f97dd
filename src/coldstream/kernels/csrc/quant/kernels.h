// The quantised kernels, one table per tier. All tiers give the same bits, and a row's result does not depend
// on other rows, so that the choice of kernel affects only speed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/activations.h"
#include "quant/weight.h"
#include "tier.h"

namespace coldstream {

// Consecutive rows of one weight matrix.
struct WeightRows {
  QuantType type;
  const uint8_t* data;
  int64_t row_bytes;
  int64_t count;
  int64_t cols;
};

// Rows begin … end of one matrix of a stack.
inline WeightRows slice_of(const Weight& w, int64_t matrix, int64_t begin, int64_t end) {
  return {w.type, w.row(matrix, begin), w.row_bytes, end - begin, w.num_cols};
}

// The most activation rows that the `gemv` kernels take in one call; `gemm` takes up to `gemm_max_tiles`
// tiles.
inline constexpr int gemv_max_rows = 8;
inline constexpr int gemm_max_tiles = 8;

struct QuantKernels {
  void (*quantize_row)(const float* x, int64_t cols, ActivationRow out);  // in the form of `out`
  bool interleaves_blocks = false;                                        // see `ActivationRow::q`

  // out[t][n] = product of weight row n with activation row t, of an integer type, whose form the activations
  // have; reads the blocks of `w` and nothing beyond them.
  void (*gemv)(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out);

  // The same for tiles of 16 rows, x[tile][group]; `out` has 16 pointers per tile, null for rows that are
  // padding. Null if the tier has nothing better than `gemv`. `memory` is 64-byte aligned, `gemm_bytes` long.
  void (*gemm)(const WeightRows& w, const ActivationTile* x, int num_tiles, float* const* out,
               std::byte* memory);
  size_t gemm_bytes;
  int (*gemm_min_rows)(QuantType type);  // the least rows for which `gemm` is faster
  // Rows of activations (num_rows <= 16, all of the first one's form) to one tile per group; missing rows
  // become zeros.
  void (*pack)(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out);

  // out[t][n] for float weights [count][cols] (row stride in floats) and float activations.
  void (*float_product)(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                        int num_rows, float* const* out);
  void (*dequantize_row)(QuantType type, const uint8_t* data, int64_t cols, float* out);
  void (*glu)(const Glu& unit, const float* gate, const float* up, int64_t count, float* out);
};

extern const QuantKernels quant_kernels_generic;
extern const QuantKernels quant_kernels_avx2;
extern const QuantKernels quant_kernels_avx_vnni;
extern const QuantKernels quant_kernels_avx512;
extern const QuantKernels quant_kernels_amx;
extern const QuantKernels quant_kernels_neon;
extern const QuantKernels quant_kernels_dotprod;

// The table of a tier that this machine supports.
const QuantKernels& quant_kernels_for(Tier t);

}  // namespace coldstream
