// The sampler's numbers: token weights in float64, the order of tokens, and the integers of the draw. Every
// operation rounds on its own.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr double weight_one = 1099511627776.0;  // 2^40: the weight of the largest logit

// exp(x) * 2^40, rounded down, for x <= 0; below -28 nothing is left. A call, as it is as long as the rest of
// a kernel if each place has its own.
__device__ __noinline__ uint64_t weight_of_exponent(double x) {
  if (!(x >= -28.0)) return 0;
  constexpr double coefficients[13] = {1.0 / 479001600.0,
                                       1.0 / 39916800.0,
                                       1.0 / 3628800.0,
                                       1.0 / 362880.0,
                                       1.0 / 40320.0,
                                       1.0 / 5040.0,
                                       1.0 / 720.0,
                                       1.0 / 120.0,
                                       1.0 / 24.0,
                                       1.0 / 6.0,
                                       1.0 / 2.0,
                                       1.0,
                                       1.0};
  const double n = rint(x * 1.4426950408889634);
  const double t = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double result = coefficients[0];
#pragma unroll
  for (int i = 1; i < 13; i++) {
    result = result * t;
    result = result + coefficients[i];
  }
  const double power_of_two = __longlong_as_double(int64_t(static_cast<int>(n) + 1023) << 52);
  return static_cast<uint64_t>(floor(result * power_of_two * weight_one));
}

__device__ __noinline__ uint64_t token_weight(float logit, float largest, double temperature) {
  return weight_of_exponent((double(logit) - double(largest)) / temperature);
}

__device__ __forceinline__ uint64_t token_weight(float logit, float largest) {
  return weight_of_exponent(double(logit) - double(largest));
}

// Tokens in the order of (logit descending, id ascending), as numbers that ascend. Zeros of either sign are
// equal.
__device__ __forceinline__ uint64_t order_key(float logit, int id) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  const uint32_t ascending = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return uint64_t(~ascending) << 32 | uint32_t(id);
}

__device__ __forceinline__ int key_id(uint64_t key) { return int(uint32_t(key)); }

__device__ __forceinline__ float key_logit(uint64_t key) {
  const uint32_t ascending = ~uint32_t(key >> 32);
  return __uint_as_float(ascending ^ (ascending >> 31 ? 0x80000000u : 0xffffffffu));
}

// Whether a float is neither infinite nor NaN.
__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// The first two of the four words of Philox4x32-10, the key being `seed` and the counter `position`.
__device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint64_t position) {
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = uint64_t(0xD2511F53u) * c0, product1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return uint64_t(c1) << 32 | c0;
}

}  // namespace coldstream
