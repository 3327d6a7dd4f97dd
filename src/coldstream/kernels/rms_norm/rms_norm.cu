// RMS norm of rows, with the sum x + update before it and the quantisation after it in the same launch. One
// block a row; see cuda.py for the launchers.
#include "rms_norm/expert_sum.cuh"
#include "rms_norm/norm_row.cuh"

using namespace coldstream;

constexpr int max_threads = 512, most_threads = 768;

extern __shared__ float4 dynamic_shared[];  // x of the row, or x + update, padded with zeros to whole groups

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

// The same of x + update, which is also written: `sum` may be x. With a bias, that is added to the update
// first.
template <bool aligned, bool has_bias = false>
__global__ void __launch_bounds__(max_threads)
    add_rms_norm_rows(const float* x, const float* update, float* sum, const float* bias, Norm norm,
                      NormOutputs out) {
  const Eight first_weights = load_eight<aligned>(norm.weight, threadIdx.x / warp_size, norm.cols);
  if constexpr (has_bias) bring_row_near(bias, norm.cols);
  wait_for_previous_grid();
  release_next_grid();
  const int64_t begin = int64_t(blockIdx.x) * norm.cols;
  for (int i = 4 * threadIdx.x; i < norm.padded; i += 4 * blockDim.x) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (i < norm.cols) {
      float4 added = load_four<aligned>(update + begin, i, norm.cols);
      if constexpr (has_bias) added = added + load_four<aligned>(bias, i, norm.cols);
      v = load_four<aligned>(x + begin, i, norm.cols) + added;
      store_four<aligned>(sum + begin, i, norm.cols, v);
    }
    dynamic_shared[i / 4] = v;
  }
  norm_row<aligned>(norm, first_weights, out);
}

// The same with the sum of the experts as update. `is_alone`: the CPU has none of them and nobody asks for
// times, and the kernel has no code for either, since long code slows down the launches around it.
template <bool aligned, SharedExpert kind, bool has_bias = false, bool is_alone = false>
__global__ void __launch_bounds__(has_bias ? most_threads : max_threads)
    combine_rms_norm_rows(const float* x, const float* routed, const float* topk_weights, int num_ranks,
                          const float* shared, const float* shared_gate, const int* cpu_ids, float* cpu_rows,
                          const __grid_constant__ Answer answer, LayerStamps* stamps, float* sum,
                          const float* bias, const int* ids, Norm norm, NormOutputs out) {
  if constexpr (is_alone) cpu_ids = nullptr, stamps = nullptr;
  const Eight first_weights = load_eight<aligned>(norm.weight, threadIdx.x / warp_size, norm.cols);
  ExpertWait wait(cpu_ids, num_ranks, stamps);
  wait_for_previous_grid();
  release_next_grid();
  wait.begin(answer);
  const int64_t token = blockIdx.x, begin = token * norm.cols;
  Experts experts = experts_of_block(routed, topk_weights, num_ranks, shared, shared_gate,
                                     wait.is_waiting ? cpu_ids : nullptr, cpu_rows, norm.cols);
  experts.answer = &answer;
  experts.bias = bias;
  experts.ids = ids + token * num_ranks;
  for (int i = 4 * threadIdx.x; i < norm.padded; i += 4 * blockDim.x) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (i < norm.cols) {
      v = load_four<aligned>(x + begin, i, norm.cols) +
          combine_experts<aligned, kind, has_bias>(experts, i, norm.cols);
      store_four<aligned>(sum + begin, i, norm.cols, v);
    }
    dynamic_shared[i / 4] = v;
  }
  wait.arrived();
  norm_row<aligned>(norm, first_weights, out);
  wait.end();
}

// The inverse norms of `count` rows in shared memory, one by each warp.
template <int count>
__device__ __forceinline__ void inverse_norms(const Norm& norm, float (&found)[count]) {
  __shared__ float inverses[count];
  __syncthreads();
  const int row = threadIdx.x / warp_size;
  if (row < count) {
    const float s = inverse_norm(norm, reinterpret_cast<const float*>(dynamic_shared) + row * norm.padded);
    if (threadIdx.x % warp_size == 0) inverses[row] = s;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < count; i++) found[i] = inverses[i];
}

__device__ __forceinline__ float4 scale_four(float4 x, float s, float4 w) {
  return {x.x * s * w.x, x.y * s * w.y, x.z * s * w.z, x.w * s * w.w};
}

