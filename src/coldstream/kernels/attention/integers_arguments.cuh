// Arguments of the kernels of attention over integers.
#pragma once

#include "attention/choice.cuh"
#include "attention/integers_tile.cuh"

namespace coldstream {

struct IntegersArguments {
  const int8_t* query;        // [T, H, 2, D], high planes and low planes
  const float* query_scales;  // [T, H]
  const uint8_t *k_cache, *v_cache;
  float* values;  // [T, H, max_chunks, D], numerators
  float2* stats;  // [T, H, max_chunks], maximum and denominator
  BatchRows rows;
  CacheStrides strides;
  int32_t num_heads, num_kv_heads, max_chunks, window;
  ChosenWords chosen;  // of kernels with a choice
};

}  // namespace coldstream
