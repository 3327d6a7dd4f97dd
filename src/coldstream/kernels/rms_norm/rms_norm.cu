// RMS norm of rows, with the sum x + update before it and the quantisation after it in the same launch. One
// block a row; see cuda.py for the launchers.
#include "cuda/answer.cuh"
#include "rms_norm/norm_row.cuh"

using namespace coldstream;

constexpr int max_threads = 512;

extern __shared__ float4 dynamic_shared[];  // x of the row, or x + update, padded with zeros to whole groups

// The experts' outputs of one token, kept apart by rank, and the shared expert's.
struct Experts {
  const float* routed;   // [ranks, cols]
  const float* weights;  // [ranks]
  int num_ranks;
  const float* shared;       // [cols]
  const float* shared_gate;  // one; null for a weight of 1
  const int* cpu_ids;        // [ranks], −1 for rows in `routed`; null: all are
  const float* cpu_rows;     // [ranks, cols], in the host's memory
};

constexpr int ranks_at_once = 8;

// Adds the experts of ranks first … first + 7 that exist, and loads all before it adds the first.
template <bool aligned>
__device__ __forceinline__ float4 add_ranks(const Experts& experts, int first, int i, int cols, float4 sum) {
  float4 values[ranks_at_once];
  float weights[ranks_at_once];
#pragma unroll
  for (int k = 0; k < ranks_at_once; k++) {
    if (first + k >= experts.num_ranks) continue;
    values[k] = load_four<aligned>(experts.routed + int64_t(first + k) * cols, i, cols);
    weights[k] = experts.weights[first + k];
  }
  if (experts.cpu_ids != nullptr) {
#pragma unroll
    for (int k = 0; k < ranks_at_once; k++) {
      if (first + k >= experts.num_ranks || experts.cpu_ids[first + k] < 0) continue;
      values[k] = load_four<aligned>(experts.cpu_rows + int64_t(first + k) * cols, i, cols);
    }
  }
#pragma unroll
  for (int k = 0; k < ranks_at_once; k++) {
    if (first + k < experts.num_ranks) sum = fma_four(weights[k], values[k], sum);
  }
  return sum;
}

// How the shared expert is added: times the sigmoid of its gate, or with weight 1.
enum SharedExpert { no_shared, plain_shared, gated_shared };

// The experts' sum at four columns: by rank, then the shared one if there is one.
template <bool aligned, SharedExpert kind>
__device__ __forceinline__ float4 combine_experts(const Experts& experts, int i, int cols) {
  float4 shared;
  float shared_gate;
  if constexpr (kind != no_shared) shared = load_four<aligned>(experts.shared, i, cols);
  if constexpr (kind == gated_shared) shared_gate = *experts.shared_gate;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = 0; first < experts.num_ranks; first += ranks_at_once) {
    sum = add_ranks<aligned>(experts, first, i, cols, sum);
  }
  if constexpr (kind == gated_shared)
    return fma_four(exact_sigmoid(shared_gate), shared, sum);
  else if constexpr (kind == plain_shared)
    return sum + shared;
  else
    return sum;
}

// (x · s) · w of the row in shared memory, a group by each warp in turn; `w` holds those of the warp's first
// group.
template <bool aligned>
__device__ __forceinline__ void scale_row(const Norm& norm, float s, Eight w, const NormOutputs& out) {
  const int num_warps = blockDim.x / warp_size, num_groups = norm.padded / group_elements;
  const int64_t row = blockIdx.x;
  const QuantRow quantised = quant_row(out.q, out.scales, out.sums, row, norm.padded);
  for (int group = threadIdx.x / warp_size; group < num_groups; group += num_warps) {
    const int place = group * (group_elements / 4) + 2 * (threadIdx.x % warp_size);
    const Eight x = {dynamic_shared[place], dynamic_shared[place + 1]};
    float y[8];
    scale_eight(x, s, w, y);
    if (out.y) store_eight<aligned>(out.y + row * norm.cols, group, norm.cols, y);
    if (out.q) store_group(quantize_group(y), quantised, group);
    if (group + num_warps < num_groups) w = load_eight<aligned>(norm.weight, group + num_warps, norm.cols);
  }
}

// One row, once it is in shared memory. The weights of the warp's first group are loaded before any wait.
template <bool aligned>
__device__ __forceinline__ void norm_row(const Norm& norm, Eight first_weights, const NormOutputs& out) {
  __shared__ float s;
  __syncthreads();
  if (threadIdx.x < warp_size) {
    const float found = inverse_norm(norm, reinterpret_cast<const float*>(dynamic_shared));
    if (threadIdx.x == 0) s = found;
  }
  __syncthreads();
  scale_row<aligned>(norm, s, first_weights, out);
}

