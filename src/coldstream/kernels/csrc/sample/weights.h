// The sampler's numbers on the CPU: weights of tokens in float64, their order, and the integers of the draw,
// as decoding/sampling.py defines them. Every operation rounds on its own. Loops over these functions have no
// conditional branches, so that they vectorise.
#pragma once

#include <bit>
#include <cstdint>

namespace coldstream {

constexpr double weight_one = 0x1p40;  // the weight of the largest logit

// ⌊2^40 · exp(x)⌋ for x ≤ 0; below −28 nothing is left.
static inline uint64_t weight_of_exponent(double x) {
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
  // 1.5 · 2^52: adding it leaves no fraction bits, ties to even, and the integer in the lowest bits.
  constexpr double round_to_integer = 6755399441055744.0;
  const bool is_alive = x >= -28.0;
  x = is_alive ? x : 0.0;
  const double shifted = x * 1.4426950408889634 + round_to_integer;
  const double n = shifted - round_to_integer;
  const double t = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double result = coefficients[0];
  for (int i = 1; i < 13; i++) {
    result = result * t;
    result = result + coefficients[i];
  }
  const int64_t exponent = std::bit_cast<int64_t>(shifted) - std::bit_cast<int64_t>(round_to_integer) + 1023;
  const double scaled = result * std::bit_cast<double>(exponent << 52) * weight_one;
  return is_alive ? static_cast<uint64_t>(static_cast<int64_t>(scaled)) : 0;
}

static inline uint64_t token_weight(float logit, float largest, double temperature) {
  return weight_of_exponent((double(logit) - double(largest)) / temperature);
}

// Ascends with the logit. Zeros of either sign are equal. Not for NaN.
static inline int32_t order_of(float logit) {
  const int32_t bits = std::bit_cast<int32_t>(logit + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

static inline float logit_of(int32_t order) {
  return std::bit_cast<float>(order ^ ((order >> 31) & 0x7fffffff));
}

// Tokens by (logit descending, id ascending), as numbers that ascend.
static inline uint64_t rank_key(int32_t order, int32_t id) {
  return uint64_t(~(uint32_t(order) ^ 0x80000000u)) << 32 | uint32_t(id);
}

static inline int32_t id_of_key(uint64_t key) { return int32_t(uint32_t(key)); }

static inline int32_t order_of_key(uint64_t key) { return int32_t(~uint32_t(key >> 32) ^ 0x80000000u); }

// Whether a float is neither infinite nor NaN.
static inline bool is_finite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }

static inline uint64_t high64(uint64_t a, uint64_t b) {
  return uint64_t(static_cast<unsigned __int128>(a) * b >> 64);
}

// The first two of the four words of Philox4x32-10, the key being `seed` and the counter `position`.
static inline uint64_t random_bits(uint64_t seed, uint64_t position) {
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0, product1 = uint64_t{0xCD9E8D57u} * c2;
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
