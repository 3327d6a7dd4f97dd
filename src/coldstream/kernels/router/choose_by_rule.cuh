// The choice of a token's experts by any rule, by one warp. Scores may be negative, so that experts are in
// the order of integers that rise with their scores.
#pragma once

#include "router/choose.cuh"

namespace coldstream {

// Has the vectors of a rule near when the choice reads them, by one block.
__device__ __forceinline__ void bring_rule_near(const ChoiceRule& rule, int num_experts) {
  constexpr int per_line = 128 / sizeof(float);
  const int first = threadIdx.x * per_line;
  if (first >= num_experts) return;
  if (rule.bias) bring_near(rule.bias + first);
  if (rule.selection_bias) bring_near(rule.selection_bias + first);
  if (rule.expert_scale) bring_near(rule.expert_scale + first);
}

// Rises with x, equal for −0 and 0; a NaN is above every number, and 0 is below every one.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  if (x != x) return 0xffffffffu;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// What may become weights, in place of logits that were loaded.
template <int per_lane>
__device__ __forceinline__ void gate(int gating, int num_experts, float* scratch, float (&values)[per_lane]) {
  if (gating == softmax) {
    const float sum = exponentials(num_experts, scratch, values);
#pragma unroll
    for (int i = 0; i < per_lane; i++) values[i] = values[i] / sum;
  } else if (gating == sigmoid) {
#pragma unroll
    for (int i = 0; i < per_lane; i++) values[i] = exact_sigmoid(values[i]);
  } else if (gating == root_of_softplus) {
#pragma unroll
    for (int i = 0; i < per_lane; i++) values[i] = sqrtf(exact_softplus(values[i]));
  }
}

// Of the experts' scores, leaves those in the best groups (ties: lowest group), and −∞ for the others.
// `scratch` has room for 32 · per_lane floats and a number for each group.
template <int per_lane>
__device__ __forceinline__ void keep_best_groups(const ChoiceRule& rule, int num_experts, float* scratch,
                                                 float (&scores)[per_lane]) {
  const int lane = threadIdx.x % warp_size, size = num_experts / rule.num_groups;
  const float minus_infinity = __uint_as_float(minus_infinity_bits);
  uint32_t* totals = reinterpret_cast<uint32_t*>(scratch) + per_lane * warp_size;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < per_lane; i++) scratch[i * warp_size + lane] = scores[i];
  __syncwarp();
#pragma unroll 1
  for (int g = lane; g < rule.num_groups; g += warp_size) {
    float best = minus_infinity, second = minus_infinity;
#pragma unroll 1
    for (int i = g * size; i < (g + 1) * size; i++) {
      const float x = scratch[i];
      second = x > best ? best : x > second ? x : second;
      best = x > best ? x : best;
    }
    totals[g] = ordered(best + second);
  }
  __syncwarp();
#pragma unroll 1
  for (int g = 0; g < rule.num_groups; g++) {
    const uint32_t total = totals[g];
    int place = 0;  // how many groups are better
#pragma unroll 1
    for (int h = 0; h < rule.num_groups; h++) place += totals[h] > total || (totals[h] == total && h < g);
    if (place < rule.num_used_groups) continue;
#pragma unroll
    for (int i = 0; i < per_lane; i++) {
      if ((i * warp_size + lane) / size == g) scores[i] = minus_infinity;
    }
  }
  __syncwarp();
}

// A number that the keys of at least `count` experts reach.
template <int per_lane>
__device__ __forceinline__ uint32_t lower_bound(const uint32_t (&keys)[per_lane], int count) {
  static_assert(most_chosen <= 16, "two lanes share a key for each that is chosen");
  uint32_t largest = keys[0];
#pragma unroll
  for (int i = 1; i < per_lane; i++) largest = max(largest, keys[i]);
  largest = max(largest, __shfl_xor_sync(all_lanes, largest, 16));
  if (count <= 8) largest = max(largest, __shfl_xor_sync(all_lanes, largest, 8));
  return least_of_lanes(largest);
}

