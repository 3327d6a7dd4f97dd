// Tiles of GEMM, and the warps that copy their operands group by group, without a pause
// between tiles.
//
// Super-block g adds to accumulator g mod 8. A tile takes its groups in the order in which the final tree
// needs the accumulators (0, 4, 2, 6, 1, 5, 3, 7: the leaves of the tree from left to right) and so keeps
// four of them, not eight. Adding an accumulator that no group has added to changes nothing, as no sum here
// is ever −0.
#pragma once

#include "cuda/gemm_lookups.cuh"

namespace coldstream::gemm {

constexpr int copy_bytes = 16;
constexpr int chunks = group_size / copy_bytes;  // of a row of codes
constexpr int copying_threads = 4 * warp_size;

// Threads of a warp that say that it has read. One speaks for all, as they meet before. compute-sanitizer's
// racecheck does not see that and reports what is written next as a race, so that for it each lane arrives.
#ifdef COLDSTREAM_EVERY_LANE_ARRIVES
constexpr int warp_arrivals = warp_size;
#else
constexpr int warp_arrivals = 1;
#endif

// At a barrier of `warp_arrivals` threads of each warp, when all lanes of this one have read.
__device__ __forceinline__ void arrive_after_reads(uint32_t barrier, int lane) {
  __syncwarp();
  if (warp_arrivals == warp_size || lane == 0) arrive_barrier(barrier);
}

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Of stages of blocks of 32 or 64: products of 32 inputs in one, and the bytes of the aligned windows that
// hold a block.
constexpr int stage_blocks = 8;
template <class Weights>
constexpr int block_room =
    (Weights::bytes + copy_bytes - Weights::alignment + copy_bytes - 1) / copy_bytes * copy_bytes;

// A tile of rows * tokens outputs for warp_rows * warp_columns warps of mt * nt products each. By warpgroups
// (sm_90 only), four warps multiply together and nothing is unpacked in shared memory.
template <class Weights_, int mt_, int nt_, int warp_rows, int warp_columns, int stages_, int blocks_ = 1,
          bool by_warpgroups_ = false>
struct Tiling {
  static constexpr int blocks = blocks_;  // on a multiprocessor
  static constexpr bool shares = false;   // the inputs of a tile among warpgroups
  static constexpr bool by_warpgroups = by_warpgroups_;
  using Weights = Weights_;
  using Group = WeightGroup<Weights>;
  static constexpr int mt = mt_, nt = nt_, columns = warp_columns, stages = stages_;
  static constexpr int rows = 16 * mt * warp_rows, tokens = 8 * nt * warp_columns;
  static constexpr int warps = warp_rows * warp_columns;  // that multiply
  static constexpr int multiplying_threads = warp_size * warps;
  static constexpr int threads = multiplying_threads + copying_threads;
  // A multiprocessor's registers, for 128 threads that copy and 256 that multiply by warpgroups.
  static constexpr int copying_registers = 72, multiplying_registers = 216;
  static constexpr bool gathers = !Weights::is_super;  // single blocks, see gemm_gather.cuh
  // Of blocks of 32 two accumulators are added at a time, j and j + 4. Where few activation rows leave
  // registers for all eight, blocks come in the order of memory, so that sectors are read once.
  static constexpr int num_sums = !gathers ? 1 : nt <= 2 ? 8 : 2;
  static constexpr bool unpacks = !Group::in_place && !by_warpgroups && !gathers;
  // An odd number of chunks, so that the same word of eight rows lies in different banks.
  static constexpr int row_bytes = gathers ? stage_blocks * block_room<Weights> : Group::pitch;
  static constexpr int weight_pitch = by_warpgroups || gathers ? row_bytes | copy_bytes : row_bytes;

  static constexpr int full_at = 16, empty_at = 24;  // barriers, after the header
  static constexpr int scales_at = 32;
  static constexpr int token_scales_bytes = gathers ? 4 * stage_blocks : 4;
  static constexpr int offsets_at = scales_at + token_scales_bytes * tokens;
  static constexpr int sums_at = offsets_at + (Group::in_place ? 0 : 4 * rows);
  static constexpr int token_sums_bytes = gathers         ? 4 * stage_blocks
                                          : by_warpgroups ? plain_bytes / swizzled_rows
                                                          : sum_pitch;
  static constexpr int sums_end = sums_at + (Weights::has_mins ? token_sums_bytes * tokens : 0);
  // The sum of a token's codes.
  static constexpr bool has_totals = by_warpgroups && Lookup<Weights>::is_halved;
  static constexpr int totals_at = sums_end, totals_end = totals_at + (has_totals ? 4 * tokens : 0);
  static constexpr int codes_at = by_warpgroups ? round_up(totals_end, swizzle_bytes) : totals_end;
  static constexpr int weights_at = codes_at + (by_warpgroups ? group_size : code_pitch) * tokens;
  static constexpr int stage_end = weights_at + weight_pitch * rows;
  static constexpr int stage_bytes = by_warpgroups ? round_up(stage_end, swizzle_bytes) : stage_end;
  static constexpr int unpacked_bytes = unpacks ? (code_pitch + Group::table_pitch) * rows : 0;
  // Subtrees that wait for their right siblings: these levels of the tree in shared memory, others in
  // registers.
  static constexpr int shared_levels = num_sums == 8 ? 0 : Group::in_place ? 3 : 2;
  static constexpr int waiting_at = stages * stage_bytes + unpacked_bytes;
  static constexpr int lookups_at = waiting_at + shared_levels * 4 * rows * tokens;
  static constexpr int lookup_bytes = by_warpgroups ? Lookup<Weights>::table_bytes : 0;
  static constexpr int shared_bytes = lookups_at + lookup_bytes;

