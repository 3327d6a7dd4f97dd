// Products of many activation rows: blocks that stay on their multiprocessor and walk over tiles of the
// output. Some warps copy the next groups of 256 inputs, across the ends of tiles too, while the others
// multiply; both sides meet at barriers in shared memory, so that no warp waits for all others.
//
// K-types add a group to accumulator g mod 8. A tile takes its groups in the order in which the final tree
// needs the accumulators (0, 4, 2, 6, 1, 5, 3, 7: the leaves of the tree from left to right) and so keeps
// four of them, not eight. Adding an accumulator that no group has added to changes nothing, as no sum here
// is ever −0.
#pragma once

#include "cuda/many_unpack.cuh"

namespace coldstream::many {

constexpr int copy_bytes = 16;
constexpr int chunks = group_size / copy_bytes;  // of a row of codes
constexpr int copying_threads = 4 * warp_size;

// A tile of rows * tokens outputs for warp_rows * warp_columns warps of mt * nt products each.
template <class weights_, int mt_, int nt_, int warp_rows, int warp_columns, int stages_, int blocks_ = 1>
struct tiling {
  static constexpr int blocks = blocks_;  // on a multiprocessor
  using weights = weights_;
  static constexpr int mt = mt_, nt = nt_, columns = warp_columns, stages = stages_;
  static constexpr int rows = 16 * mt * warp_rows, tokens = 8 * nt * warp_columns;
  static constexpr int warps = warp_rows * warp_columns;  // that multiply
  static constexpr int multiplying_threads = warp_size * warps;
  static constexpr int threads = multiplying_threads + copying_threads;
  static constexpr int num_sums = weights::super ? 1 : 8;  // accumulators kept in full

  static constexpr int full_at = 16, empty_at = 24;  // barriers, after the header
  static constexpr int scales_at = 32;
  static constexpr int offsets_at = scales_at + 4 * tokens;
  static constexpr int sums_at = offsets_at + (weights::in_place ? 0 : 4 * rows);
  static constexpr int codes_at = sums_at + (weights::has_sums ? sum_pitch * tokens : 0);
  static constexpr int weights_at = codes_at + code_pitch * tokens;
  static constexpr int stage_bytes = weights_at + weights::pitch * rows;
  static constexpr int unpacked_bytes = weights::in_place ? 0 : (code_pitch + table_pitch) * rows;
  // Subtrees that wait for their right siblings: these levels of the tree in shared memory, others in
  // registers.
  static constexpr int shared_levels = !weights::super ? 0 : weights::in_place ? 3 : 2;
  static constexpr int waiting_at = stages * stage_bytes + unpacked_bytes;
  static constexpr int shared_bytes = waiting_at + shared_levels * 4 * rows * tokens;

  static_assert(tokens % 16 == 0);
  static_assert(weights::in_place || rows * weights::pitch % (copy_bytes * copying_threads) == 0);
};

// Copies by address, if index < limit: as operands of the copy alone, addresses need no branches around them.
__device__ __forceinline__ void copy_if_below(int limit, int index, uint32_t to, const void* from) {
  asm volatile(
      "{ .reg .pred p; setp.lt.s32 p, %2, %3; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(to),
      "l"(from), "r"(index), "r"(limit)
      : "memory");
}

__device__ __forceinline__ void copy_word_if_below(int limit, int index, uint32_t to, const void* from) {
  asm volatile(
      "{ .reg .pred p; setp.lt.s32 p, %2, %3; @p cp.async.ca.shared.global [%0], [%1], 4; }" ::"r"(to),
      "l"(from), "r"(index), "r"(limit)
      : "memory");
}

// The launcher says how much shared memory a block gets, and this that it is enough.
__device__ __forceinline__ void require_shared_bytes(uint32_t bytes) {
  uint32_t given;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(given));
  if (given < bytes) __trap();
}

// Rows of QuantActivations.
struct activations {
  const int8_t* q;
  const float* scales;
  const int16_t* sums;
  int num_groups;
};

// What a stage holds: its tile, and where the group stands in it.
struct header {
  int count;     // rows of activations; 0: there are no more tiles
  int first;     // the first of them
  int row;       // the first weight row
  int progress;  // leaf, the next group's leaf (8: none, the tile ends), blocks of 32 in this group: a byte
                 // each
};

