// The sum of a token's experts, some of which the CPU may compute, by whichever kernel adds it to a stream.
#pragma once

#include "cuda/answer.cuh"
#include "cuda/vectors.cuh"

namespace coldstream {

// The experts' outputs of one token, kept apart by rank, and the shared expert's.
struct Experts {
  const float* routed;   // [ranks, cols]
  const float* weights;  // [ranks]
  int num_ranks;
  const float* shared;             // [cols]
  const float* shared_gate;        // one; null for a weight of 1
  const int* cpu_ids;              // [ranks], −1 for rows in `routed`; null: all are
  float* cpu_rows;                 // [ranks, cols], in the host's memory
  const float* bias = nullptr;     // [experts, cols], of the outputs
  const int* ids = nullptr;        // [ranks]
  const Answer* answer = nullptr;  // if whoever reads `cpu_rows` is alone with them, and may mark them
};

// Those of the token of a block, blockIdx.x, of what a kernel is given for all tokens. cpu_ids: null if no
// expert of the token is the CPU's.
__device__ __forceinline__ Experts experts_of_block(const float* routed, const float* topk_weights,
                                                    int num_ranks, const float* shared,
                                                    const float* shared_gate, const int* cpu_ids,
                                                    float* cpu_rows, int cols) {
  const int64_t token = blockIdx.x, begin = token * cols;
  return {routed + begin * num_ranks,
          topk_weights + token * num_ranks,
          num_ranks,
          shared + begin,
          shared_gate + token,
          cpu_ids == nullptr ? nullptr : cpu_ids + token * num_ranks,
          cpu_rows + begin * num_ranks};
}

// Biases take as many registers as what they are added to.
template <bool has_bias>
constexpr int ranks_at_once = has_bias ? 4 : 8;

// Those of `count` ranks from `first` on that the CPU computes. It ends with all of them at about the same
// time. So one is looked at until it is there, and then all others at once.
template <bool aligned, int count>
__device__ __forceinline__ void await_ranks(const Experts& experts, int first, int i, int cols,
                                            float4 (&values)[count]) {
  uint32_t on_cpu = 0, one = 0;
#pragma unroll
  for (int k = 0; k < count; k++) {
    if (first + k < experts.num_ranks && experts.cpu_ids[first + k] >= 0) on_cpu |= one = 1u << k;
  }
  float* rows = experts.cpu_rows + int64_t(first) * cols;
  Looks looks{*experts.answer};
  bool is_complete = false;
#pragma unroll 1
  for (uint32_t missing = on_cpu, looked_at = one; missing != 0;) {
#pragma unroll
    for (int k = 0; k < count; k++) {
      if (looked_at >> k & 1) values[k] = look_at_four<aligned>(rows + int64_t(k) * cols, i, cols);
    }
#pragma unroll
    for (int k = 0; k < count; k++) {
      if ((looked_at >> k & 1) && (is_complete || is_written(values[k]))) missing &= ~(1u << k);
    }
    if (looked_at & missing) is_complete = looks.rest();
    looked_at = missing & one ? one : missing;
  }
#pragma unroll
  for (int k = 0; k < count; k++) {
    if (on_cpu >> k & 1) mark_unwritten<aligned>(rows + int64_t(k) * cols, i, cols);
  }
}

// Adds the experts of so many ranks from `first` on that exist, and loads all before it adds the first.
template <bool aligned, bool has_bias>
__device__ __forceinline__ float4 add_ranks(const Experts& experts, int first, int i, int cols, float4 sum) {
  constexpr int count = ranks_at_once<has_bias>;
  float4 values[count];
  float weights[count];
#pragma unroll
  for (int k = 0; k < count; k++) {
    if (first + k >= experts.num_ranks) continue;
    values[k] = load_four<aligned>(experts.routed + int64_t(first + k) * cols, i, cols);
    weights[k] = experts.weights[first + k];
  }
  if (experts.cpu_ids != nullptr && experts.answer != nullptr && experts.answer->rows_are_marked) {
    await_ranks<aligned>(experts, first, i, cols, values);
  } else if (experts.cpu_ids != nullptr) {
#pragma unroll
    for (int k = 0; k < count; k++) {
      if (first + k >= experts.num_ranks || experts.cpu_ids[first + k] < 0) continue;
      values[k] = load_four<aligned>(experts.cpu_rows + int64_t(first + k) * cols, i, cols);
    }
  }
#pragma unroll
  for (int k = 0; k < count; k++) {
    if (first + k >= experts.num_ranks) continue;
    if constexpr (has_bias)
      values[k] =
          values[k] + load_four<aligned>(experts.bias + int64_t(experts.ids[first + k]) * cols, i, cols);
    sum = fma_four(weights[k], values[k], sum);
  }
  return sum;
}

// How the shared expert is added: times the sigmoid of its gate, or with weight 1.
enum SharedExpert { no_shared, plain_shared, gated_shared };

// The experts' sum at four columns: by rank, then the shared one if there is one.
template <bool aligned, SharedExpert kind, bool has_bias = false>
__device__ __forceinline__ float4 combine_experts(const Experts& experts, int i, int cols) {
  float4 shared;
  float shared_gate;
  if constexpr (kind != no_shared) shared = load_four<aligned>(experts.shared, i, cols);
  if constexpr (kind == gated_shared) shared_gate = *experts.shared_gate;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = 0; first < experts.num_ranks; first += ranks_at_once<has_bias>) {
    sum = add_ranks<aligned, has_bias>(experts, first, i, cols, sum);
  }
  if constexpr (kind == gated_shared)
    return fma_four(exact_sigmoid(shared_gate), shared, sum);
  else if constexpr (kind == plain_shared)
    return sum + shared;
  else
    return sum;
}

// Whether the CPU computes experts of the block's token, blockIdx.x, and when they arrive. The first thread
// adds the layer's times to its stamps, if there are any; those of its own part of a row stand for all.
struct ExpertWait {
  bool keeps_time, is_waiting = false, looks_at_rows = false;
  uint64_t* sums = nullptr;
  uint64_t begins = 0, answered = 0;

  // Before the wait for the previous grid: the places of pairs, and the router's times, were written before
  // that one began.
  __device__ __forceinline__ ExpertWait(const int* cpu_ids, int num_ranks, LayerStamps* stamps)
      : keeps_time(stamps != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    RouterStamps router{};
    if (keeps_time) router = stamps->router;
    if (cpu_ids != nullptr) {
      is_waiting =
          __syncthreads_or(threadIdx.x < num_ranks && cpu_ids[blockIdx.x * num_ranks + threadIdx.x] >= 0);
    }
    if (keeps_time) sums = note_router(stamps, router);
  }

  // After that wait. If all threads of several rows looked at them, that would take much of the bus. So one
  // thread of each block waits first, as it does for rows without marks.
  __device__ __forceinline__ void begin(const Answer& answer) {
    if (keeps_time) begins = answered = now_ns();
    looks_at_rows = answer.rows_are_marked && gridDim.x == 1;
    if (!is_waiting || looks_at_rows) return;
    if (threadIdx.x == 0) {
      wait_for_answer(answer);
      if (keeps_time) answered = now_ns();
    }
    __syncthreads();
  }

  // Once the thread has its columns of the sum.
  __device__ __forceinline__ void arrived() {
    if (keeps_time && is_waiting && looks_at_rows) answered = now_ns();
  }

  __device__ __forceinline__ void end() const {
    if (keeps_time) note_end(sums, begins, answered);
  }
};

}  // namespace coldstream