  static_assert(tokens % 16 == 0);
  static_assert(Group::in_place || gathers || rows * weight_pitch % (copy_bytes * copying_threads) == 0);
  static_assert(!by_warpgroups || (mt == 1 && columns == 1 && warps % 4 == 0));
  static_assert(!gathers || (mt == 1 && !by_warpgroups));  // warpgroups: ShareTiling

  // Where a token's codes lie; 16 bytes from chunk to chunk of 16, or swizzled.
  __device__ static constexpr int code_place(int token, int chunk) {
    return by_warpgroups ? swizzled_place<tokens>(token, chunk) : token * code_pitch + chunk * copy_bytes;
  }
};

// Checks that the launcher has given a block enough shared memory.
__device__ __forceinline__ void require_shared_bytes(uint32_t bytes) {
  if (dynamic_shared_bytes() < bytes) __trap();
}

// Rows of QuantActivations, in the form that the weights' type reads.
struct Activations {
  const int8_t* q;
  const float* scales;
  const int16_t* sums;
  int num_groups;
};

// The header of a stage: its tile, and the position of its group in the tile.
struct Header {
  int count;     // rows of activations; 0: there are no more tiles
  int first;     // the first of them
  int row;       // the first weight row
  int progress;  // of super-blocks: leaf, and the next group's leaf (8: none, the tile ends), a byte each
};

// The order of super-blocks or of blocks of 32. `leaf` counts accumulators in the order of the tree. Leaves
// have one accumulator each and a stride of 8, or two and a stride of 4.
template <int stride = 8>
struct Walk {
  static constexpr int accumulators = 8 / stride;
  int leaf = 0, group = 0;

  __device__ Walk next(int num_groups) const { return after(1, num_groups); }
  __device__ Walk next_leaf(int num_groups) const {
    int following = leaf + accumulators;
    while (following < 8 && accumulator(following) >= num_groups) following += accumulators;
    return {following, accumulator(following)};
  }
  // After `count` groups of this leaf.
  __device__ Walk after(int count, int num_groups) const {
    return count < rest_of_leaf(num_groups) ? Walk{leaf, group + stride * count} : next_leaf(num_groups);
  }
  // The leaf's groups from this one on.
  __device__ int rest_of_leaf(int num_groups) const { return (num_groups - group + stride - 1) / stride; }
  // The next eight in the order of memory, in which there are no leaves.
  __device__ Walk next_eight(int num_groups) const {
    return group + 8 < num_groups ? Walk{0, group + 8} : Walk{8, 0};
  }
  __device__ static int accumulator(int leaf) { return __brev(leaf) >> 29; }
};

// A tile as the copying side sees it.
struct Source {
  Header head;            // progress is not set
  const uint8_t* rows;    // of the weights
  const uint8_t* rows_8;  // the matrix of rows 8 … 15 of every sixteen
};

// Row `row` of a tile, the last of the matrix for those beyond it.
template <class T, class Job>
__device__ __forceinline__ const uint8_t* start_of_row(const Job& job, const Source& tile, int row) {
  return job.template weight_matrix<T>(tile, row) +
         int64_t(job.template weight_row<T>(tile, row)) * job.row_bytes;
}

// The warps that copy super-blocks. Job says where rows are.
template <class T, class Job>
struct Copier {
  using Weights = typename T::Weights;
  using Group = typename T::Group;
  static constexpr int row_chunks = T::weight_pitch / copy_bytes;
  static constexpr int weight_chunks_in_all = T::rows * row_chunks;
  static constexpr int weight_passes = (weight_chunks_in_all + copying_threads - 1) / copying_threads;
  static constexpr int code_tokens = copying_threads / chunks;  // in a pass
  static constexpr int code_passes = (T::tokens + code_tokens - 1) / code_tokens;
  static constexpr bool converts_sums = Weights::has_mins && T::by_warpgroups;  // to float16
  static constexpr bool loads_sums = converts_sums || T::has_totals;
  static_assert(2 * T::tokens <= copying_threads);  // two for the sums of a token, one or both for its scales