// The order of groups. `leaf` counts accumulators in the order of the tree.
template <bool super>
struct walk {
  int leaf = 0, group = 0;

  __device__ walk next(int num_groups) const {
    if (group + (super ? 8 : 1) < num_groups) return {leaf, group + (super ? 8 : 1)};
    int following = super ? leaf + 1 : 8;
    while (following < 8 && accumulator(following) >= num_groups) following++;
    return {following, accumulator(following)};
  }
  __device__ static int accumulator(int leaf) { return __brev(leaf) >> 29; }
};

// A tile as the copying side sees it.
struct source {
  header head;            // progress is not set
  const uint8_t* rows;    // of the weights
  const uint8_t* rows_8;  // the matrix of rows 8 … 15 of every sixteen
};

// The warps that copy. Job says where rows are.
template <class T, class Job>
struct copier {
  using weights = typename T::weights;
  static constexpr int row_chunks = weights::pitch / copy_bytes;
  static constexpr int weight_chunks_in_all = T::rows * row_chunks;
  static constexpr int weight_passes = (weight_chunks_in_all + copying_threads - 1) / copying_threads;
  static constexpr int code_tokens = copying_threads / chunks;  // in a pass
  static constexpr int code_passes = (T::tokens + code_tokens - 1) / code_tokens;
  static_assert(2 * T::tokens <= copying_threads);  // two for the sums of a token, one of them for its scale

  const Job& job;
  const uint32_t shared;
  const int lane = threadIdx.x - T::multiplying_threads;
  int index = blockIdx.x;  // of the tile
  source tile;
  walk<weights::super> position;
  const uint8_t* weight_chunks[weights::in_place ? weight_passes : 1];
  uint32_t code_chunks[code_passes];  // offsets in the activations
  uint32_t extra_row;                 // the activation row whose sums and scale this thread copies

  __device__ copier(const Job& job, uint32_t shared) : job(job), shared(shared) { open(); }

  __device__ void run() {
    uint32_t stage = shared;
    for (int phase = 1;; stage += T::stage_bytes) {
      if (stage == shared + T::stages * T::stage_bytes) {
        stage = shared;
        phase ^= 1;
      }
      wait_barrier(stage + T::empty_at, phase);
      const auto following = position.next(job.x.num_groups);
      if (lane == 0) {
        const int blocks = min(job.num_blocks - 8 * position.group, 8);
        const int progress = position.leaf | following.leaf << 8 | blocks << 16;
        store_shared_16(stage, tile.head.count, tile.head.first, tile.head.row, progress);
      }
      if (tile.head.count > 0) {
        copy_weights(stage);
        copy_activations(stage);
      }
      arrive_after_copies(stage + T::full_at);
      arrive_barrier(stage + T::full_at);
      if (tile.head.count == 0) return;
      position = following;
      if (position.leaf == 8) open();
    }
  }

 private:
  __device__ void open() {
    tile = job.template open<T>(index);
    index += gridDim.x;
    position = {};
    if (tile.head.count == 0) return;
    if constexpr (weights::in_place) {
#pragma unroll
      for (int i = 0; i < weight_passes; i++) {
        const int chunk = i * copying_threads + lane;
        weight_chunks[i] =
            job.template weight_row<T>(tile, chunk / row_chunks) + chunk % row_chunks * copy_bytes;
      }
    }
#pragma unroll
    for (int i = 0; i < code_passes; i++)
      code_chunks[i] =
          activation_row(code_tokens * i + lane / chunks) * group_size + lane % chunks * copy_bytes;
    extra_row = activation_row(lane / 2);
  }

  // In groups; of the last row of the tile for what is beyond it.
  __device__ uint32_t activation_row(int token) const {
    return job.activation_row(tile.head.first + min(token, tile.head.count - 1)) * job.x.num_groups;
  }