// The norm of a row that earlier launches may still write; its results are those of row blockIdx.x.
template <bool aligned>
__device__ __forceinline__ void norm_of(const float* x, const Norm& norm, const NormOutputs& out) {
  const Eight first_weights = load_eight<aligned>(norm.weight, threadIdx.x / warp_size, norm.cols);
  wait_for_previous_grid();
  release_next_grid();
  for (int i = 4 * threadIdx.x; i < norm.padded; i += 4 * blockDim.x) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (i < norm.cols) v = load_four<aligned>(x, i, norm.cols);
    dynamic_shared[i / 4] = v;
  }
  norm_row<aligned>(norm, first_weights, out);
}

// grid (rows); dynamic shared memory: 4 · padded bytes.
template <bool aligned>
__global__ void __launch_bounds__(max_threads)
    rms_norm_rows(const float* x, int x_stride, Norm norm, NormOutputs out) {
  norm_of<aligned>(x + int64_t(blockIdx.x) * x_stride, norm, out);
}

// Two norms side by side, of whole groups: row t of x is row 2t of the results, and that of y row 2t + 1.
// grid (2 · rows); dynamic shared memory: 4 · cols bytes.
__global__ void __launch_bounds__(max_threads)
    rms_norm_pair_rows(const float* x, const float* y, Norm x_norm, const float* y_weight, NormOutputs out) {
  const bool is_second = blockIdx.x % 2 != 0;
  Norm norm = x_norm;
  if (is_second) norm.weight = y_weight;
  norm_of<true>((is_second ? y : x) + int64_t(blockIdx.x / 2) * norm.cols, norm, out);
}

// The same of x + update, which is also written: `sum` may be x.
template <bool aligned>
__global__ void __launch_bounds__(max_threads)
    add_rms_norm_rows(const float* x, const float* update, float* sum, Norm norm, NormOutputs out) {
  const Eight first_weights = load_eight<aligned>(norm.weight, threadIdx.x / warp_size, norm.cols);
  wait_for_previous_grid();
  release_next_grid();
  const int64_t begin = int64_t(blockIdx.x) * norm.cols;
  for (int i = 4 * threadIdx.x; i < norm.padded; i += 4 * blockDim.x) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (i < norm.cols) {
      v = load_four<aligned>(x + begin, i, norm.cols) + load_four<aligned>(update + begin, i, norm.cols);
      store_four<aligned>(sum + begin, i, norm.cols, v);
    }
    dynamic_shared[i / 4] = v;
  }
  norm_row<aligned>(norm, first_weights, out);
}

// The same with the sum of the experts as update. The first thread adds the layer's times to its stamps, if
// there are any; those of its own row stand for all rows.
template <bool aligned, SharedExpert kind>
__global__ void __launch_bounds__(max_threads)
    combine_rms_norm_rows(const float* x, const float* routed, const float* topk_weights, int num_ranks,
                          const float* shared, const float* shared_gate, const int* cpu_ids,
                          const float* cpu_rows, const __grid_constant__ Answer answer, LayerStamps* stamps,
                          float* sum, Norm norm, NormOutputs out) {
  const Eight first_weights = load_eight<aligned>(norm.weight, threadIdx.x / warp_size, norm.cols);
  // The places of pairs, and the router's times, were written before the previous kernel began.
  const bool keeps_time = stamps != nullptr && blockIdx.x == 0 && threadIdx.x == 0;
  RouterStamps router{};
  if (keeps_time) router = stamps->router;
  bool is_waiting = false;
  if (cpu_ids != nullptr) {
    is_waiting =
        __syncthreads_or(threadIdx.x < num_ranks && cpu_ids[blockIdx.x * num_ranks + threadIdx.x] >= 0);
  }
  uint64_t* sums = nullptr;
  if (keeps_time) sums = note_router(stamps, router);
  uint64_t begins = 0, answered = 0;
  wait_for_previous_grid();
  release_next_grid();
  if (keeps_time) begins = answered = now_ns();
  if (is_waiting) {
    if (threadIdx.x == 0) {
      wait_for_answer(answer);
      if (keeps_time) answered = now_ns();
    }
    __syncthreads();
  }
  const int64_t token = blockIdx.x, begin = token * norm.cols;
  const Experts experts{routed + begin * num_ranks,
                        topk_weights + token * num_ranks,
                        num_ranks,
                        shared + begin,
                        shared_gate + token,
                        is_waiting ? cpu_ids + token * num_ranks : nullptr,
                        cpu_rows + begin * num_ranks};
  for (int i = 4 * threadIdx.x; i < norm.padded; i += 4 * blockDim.x) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (i < norm.cols) {
      v = load_four<aligned>(x + begin, i, norm.cols) + combine_experts<aligned, kind>(experts, i, norm.cols);
      store_four<aligned>(sum + begin, i, norm.cols, v);
    }
    dynamic_shared[i / 4] = v;
  }
  norm_row<aligned>(norm, first_weights, out);
  if (keeps_time) note_end(sums, begins, answered);
}
