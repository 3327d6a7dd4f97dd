// Decodes blocks of every type to float32, a run of eight adjacent values at a time.
//
// Value i of a block, which lies in sub-block j, is (d · scale(j)) · code(i) − dmin · min(j), as in
// integer_blocks.py; every multiplication rounds on its own. Run r holds values 8 r … 8 r + 7, which share a
// sub-block.
#pragma once

#include "cuda/weight_traits.cuh"

namespace coldstream {

constexpr int run_values = 8;

// The factor of a run's codes, and what is subtracted from the products.
struct RunScale {
  float scale, minimum;
};

template <class Weights, class B>
__device__ __forceinline__ RunScale load_run_scale(const B& block, int j) {
  if constexpr (!Weights::is_super) {
    RunScale run = {Weights::d(block), 0.0f};
    if constexpr (Weights::has_mins) run.minimum = -Weights::minimum(block);
    return run;
  } else if constexpr (Weights::has_header) {
    const HeaderK header = Weights::header(block.memory);
    const int shift = j % 4 * 8;
    return {header.d * float((j < 4 ? header.scales[0] : header.scales[1]) >> shift & 255),
            header.dmin * float((j < 4 ? header.mins[0] : header.mins[1]) >> shift & 255)};
  } else {
    RunScale run = {Weights::d(block) * float(Weights::scale(block, j)), 0.0f};
    if constexpr (Weights::has_mins)
      run.minimum = Weights::dmin(block) * float(Weights::min_word(block, j / 4) >> (j % 4 * 8) & 255);
    return run;
  }
}

// Values of run r of a block.
template <class Weights>
__device__ __forceinline__ void load_run(const uint8_t* memory, int r, float (&values)[8]) {
  const ExactBytes<Weights::alignment> block = {memory};
  const uint32_t codes[2] = {Weights::word(block, 2 * r), Weights::word(block, 2 * r + 1)};
  const RunScale by =
      load_run_scale<Weights>(block, r * run_values * Weights::sub_blocks / Weights::elements);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    values[k] = by.scale * float(int8_t(codes[k / 4] >> (k % 4 * 8)));
    if constexpr (Weights::has_mins) values[k] -= by.minimum;
  }
}

// A type of floats in place of a block's traits.
template <int type>
struct Floats {
  static constexpr int elements = 1, bytes = type == f32 ? 4 : 2;
};

// Value i of a row of floats.
template <int type>
__device__ __forceinline__ float load_float(const uint8_t* row, int i) {
  if constexpr (type == f32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
  return type == f16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

__device__ __forceinline__ bool starts_on_16(const void* p) {
  return (reinterpret_cast<uint64_t>(p) & 15) == 0;
}

// Values first … first + 7 of a row of floats, those past its end 0.
template <int type>
__device__ __forceinline__ void load_values(Floats<type>, const uint8_t* row, int first, int cols,
                                            float (&values)[8]) {
  constexpr int value_bytes = type == f32 ? 4 : 2;
  const uint8_t* from = row + int64_t(first) * value_bytes;
  if (first + 8 <= cols && starts_on_16(from)) {
    uint4 raw[value_bytes / 2];
#pragma unroll
    for (int i = 0; i < value_bytes / 2; i++) raw[i] = load_16(from + 16 * i);
#pragma unroll
    for (int k = 0; k < 8; k++) values[k] = load_float<type>(reinterpret_cast<const uint8_t*>(raw), k);
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; k++) values[k] = first + k < cols ? load_float<type>(from, k) : 0.0f;
}

template <class Weights>
__device__ __forceinline__ void load_values(Weights, const uint8_t* row, int first, int, float (&values)[8]) {
  constexpr int elements = Weights::elements;
  load_run<Weights>(row + int64_t(first / elements) * Weights::bytes, first % elements / run_values, values);
}

}  // namespace coldstream
