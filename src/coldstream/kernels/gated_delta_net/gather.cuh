// How the blocks of a group of 256 output columns bring rows of a route together, each with 32 columns of
// them: `put` the columns of a row, and after up to `gathered_rows()` of them, or at the end, `finish`.
//
// Where there are clusters, the blocks of a group are one and write into each other's shared memory: step i
// of the route into that of block i modulo their number, whose warps take a row each. Elsewhere they write to
// global memory, and the last one to be done finishes all rows.
#pragma once

#include "gated_delta_net/delta_rule.cuh"
#include "gated_delta_net/layer.cuh"
#include "gated_delta_net/route.cuh"

namespace coldstream {

constexpr int group_blocks = group_elements / block_columns;

// Zero between launches.
struct Arrivals {
  uint32_t* readers;   // [rows, NK]: blocks that have read the history of a key head
  uint32_t* finished;  // [rows, groups]: blocks that have written their columns; unused in clusters
};

#if COLDSTREAM_CLUSTERS

#define GATHER_CLUSTER __cluster_dims__(8, 1, 1)

__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores x at `local` of block `rank` of the cluster.
__device__ __forceinline__ void store_remote(float* local, int rank, float x) {
  asm volatile(
      "{.reg .u32 remote; mapa.shared::cluster.u32 remote, %0, %1; st.shared::cluster.f32 [remote], %2;}" ::
          "r"(shared_address(local)),
      "r"(rank), "f"(x)
      : "memory");
}

template <int D>
struct Gather {
  int rank, group, num_blocks;  // that have columns
  float* values;                // shared: a row for each warp
  OutputFactors factors;

  __device__ Gather(const DeltaLayer& layer, float*, uint32_t*, int, int column)
      : rank(column % group_elements / block_columns), group(column / group_elements) {
    __shared__ alignas(16) float memory[delta_threads / warp_size * group_elements];
    values = memory;
    num_blocks = min(layer.num_value_heads * D - group * group_elements, group_elements) / block_columns;
    for (int i = threadIdx.x; i < delta_threads / warp_size * group_elements; i += delta_threads)
      values[i] = 0.0f;
    arrive_at_cluster();  // the others may write here
    wait_for_cluster();
  }

  __device__ int gathered_rows() const { return num_blocks * (delta_threads / warp_size); }

  // The step of the route that the warp finishes, of those that begin with `first`.
  __device__ int own_step(int first) const { return first + threadIdx.x / warp_size * num_blocks + rank; }

  // Before steps first … end − 1 of the route, at most gathered_rows(), are put.
  __device__ void begin(const DeltaLayer& layer, const DeltaRows& rows, const Route& route, int first,
                        int end) {
    const int step = own_step(first);
    if (step >= end) return;
    factors = load_factors<D>(layer, rows.z + int64_t(route.row(step)) * rows.z_stride, group);
  }

  __device__ void put(const Route&, int first, int step, float x) {
    const int i = step - first;
    float* place = values + i / num_blocks * group_elements + rank * block_columns + own_column();
    if (own_chain() == 0) store_remote(place, i % num_blocks, x);
  }

  // All rows have been put.
  __device__ void announce() {
    __syncwarp();
    arrive_at_cluster();
  }

  __device__ void finish(const DeltaLayer& layer, const DeltaRows&, const Route& route, int first, int end,
                         const DeltaOutputs& out) {
    const int step = own_step(first);
    open_factors(factors, layer);
    wait_for_cluster();
    if (step < end) {
      const float* of_row = values + threadIdx.x / warp_size * group_elements;
      finish_group<D>(of_row, factors, layer, route.row(step), group, out);
    }
    __syncwarp();
  }

  // The others may put again.
  __device__ void begin_again() {
    arrive_at_cluster();
    wait_for_cluster();
  }
};

#else

#define GATHER_CLUSTER

template <int D>
struct Gather {
  int size, column, group;
  float* raw;          // [rows, NV · D]
  uint32_t* finished;  // of this group

  __device__ Gather(const DeltaLayer& layer, float* raw, uint32_t* finished, int first_row, int column)
      : size(layer.num_value_heads * D), column(column), group(column / group_elements), raw(raw) {
    const int num_groups = (size + group_elements - 1) / group_elements;
    this->finished = finished + first_row * num_groups + group;
  }

  __device__ int gathered_rows() const { return 1 << 30; }
  __device__ void begin(const DeltaLayer&, const DeltaRows&, const Route&, int, int) {}
  __device__ void begin_again() {}
  __device__ void announce() { __threadfence(); }

  __device__ void put(const Route& route, int, int step, float x) {
    if (own_chain() == 0) raw[int64_t(route.row(step)) * size + column + own_column()] = x;
  }

  __device__ void finish(const DeltaLayer& layer, const DeltaRows& rows, const Route& route, int first,
                         int end, const DeltaOutputs& out) {
    alignas(16) __shared__ float values[delta_threads / warp_size][group_elements];
    __shared__ bool is_last;
    const uint32_t num_blocks = min(size - group * group_elements, group_elements) / block_columns;
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(finished, num_blocks - 1) == num_blocks - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const int warp = threadIdx.x / warp_size;
    for (int step = first + warp; step < end; step += delta_threads / warp_size) {
      const int row = route.row(step);
      OutputFactors factors = load_factors<D>(layer, rows.z + int64_t(row) * rows.z_stride, group);
      open_factors(factors, layer);
      fetch_group(raw + int64_t(row) * size, group, size, values[warp]);
      finish_group<D>(values[warp], factors, layer, row, group, out);
      __syncwarp();
    }
  }
};

#endif

}  // namespace coldstream