// Lists the keys of the experts that may be among the chosen, in any order. Returns their number.
template <int per_lane>
__device__ __forceinline__ int list_candidates(const float (&scores)[per_lane], int num_experts,
                                               int num_chosen, uint64_t* keys) {
  const int lane = threadIdx.x % warp_size;
  uint32_t own[per_lane];
#pragma unroll
  for (int i = 0; i < per_lane; i++) own[i] = i * warp_size + lane < num_experts ? ordered(scores[i]) : 0;
  const uint32_t bound = lower_bound(own, num_chosen);
  int count = 0;
#pragma unroll
  for (int i = 0; i < per_lane; i++) {
    const int id = i * warp_size + lane;
    const bool is_candidate = id < num_experts && own[i] >= bound;
    const uint32_t lanes = __ballot_sync(all_lanes, is_candidate);
    const int place = count + __popc(lanes & ((1u << lane) - 1));
    if (is_candidate) keys[place] = uint64_t(own[i]) << 32 | uint32_t(~id);
    count += __popc(lanes);
  }
  __syncwarp();
  return count;
}

// The value of an expert, another one for each lane.
template <int per_lane>
__device__ __forceinline__ float value_of(const float (&values)[per_lane], int id) {
  float found = 0.0f;
#pragma unroll
  for (int i = 0; i < per_lane; i++) {
    const float value = __shfl_sync(all_lanes, values[i], id % warp_size);
    if (id / warp_size == i) found = value;
  }
  return found;
}

// The weight of the lane's rank, of what may become weights.
__device__ __forceinline__ float weigh(const ChoiceRule& rule, float value, int count) {
  const bool is_chosen = threadIdx.x % warp_size < count;
  const bool is_softmax = rule.gating == softmax_of_chosen;
  if (is_softmax) {
    const float largest = max_in_warp(is_chosen ? value : __uint_as_float(minus_infinity_bits));
    value = exact_exp(value - largest);
  }
  const float total = sum_of_sixteen_lanes(is_chosen ? value : 0.0f, 1);
  if (is_softmax) {
    value = value / total;
  } else if (rule.is_normalised) {
    value = value / (total + sum_epsilon);
  }
  return value * rule.scale;
}

// `choose_experts` by a rule.
template <int per_lane>
__device__ __forceinline__ int choose_by_rule(const ChoiceRule& rule, const float* logits, int num_experts,
                                              uint64_t* scratch, const Choice& out) {
  const int lane = threadIdx.x % warp_size;
  float* floats = reinterpret_cast<float*>(scratch);
  float values[per_lane], biases[per_lane], scores[per_lane];
  load_logits(logits, num_experts, values);
#pragma unroll
  for (int i = 0; i < per_lane; i++) {
    const int id = i * warp_size + lane;
    // Loaded here, so that nothing waits for it behind the gate. A sum with 0 has the same place in the
    // order.
    biases[i] = rule.selection_bias && id < num_experts ? rule.selection_bias[id] : 0.0f;
    if (rule.bias && id < num_experts) values[i] = values[i] + rule.bias[id];
  }
  gate(rule.gating, num_experts, floats, values);
#pragma unroll
  for (int i = 0; i < per_lane; i++) scores[i] = values[i] + biases[i];
  if (rule.num_groups > 1) keep_best_groups(rule, num_experts, floats, scores);
  __syncwarp();
  const int num_candidates = list_candidates(scores, num_experts, out.count, scratch);
  const uint64_t key = ranked_key<per_lane>(scratch, num_candidates, out.count);
  const int id = lane < out.count ? key_id(key) : 0;
  const float weight = weigh(rule, value_of(values, id), out.count);
  if (lane >= out.count) return 0;
  out.ids[lane] = id;
  out.weights[lane] = rule.expert_scale ? weight * rule.expert_scale[id] : weight;
  return id;
}

}  // namespace coldstream