// The norm of an update in shared memory is added to x, and the norm of that follows.
template <bool aligned>
__device__ __forceinline__ void add_normed(const float* x, const PostNorm& post, float* sum, const Norm& norm,
                                           Eight first_weights, const NormOutputs& out) {
  const float scale = post.scale == nullptr ? 1.0f : *post.scale;
  float s[1];
  inverse_norms(norm, s);
  for (int i = 4 * threadIdx.x; i < norm.cols; i += 4 * blockDim.x) {
    const float4 w = load_four<aligned>(post.weight, i, norm.cols);
    float4 v = load_four<aligned>(x, i, norm.cols) + scale_four(dynamic_shared[i / 4], s[0], w);
    v = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
    store_four<aligned>(sum, i, norm.cols, v);
    dynamic_shared[i / 4] = v;
  }
  norm_row<aligned>(norm, first_weights, out);
}

// As add_rms_norm_rows, with a norm of the update.
template <bool aligned>
__global__ void __launch_bounds__(max_threads)
    add_post_norm_rows(const float* x, const float* update, float* sum, PostNorm post, Norm norm,
                       NormOutputs out) {
  const Eight first_weights = load_eight<aligned>(norm.weight, threadIdx.x / warp_size, norm.cols);
  wait_for_previous_grid();
  release_next_grid();
  const int64_t begin = int64_t(blockIdx.x) * norm.cols;
  for (int i = 4 * threadIdx.x; i < norm.padded; i += 4 * blockDim.x) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (i < norm.cols) v = load_four<aligned>(update + begin, i, norm.cols);
    dynamic_shared[i / 4] = v;
  }
  add_normed<aligned>(x + begin, post, sum + begin, norm, first_weights, out);
}

// The same with the sum of the experts as update, or, with a parallel network, the norm of that sum plus the
// norm of what is computed beside it. Dynamic shared memory with one: 8 · padded bytes.
template <bool aligned, bool has_parallel, bool is_alone = false>
__global__ void __launch_bounds__(max_threads)
    combine_post_norm_rows(const float* x, const float* routed, const float* topk_weights, int num_ranks,
                           const float* shared, const float* shared_gate, const int* cpu_ids, float* cpu_rows,
                           const __grid_constant__ Answer answer, LayerStamps* stamps, float* sum,
                           PostNorm post, Norm norm, NormOutputs out) {
  if constexpr (is_alone) cpu_ids = nullptr, stamps = nullptr;
  const Eight first_weights = load_eight<aligned>(norm.weight, threadIdx.x / warp_size, norm.cols);
  ExpertWait wait(cpu_ids, num_ranks, stamps);
  wait_for_previous_grid();
  release_next_grid();
  wait.begin(answer);
  const int64_t begin = int64_t(blockIdx.x) * norm.cols;
  Experts experts = experts_of_block(routed, topk_weights, num_ranks, shared, shared_gate,
                                     wait.is_waiting ? cpu_ids : nullptr, cpu_rows, norm.cols);
  experts.answer = &answer;
  const int behind = norm.padded / 4;  // the row of the parallel network
  for (int i = 4 * threadIdx.x; i < norm.padded; i += 4 * blockDim.x) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f}, beside = v;
    if (i < norm.cols) {
      v = combine_experts<aligned, no_shared>(experts, i, norm.cols);
      if constexpr (has_parallel) beside = load_four<aligned>(shared + begin, i, norm.cols);
    }
    dynamic_shared[i / 4] = v;
    if constexpr (has_parallel) dynamic_shared[behind + i / 4] = beside;
  }
  wait.arrived();
  if constexpr (has_parallel) {
    float s[2];
    inverse_norms(norm, s);
    for (int i = 4 * threadIdx.x; i < norm.cols; i += 4 * blockDim.x) {
      const float4 w = load_four<aligned>(post.routed, i, norm.cols);
      const float4 parallel_w = load_four<aligned>(post.shared, i, norm.cols);
      dynamic_shared[i / 4] = scale_four(dynamic_shared[behind + i / 4], s[1], parallel_w) +
                              scale_four(dynamic_shared[i / 4], s[0], w);
    }
  }
  add_normed<aligned>(x + begin, post, sum + begin, norm, first_weights, out);
  wait.end();
}
