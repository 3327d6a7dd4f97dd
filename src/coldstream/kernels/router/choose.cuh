// The choice of a token's experts by one warp: that of a softmax, and that of any rule.
#pragma once

#include "cuda/arithmetic.cuh"
#include "cuda/common.cuh"

namespace coldstream {

constexpr int most_chosen = 16;
constexpr float sum_epsilon = 1e-20f;  // added to the sum of the chosen weights

// By the numbers of `expert_gating_func` in files.
enum Gating : int { softmax = 1, sigmoid = 2, softmax_of_chosen = 3, root_of_softplus = 4 };

// How logits become a choice: `ChoiceRule` of ops.py. A bias may be null.
struct ChoiceRule {
  const float* bias;            // [num_experts], of the logits
  const float* selection_bias;  // [num_experts]
  const float* expert_scale;    // [num_experts], or null for 1
  float scale;
  int gating;
  int is_normalised;
  int num_groups;
  int num_used_groups;
};

// The outputs for one token.
struct Choice {
  int* ids;        // [count]
  float* weights;  // [count]
  int count;
};

// The largest x of a warp; a positive NaN counts as larger than every number.
__device__ __forceinline__ float max_in_warp(float x) {
  const int bits = __float_as_int(x);
  const int largest = greatest_of_lanes(bits ^ (bits >> 31 & 0x7fffffff));
  return __int_as_float(largest ^ (largest >> 31 & 0x7fffffff));
}

constexpr uint32_t minus_infinity_bits = 0xff800000u;

// The logits of the lane's experts (lane, lane + 32, …); −∞ for experts that do not exist.
template <int per_lane>
__device__ __forceinline__ void load_logits(const float* logits, int num_experts, float (&values)[per_lane]) {
#pragma unroll
  for (int i = 0; i < per_lane; i++) {
    const int id = i * warp_size + threadIdx.x % warp_size;
    values[i] = id < num_experts ? __ldcg(logits + id) : __uint_as_float(minus_infinity_bits);
  }
}

// exp(logit − max) in place of logits that were loaded, and their sum over all; 0 for experts that do not
// exist. `scratch` has room for 32 · per_lane floats.
template <int per_lane>
__device__ __forceinline__ float exponentials(int num_experts, float* scratch, float (&values)[per_lane]) {
  const int lane = threadIdx.x % warp_size;
  float largest = values[0];
#pragma unroll
  for (int i = 1; i < per_lane; i++) largest = fmaxf(largest, values[i]);
  largest = max_in_warp(largest);
#pragma unroll
  for (int i = 0; i < per_lane; i++) {
    const int id = i * warp_size + lane;
    values[i] = id < num_experts ? exact_exp(values[i] - largest) : 0.0f;
    scratch[id] = values[i];
  }
  __syncwarp();
  float p = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * per_lane; i++) p = p + scratch[i * 16 + lane % 16];
  return sum_of_sixteen_lanes(p, 1);
}

// A key for an expert: keys in descending order are experts by descending probability, equal ones by
// ascending id. NaN sorts before every probability, and 0 is the key of no expert.
__device__ __forceinline__ uint64_t expert_key(float probability, int id) {
  return uint64_t((__float_as_uint(probability) & 0x7fffffffu) + 1) << 32 | uint32_t(~id);
}

__device__ __forceinline__ int key_id(uint64_t key) { return int(~uint32_t(key)); }
__device__ __forceinline__ float key_probability(uint64_t key) {
  return __uint_as_float(uint32_t(key >> 32) - 1);
}

// A bound that at least `count` exponentials reach. It lies so far below the smallest of these that an
// exponential under the bound has a strictly smaller probability, however the divisions round: the quotients
// differ by more than two units in the last place, whether normal or, for sums of up to 2^10, subnormal.
template <int per_lane>
__device__ __forceinline__ float lower_bound(const float (&values)[per_lane], int count) {
  static_assert(most_chosen <= 16, "two lanes share a value for each that is chosen");
  float largest = values[0];
#pragma unroll
  for (int i = 1; i < per_lane; i++) largest = fmaxf(largest, values[i]);
  // The largest values of 16 (or 8) groups of lanes: each of them is at least as large as the smallest of
  // them.
  largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 16));
  if (count <= 8) largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 8));
  const float bound = __uint_as_float(least_of_lanes(__float_as_uint(largest)));
  return bound * (1.0f - 0x1p-21f) - 0x1p-138f;
}

// Lists the keys of the experts that may be among the chosen, in any order. Returns their number.
template <int per_lane>
__device__ __forceinline__ int list_candidates(const float (&values)[per_lane], float sum, int num_experts,
                                               int num_chosen, uint64_t* keys) {
  const int lane = threadIdx.x % warp_size;
  const float bound = lower_bound(values, num_chosen);
  int count = 0;
#pragma unroll
  for (int i = 0; i < per_lane; i++) {
    const int id = i * warp_size + lane;
    const bool is_candidate = id < num_experts && !(values[i] < bound);
    const uint32_t lanes = __ballot_sync(all_lanes, is_candidate);
    const int place = count + __popc(lanes & ((1u << lane) - 1));
    if (is_candidate) keys[place] = uint64_t(__float_as_uint(values[i])) << 32 | uint32_t(id);
    count += __popc(lanes);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < count; i += warp_size) {
    keys[i] = expert_key(__uint_as_float(uint32_t(keys[i] >> 32)) / sum, int(uint32_t(keys[i])));
  }
  __syncwarp();
  return count;
}

template <int per_lane>
constexpr int scratch_numbers = per_lane * warp_size + most_chosen;

// Of the keys in scratch, the greatest of each rank, for its lane; 0 for lanes beyond. `scratch` has room for
// scratch_numbers.
template <int per_lane>
__device__ __forceinline__ uint64_t ranked_key(uint64_t* scratch, int num_candidates, int count) {
  const int lane = threadIdx.x % warp_size;
  uint64_t* chosen = scratch + per_lane * warp_size;
#pragma unroll 1
  for (int i = lane; i < num_candidates; i += warp_size) {
    const uint64_t key = scratch[i];
    int place = 0;  // how many keys are greater
#pragma unroll 4
    for (int j = 0; j < num_candidates; j++) place += scratch[j] > key;
    if (place < count) chosen[place] = key;
  }
  __syncwarp();
  return lane < count ? chosen[lane] : 0;
}

// Chooses the experts of one token by a softmax. Lane i returns the id of the expert with rank i, and 0 from
// `count` on. `scratch` has room for scratch_numbers.
template <int per_lane>
__device__ __forceinline__ int choose_experts(const float* logits, int num_experts, uint64_t* scratch,
                                              const Choice& out) {
  const int lane = threadIdx.x % warp_size;
  float values[per_lane];
  load_logits(logits, num_experts, values);
  const float sum = exponentials(num_experts, reinterpret_cast<float*>(scratch), values);
  __syncwarp();
  const int num_candidates = list_candidates(values, sum, num_experts, out.count, scratch);
  const uint64_t key = ranked_key<per_lane>(scratch, num_candidates, out.count);
  const float probability = lane < out.count ? key_probability(key) : 0.0f;
  const float total = sum_of_sixteen_lanes(probability, 1);
  if (lane >= out.count) return 0;
  out.ids[lane] = key_id(key);
  out.weights[lane] = probability / (total + sum_epsilon);
  return key_id(key);
}

}  // namespace coldstream