  __device__ void copy_weights(uint32_t stage) {
    const uint32_t to = stage + T::weights_at + lane * copy_bytes;
    const int64_t offset = int64_t(position.group) * weights::group_bytes;
    if constexpr (weights::in_place) {
#pragma unroll
      for (int i = 0; i < weight_passes; i++) {
        const bool is_whole = (i + 1) * copying_threads <= weight_chunks_in_all;
        copy_if_below(
            weight_chunks_in_all, is_whole ? 0 : i * copying_threads + lane,
            to + i * copying_threads * copy_bytes, weight_chunks[i] + offset);
      }
    } else {
      int valid = weights::group_bytes;
      if constexpr (!weights::super)
        valid = min(job.num_blocks - 8 * position.group, 8) * (weights::group_bytes / 8);
#pragma unroll 4
      for (int i = 0; i < weight_passes; i++) {
        const int chunk = i * copying_threads + lane, row = chunk / row_chunks, part = chunk % row_chunks;
        // Windows of 16 aligned bytes that hold at least one of the row's.
        const uint8_t* from = job.template weight_row<T>(tile, row) + offset;
        const int begin = int(reinterpret_cast<uint64_t>(from)) & 15;
        copy_if_below(
            begin + valid, part * copy_bytes, to + i * copying_threads * copy_bytes,
            from - begin + part * copy_bytes);
        if (part == 0) store_shared_4(stage + T::offsets_at + 4 * row, begin);
      }
    }
  }

  __device__ void copy_activations(uint32_t stage) {
    const int8_t* const q = job.x.q + position.group * group_size;
    const int count = tile.head.count, token = lane / chunks;
    const uint32_t to = stage + T::codes_at + token * code_pitch + lane % chunks * copy_bytes;
#pragma unroll
    for (int i = 0; i < code_passes; i++)
      copy_if_below(count, code_tokens * i + token, to + code_tokens * i * code_pitch, q + code_chunks[i]);
    const int64_t at = extra_row + position.group;
    if (weights::has_sums)
      copy_if_below(
          count, lane / 2, stage + T::sums_at + sum_pitch * (lane / 2) + lane % 2 * copy_bytes,
          job.x.sums + at * chunks + lane % 2 * 8);
    copy_word_if_below(
        count, lane % 2 ? count : lane / 2, stage + T::scales_at + 4 * (lane / 2), job.x.scales + at);
  }
};

template <class T>
struct accumulators {
  float p[T::num_sums][T::mt][T::nt][4];
  float left[T::mt][T::nt][4];  // a leaf that waits, if that level is not in shared memory
  float* waiting;               // this thread's in shared memory

  __device__ void clear() {
#pragma unroll
    for (int k = 0; k < T::num_sums; k++) each([&](int m, int n, int i) { p[k][m][n][i] = 0.0f; });
  }

  // Leaf `leaf` is complete and `next` comes next. Sums to the root if that is 8.
  __device__ void close(int leaf, int next) {
    if constexpr (T::weights::super) {
      if (close_level<0>(leaf, next) && close_level<1>(leaf, next)) close_level<2>(leaf, next);
    } else {
      each([&](int m, int n, int i) {
        float lanes[8];
#pragma unroll
        for (int k = 0; k < 8; k++) lanes[k] = p[k][m][n][i];
        p[0][m][n][i] = sum_of_eight(lanes);
      });
    }
  }

 private:
  // True if the subtree above is complete too.
  template <int level>
  __device__ bool close_level(int leaf, int next) {
    if (leaf >> level & 1) {
      each([&](int m, int n, int i) { p[0][m][n][i] = sibling<level>(m, n, i) + p[0][m][n][i]; });
    } else if (leaf >> (level + 1) == next >> (level + 1)) {
      each([&](int m, int n, int i) {
        sibling<level>(m, n, i) = p[0][m][n][i];
        p[0][m][n][i] = 0.0f;
      });
      return false;
    }
    return true;
  }

  template <int level>
  __device__ float& sibling(int m, int n, int i) {
    constexpr int depth = level - (3 - T::shared_levels);
    if constexpr (depth < 0) return left[m][n][i];
    return waiting[((depth * T::mt + m) * T::nt * 4 + n * 4 + i) * T::multiplying_threads];
  }

  template <class F>
  __device__ static void each(F f) {
#pragma unroll
    for (int m = 0; m < T::mt; m++)
#pragma unroll
      for (int n = 0; n < T::nt; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) f(m, n, i);
  }
};

