// GEMM: blocks that stay on their multiprocessor and walk over tiles of the
// output. Some warps copy the next groups of 256 inputs, across the ends of tiles too, while the others
// multiply; both sides meet at barriers in shared memory, so that no warp waits for all others.
#pragma once

#include "cuda/gemm_shares.cuh"
#include "cuda/gemm_unpack.cuh"
#include "cuda/gemm_warpgroups.cuh"

extern __shared__ __align__(coldstream::swizzle_bytes) float4 dynamic_shared[];

namespace coldstream::gemm {

template <class T, int nt>
__device__ __forceinline__ void add_group(const Fragment& at, const uint8_t* stage, const uint8_t* unpacked,
                                          Accumulators<T>& sums) {
  if constexpr (T::Group::in_place)
    add_in_place<T, nt>(at, stage, sums.p[0]);
  else
    add_unpacked<T, nt>(at, stage, unpacked, sums.p[0]);
}

// The narrowest set of products that covers `count` activation rows.
template <class T>
__device__ __forceinline__ void add_group_of(int count, const Fragment& at, const uint8_t* stage,
                                             const uint8_t* unpacked, Accumulators<T>& sums) {
  if (T::nt == 1 || count <= 8 * T::columns)
    add_group<T, 1>(at, stage, unpacked, sums);
  else if (T::nt == 2 || count <= 16 * T::columns)
    add_group<T, (T::nt < 2 ? T::nt : 2)>(at, stage, unpacked, sums);
  else
    add_group<T, T::nt>(at, stage, unpacked, sums);
}

// The tables of planes, by the warps that multiply, while the others copy.
template <class T>
__device__ __forceinline__ void fill_lookups(uint8_t* shared) {
  uint4* parts = reinterpret_cast<uint4*>(shared + T::lookups_at);
#pragma unroll 4
  for (int i = threadIdx.x; i < T::lookup_bytes / 16; i += T::multiplying_threads)
    parts[i] = Lookup<typename T::Weights>::part(i);
  meet_at<T::multiplying_threads>(1);
}

// The warps that multiply whole groups, each for itself or in fours.
template <class T, class Job>
__device__ __forceinline__ void multiply(const Job& job, uint8_t* shared) {
  uint8_t* const unpacked = shared + T::stages * T::stage_bytes;
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const Fragment at = {lane, lane / 4, lane % 4, warp / T::columns * 16 * T::mt, warp % T::columns};
  Accumulators<T> sums;
  sums.waiting = reinterpret_cast<float4*>(shared + T::waiting_at) + threadIdx.x;
  sums.clear();
  if constexpr (T::lookup_bytes > 0) fill_lookups<T>(shared);
  BlockWalk position;  // of blocks of 32 or 64
  for (int offset = 0, phase = 0;; offset += T::stage_bytes) {
    if (offset == T::stages * T::stage_bytes) {
      offset = 0;
      phase ^= 1;
    }
    const uint8_t* stage = shared + offset;
    wait_barrier(shared_address(stage) + T::full_at, phase);
    const Header head = *reinterpret_cast<const Header*>(stage);
    if (head.count == 0) return;
    if constexpr (T::unpacks) {
      meet_at<T::multiplying_threads>(1);
      unpack_stage<T>(stage, unpacked);
      meet_at<T::multiplying_threads>(1);
    }
    if constexpr (T::gathers)
      add_blocks_of<T>(head.count, job.num_blocks, at, stage, position, sums);
    else if constexpr (T::by_warpgroups)
      add_group_of_by_warpgroups<T>(head.count, at, stage, shared + T::lookups_at, sums.p[0][0]);
    else
      add_group_of<T>(head.count, at, stage, unpacked, sums);
    arrive_after_reads(shared_address(stage) + T::empty_at, lane);
    if constexpr (!T::gathers) {
      end_group<T>(job, head, at, sums);
    } else if (position.leaf == 8) {
      end_tile<T>(job, head, at, sums);
      position = {};
    }
  }
}

// All tiles of `job` that fall to this block. Job says where rows are and where results go.
template <class T, class Job>
__device__ __forceinline__ void multiply_tiles(const Job& job) {
  uint8_t* const shared = reinterpret_cast<uint8_t*>(dynamic_shared);
  release_next_grid();
  require_shared_bytes(T::shared_bytes);
  const uint32_t address = shared_address(shared);
  if (threadIdx.x < T::stages) {
    const uint32_t stage = address + threadIdx.x * T::stage_bytes;
    init_barrier(stage + T::full_at, arrivals_of_copier() * copying_threads);
    init_barrier(stage + T::empty_at, T::warps * warp_arrivals);
  }
  if constexpr (T::shares) {
    if (threadIdx.x == T::stages) init_barrier(address + T::read_at, T::warps * warp_arrivals);
  }
  __syncthreads();
  wait_for_previous_grid();
  const bool is_copying = threadIdx.x >= T::multiplying_threads;
  if constexpr (T::by_warpgroups) {
    if (is_copying)
      give_registers<T::copying_registers>();
    else
      take_registers<T::multiplying_registers>();
  }
  if constexpr (T::shares) {
    if (!is_copying) return multiply_shares<T>(job, shared);
    ShareCopier<T, Job>(job, shared).run();
  } else {
    if (!is_copying) return multiply<T>(job, shared);
    if constexpr (T::gathers)
      BlockCopier<T, Job>(job, address).run();
    else
      Copier<T, Job>(job, address).run();
  }
}

}  // namespace coldstream::gemm
