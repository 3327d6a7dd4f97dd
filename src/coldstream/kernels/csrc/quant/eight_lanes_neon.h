// Eight float lanes in two registers: eight_lanes.h for AArch64.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "quant/traits.h"

namespace coldstream {

struct FloatLanes {
  float32x4_t low, high;
};

// To the second-level cache.
static inline __attribute__((always_inline)) void prefetch_line(const char* p) {
  __builtin_prefetch(p, 0, 2);
}

static inline FloatLanes zero_lanes() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
static inline FloatLanes splat_lanes(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline FloatLanes load_lanes(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }

static inline void store_lanes(float* p, FloatLanes v) {
  vst1q_f32(p, v.low);
  vst1q_f32(p + 4, v.high);
}

static inline void store_first_lanes(float* p, int count, FloatLanes v) {
  float lanes[8];
  store_lanes(lanes, v);
  std::memcpy(p, lanes, static_cast<size_t>(count) * sizeof(float));
}

static inline FloatLanes add_lanes(FloatLanes a, FloatLanes b) {
  return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}

static inline FloatLanes multiply_lanes(FloatLanes a, FloatLanes b) {
  return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}

// a · b + c
static inline FloatLanes fma_lanes(FloatLanes a, FloatLanes b, FloatLanes c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}

// c − a · b
static inline FloatLanes fms_lanes(FloatLanes a, FloatLanes b, FloatLanes c) {
  return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
}

static inline float sum_lanes(FloatLanes p) {
  const float32x4_t four = vaddq_f32(p.low, p.high);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

// The eight accumulators of eight weight rows, added up in their order.
static inline FloatLanes sum_accumulators(const FloatLanes p[8]) {
  const FloatLanes even = add_lanes(add_lanes(p[0], p[4]), add_lanes(p[2], p[6]));
  return add_lanes(even, add_lanes(add_lanes(p[1], p[5]), add_lanes(p[3], p[7])));
}

namespace {

// What scales the integers of the first `count` of eight blocks, `stride` bytes apart, then zeros.
template <QuantType Q>
inline __attribute__((always_inline)) FloatLanes load_scales(const uint8_t* data, int64_t stride, int count) {
  float d[8] = {};
  for (int i = 0; i < count; i++)
    d[i] = scale_of<Q>(*reinterpret_cast<const typename Traits<Q>::Block*>(data + i * stride));
  return load_lanes(d);
}

// The same of the minimums.
template <QuantType Q>
inline __attribute__((always_inline)) FloatLanes load_min_scales(const uint8_t* data, int64_t stride,
                                                                 int count) {
  float d[8] = {};
  for (int i = 0; i < count; i++) {
    const auto& block = *reinterpret_cast<const typename Traits<Q>::Block*>(data + i * stride);
    d[i] = half_bits_to_float(Traits<Q>::half_dmin(block));
  }
  return load_lanes(d);
}

// What scales each 32 of the first `count` times 32 inputs of small blocks, then zeros.
template <QuantType Q>
inline __attribute__((always_inline)) FloatLanes load_small_scales(const typename Traits<Q>::Block* b,
                                                                   int count) {
  constexpr int parts = Traits<Q>::block_inputs / 32;
  float d[8] = {};
  for (int i = 0; i < count; i++) d[i] = scale_of<Q>(b[i / parts]);
  return load_lanes(d);
}

}  // namespace

}  // namespace coldstream