  const Job& job;
  const uint32_t shared;
  const int lane = threadIdx.x - T::multiplying_threads;
  int index = blockIdx.x;  // of the tile
  Source tile;
  Walk<> position;
  const uint8_t* weight_chunks[Group::in_place ? weight_passes : 1];
  uint32_t code_chunks[code_passes];  // offsets in the activations
  uint32_t extra_row;                 // the activation row whose sums and scales this thread copies

  __device__ Copier(const Job& job, uint32_t shared) : job(job), shared(shared) { open(); }

  __device__ void run() {
    uint32_t stage = shared;
    for (int phase = 1;; stage += T::stage_bytes) {
      if (stage == shared + T::stages * T::stage_bytes) {
        stage = shared;
        phase ^= 1;
      }
      uint4 sums;
      if constexpr (loads_sums) sums = load_sums();
      wait_barrier(stage + T::empty_at, phase);
      const Walk<> following = position.next(job.x.num_groups);
      if (lane == 0)
        store_shared_16(stage, tile.head.count, tile.head.first, tile.head.row,
                        position.leaf | following.leaf << 8);
      if (tile.head.count > 0) {
        copy_weights(stage);
        copy_activations(stage);
        if constexpr (converts_sums) store_sums(stage, sums);
        if constexpr (T::has_totals) store_total(stage, sums);
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
    if constexpr (Group::in_place) {
#pragma unroll
      for (int i = 0; i < weight_passes; i++) {
        const int chunk = i * copying_threads + lane;
        weight_chunks[i] = start_of_row<T>(job, tile, chunk / row_chunks) + chunk % row_chunks * copy_bytes;
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
    const int64_t offset = int64_t(position.group) * Group::bytes;
    if constexpr (Group::in_place) {
#pragma unroll
      for (int i = 0; i < weight_passes; i++) {
        const bool is_whole = (i + 1) * copying_threads <= weight_chunks_in_all;
        copy_if_below(weight_chunks_in_all, is_whole ? 0 : i * copying_threads + lane,
                      to + i * copying_threads * copy_bytes, weight_chunks[i] + offset);
      }
    } else {
#pragma unroll 4
      for (int i = 0; i < weight_passes; i++) {
        const int chunk = i * copying_threads + lane, row = chunk / row_chunks, part = chunk % row_chunks;
        // Windows of 16 aligned bytes that hold at least one of the row's.
        const uint8_t* from = start_of_row<T>(job, tile, row) + offset;
        const int begin = int(reinterpret_cast<uint64_t>(from)) & 15;
        copy_if_below(begin + Group::bytes, part * copy_bytes, to + i * copying_threads * copy_bytes,
                      from - begin + part * copy_bytes);
        if (part == 0) store_shared_4(stage + T::offsets_at + 4 * row, begin);
      }
    }
  }

  // Eight sums of a token.
  __device__ uint4 load_sums() const {
    if (lane / 2 >= tile.head.count) return {};
    const int64_t at = extra_row + position.group;
    return *reinterpret_cast<const uint4*>(job.x.sums + at * chunks + lane % 2 * 8);
  }

  __device__ void store_sums(uint32_t stage, const uint4& sums) const {
    store_shared_16(stage + T::sums_at + plain_place(lane / 2, lane % 2), halves_of(sums.x),
                    halves_of(sums.y), halves_of(sums.z), halves_of(sums.w));
  }

  // Two threads have the sums of a token.
  __device__ void store_total(uint32_t stage, const uint4& sums) const {
    const uint32_t words[4] = {sums.x, sums.y, sums.z, sums.w};
    int total = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) total += int16_t(words[i]) + (int(words[i]) >> 16);
    total += __shfl_xor_sync(all_lanes, total, 1);
    if (lane % 2 == 0) store_shared_4(stage + T::totals_at + 4 * (lane / 2), total);
  }

  __device__ void copy_activations(uint32_t stage) {
    const int8_t* const q = job.x.q + position.group * group_size;
    const int count = tile.head.count, token = lane / chunks;
    const uint32_t to = stage + T::codes_at + T::code_place(token, lane % chunks);
    constexpr int pass_bytes = T::code_place(code_tokens, 0);
    static_assert(code_tokens == swizzled_rows);
#pragma unroll
    for (int i = 0; i < code_passes; i++)
      copy_if_below(count, code_tokens * i + token, to + i * pass_bytes, q + code_chunks[i]);
    const int64_t at = extra_row + position.group;
    if (Weights::has_mins && !converts_sums)
      copy_if_below(count, lane / 2, stage + T::sums_at + sum_pitch * (lane / 2) + lane % 2 * copy_bytes,
                    job.x.sums + at * chunks + lane % 2 * 8);
    copy_word_if_below(count, lane % 2 ? count : lane / 2, stage + T::scales_at + 4 * (lane / 2),
                       job.x.scales + at);
  }
};

}  // namespace coldstream::gemm
