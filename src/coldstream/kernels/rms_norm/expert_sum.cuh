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
  const float* shared;          // [cols]
  const float* shared_gate;     // one; null for a weight of 1
  const int* cpu_ids;           // [ranks], −1 for rows in `routed`; null: all are
  const float* cpu_rows;        // [ranks, cols], in the host's memory
  const float* bias = nullptr;  // [experts, cols], of the outputs
  const int* ids = nullptr;     // [ranks]
};

// Those of the token of a block, blockIdx.x, of what a kernel is given for all tokens. cpu_ids: null if no
// expert of the token is the CPU's.
__device__ __forceinline__ Experts experts_of_block(const float* routed, const float* topk_weights,
                                                    int num_ranks, const float* shared,
                                                    const float* shared_gate, const int* cpu_ids,
                                                    const float* cpu_rows, int cols) {
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
  if (experts.cpu_ids != nullptr) {
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

// A block's wait for the experts of its token, blockIdx.x, that the CPU computes. The first thread adds the
// layer's times to its stamps, if there are any; those of its own part of a row stand for all.
struct ExpertWait {
  bool keeps_time, is_waiting = false;
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

  // After that wait.
  __device__ __forceinline__ void wait(const Answer& answer) {
    if (keeps_time) begins = answered = now_ns();
    if (!is_waiting) return;
    if (threadIdx.x == 0) {
      wait_for_answer(answer);
      if (keeps_time) answered = now_ns();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void end() const {
    if (keeps_time) note_end(sums, begins, answered);
  }
};

}  // namespace coldstream