template <class T, int nt>
__device__ __forceinline__ void add_group(
    const place& at, const uint8_t* stage, const uint8_t* unpacked, int num_blocks, accumulators<T>& sums) {
  if constexpr (T::weights::in_place)
    add_in_place<T, nt>(at, stage, sums.p[0]);
  else if constexpr (T::weights::super)
    add_q6_k<T, nt>(at, stage, unpacked, sums.p[0]);
  else
    add_blocks<T, nt>(at, stage, unpacked, num_blocks, sums.p);
}

// The narrowest set of products that covers `count` activation rows.
template <class T>
__device__ __forceinline__ void add_group_of(
    int count, const place& at, const uint8_t* stage, const uint8_t* unpacked, int num_blocks,
    accumulators<T>& sums) {
  if (T::nt == 1 || count <= 8 * T::columns)
    add_group<T, 1>(at, stage, unpacked, num_blocks, sums);
  else if (T::nt == 2 || count <= 16 * T::columns)
    add_group<T, (T::nt < 2 ? T::nt : 2)>(at, stage, unpacked, num_blocks, sums);
  else
    add_group<T, T::nt>(at, stage, unpacked, num_blocks, sums);
}

template <class T, class Job>
__device__ __forceinline__ void store_tile(
    const Job& job, const header& head, const place& at, const accumulators<T>& sums) {
  int rows[T::nt][2];  // all of them before any is used, so that their loads overlap
#pragma unroll
  for (int n = 0; n < T::nt; n++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      rows[n][i] =
          job.out_row(head.first + min((n * T::columns + at.column) * 8 + 2 * at.t + i, head.count - 1));
#pragma unroll
  for (int n = 0; n < T::nt; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if ((n * T::columns + at.column) * 8 + 2 * at.t + i >= head.count) continue;
#pragma unroll
      for (int m = 0; m < T::mt; m++)
        job.store(rows[n][i], head.row, at.row + 16 * m + at.g, sums.p[0][m][n][i], sums.p[0][m][n][2 + i]);
    }
}

// The warps that multiply.
template <class T, class Job>
__device__ __forceinline__ void multiply(const Job& job, uint8_t* shared) {
  uint8_t* const unpacked = shared + T::stages * T::stage_bytes;
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const place at = {lane, lane / 4, lane % 4, warp / T::columns * 16 * T::mt, warp % T::columns};
  accumulators<T> sums;
  sums.waiting = reinterpret_cast<float*>(shared + T::waiting_at) + threadIdx.x;
  sums.clear();
  for (int offset = 0, phase = 0;; offset += T::stage_bytes) {
    if (offset == T::stages * T::stage_bytes) {
      offset = 0;
      phase ^= 1;
    }
    const uint8_t* stage = shared + offset;
    wait_barrier(shared_address(stage) + T::full_at, phase);
    const header head = *reinterpret_cast<const header*>(stage);
    if (head.count == 0) return;
    if constexpr (!T::weights::in_place) {
      meet<T::multiplying_threads>();
      unpack_stage<T>(stage, unpacked);
      meet<T::multiplying_threads>();
    }
    add_group_of<T>(head.count, at, stage, unpacked, head.progress >> 16, sums);
    __syncwarp();
    if (lane == 0) arrive_barrier(shared_address(stage) + T::empty_at);
    const int leaf = head.progress & 255, next = head.progress >> 8 & 255;
    if (leaf != next) sums.close(leaf, next);
    if (next == 8) {
      store_tile<T>(job, head, at, sums);
      sums.clear();
    }
  }
}

// All tiles of `job` that fall to this block. Job says where rows are and where results go.
template <class T, class Job>
__device__ __forceinline__ void multiply_tiles(const Job& job) {
  extern __shared__ __align__(16) uint8_t shared[];
  require_shared_bytes(T::shared_bytes);
  const uint32_t address = shared_address(shared);
  if (threadIdx.x < T::stages) {
    const uint32_t stage = address + threadIdx.x * T::stage_bytes;
    init_barrier(stage + T::full_at, 2 * copying_threads);  // what a thread stores itself, and what it copies
    init_barrier(stage + T::empty_at, T::warps);
  }
  __syncthreads();
  if (threadIdx.x < T::multiplying_threads)
    multiply<T>(job, shared);
  else
    copier<T, Job>(job, address).run();
}

}  // namespace coldstream::many
