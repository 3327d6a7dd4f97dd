// One new row each of a few sequences (or a few rows of one) over long contexts.
//
// The work is cut into items: a row, a key/value head, a chunk of 256 positions and up to `heads` of the
// query heads that share it. Blocks of threads walk the items, with copies of the next blocks of keys and
// values in flight, so one grid serves every context length. Chunks leave maximum, denominator and numerators
// in a workspace for merge.cu.
#include "attention/tile.cuh"

namespace coldstream {

struct decode_arguments {
  const float* query;
  const uint8_t *k_cache, *v_cache;
  const int32_t *positions, *slots;
  float* values;  // [T, H, max_chunks, D], numerators
  float2* stats;  // [T, H, max_chunks], maximum and denominator
  cache_places places;
  int32_t num_rows, num_heads, num_kv_heads, max_chunks, window;
};

constexpr int decode_threads = 256;

// Positions begin … end − 1 of one chunk.
struct decode_item {
  int row, slot, kv_head, part, chunk, chunk_begin, begin, end;
};

// The chunks of all rows.
__device__ __forceinline__ int count_chunks(const decode_arguments& a) {
  int chunks = 0;
#pragma unroll 1
  for (int row = 0; row < a.num_rows; row++) {
    const int position = a.positions[row];
    chunks += position / chunk_positions - first_position(position, a.window) / chunk_positions + 1;
  }
  return chunks;
}

__device__ __forceinline__ decode_item find_item(const decode_arguments& a, int index, int parts) {
  decode_item item;
  const int per_chunk = a.num_kv_heads * parts, rest = index % per_chunk;
  item.kv_head = rest / parts;
  item.part = rest % parts;
  item.chunk = index / per_chunk;
#pragma unroll 1
  for (item.row = 0;; item.row++) {
    const int position = a.positions[item.row], first = first_position(position, a.window);
    const int num_chunks = position / chunk_positions - first / chunk_positions + 1;
    item.slot = a.slots[item.row];
    if (item.chunk < num_chunks) {
      item.chunk_begin = (first / chunk_positions + item.chunk) * chunk_positions;
      item.begin = max(first, item.chunk_begin);
      item.end = min(position + 1, item.chunk_begin + chunk_positions);
      return item;
    }
    item.chunk -= num_chunks;
  }
}

template <class cache, int head_dim, int heads, int key_blocks, int stages>
struct decoder {
  using tile = kv_tile<cache, head_dim>;
  static constexpr int blocks_per_item = 2 * chunk_blocks;  // of keys, then of values
  // Scores: a thread takes some heads at one or two positions. Numerators: some heads at two columns.
  static constexpr int key_positions = key_blocks * block_positions;
  static constexpr int scores_per_thread = heads * key_positions / decode_threads;
  static constexpr int score_positions = scores_per_thread >= 8 ? 2 : 1;
  static constexpr int score_heads =
      scores_per_thread > score_positions ? scores_per_thread / score_positions : 1;
  static constexpr int position_lanes = key_positions / score_positions;
  static constexpr int quads = head_dim / 4;
  static constexpr int columns = head_dim / 2;
  static constexpr int column_groups = decode_threads / columns;
  static constexpr int mix_heads = (heads + column_groups - 1) / column_groups;
  static constexpr int padded_heads = (heads + mix_heads - 1) / mix_heads * mix_heads;
  static_assert(columns <= decode_threads && heads <= decode_threads / warp_size && stages >= key_blocks);

  static constexpr int shared_bytes =
      stages * tile::bytes + 4 * heads * head_dim + 4 * padded_heads * (chunk_positions + chunk_blocks);

  const decode_arguments& a;
  uint8_t* ring;
  float* queries;      // [heads, head_dim]
  float* weights;      // [padded_heads, chunk_positions], scores at first
  float* corrections;  // [padded_heads, chunk_blocks]
  const int group, parts, num_items;
  int next_index;    // of the item after `item`
  decode_item item;  // whose blocks are being queued
  int num_queued = 0;

  __device__ __forceinline__ decoder(const decode_arguments& arguments, uint8_t* shared, int num_chunks)
      : a(arguments),
        ring(shared),
        queries(reinterpret_cast<float*>(shared + stages * tile::bytes)),
        weights(queries + heads * head_dim),
        corrections(weights + padded_heads * chunk_positions),
        group(a.num_heads / a.num_kv_heads),
        parts((group + heads - 1) / heads),
        num_items(num_chunks * a.num_kv_heads * parts),
        next_index(blockIdx.x) {}

  __device__ __forceinline__ const uint8_t* block_at(int number) const {
    return ring + number % stages * tile::bytes;
  }

  // Starts the copy of the next block in line, if there is one; always one group of copies.
  __device__ __forceinline__ void queue_block() {
    const int number = num_queued % blocks_per_item;
    if (number == 0) {
      if (next_index < num_items) item = find_item(a, next_index, parts);
      next_index += gridDim.x;
    }
    const int first = item.chunk_begin + number % chunk_blocks * block_positions;
    const int begin = max(item.begin - first, 0), end = min(item.end - first, block_positions);
    if (begin < end && next_index - int(gridDim.x) < num_items) {
      const bool is_value = number >= chunk_blocks;
      const uint8_t* from = (is_value ? a.v_cache : a.k_cache) + item.slot * a.places.slot_bytes +
                            first * a.places.position_bytes + item.kv_head * int64_t{tile::row_chunks * 16};
      uint8_t* to = ring + num_queued % stages * tile::bytes;
      tile::template load<decode_threads>(to, from, a.places.position_bytes, begin, end, !is_value);
    }
    commit_copies();
    num_queued++;
  }

  // The query head number `head` of the item; spare heads repeat the last one.
  __device__ __forceinline__ int head_of(const decode_item& item, int head) const {
    return item.kv_head * group + min(item.part * heads + head, group - 1);
  }
  __device__ __forceinline__ bool is_spare(const decode_item& item, int head) const {
    return head >= heads || item.part * heads + head >= group;
  }

  // Where the item's chunk leaves what it found for query head `head`.
  __device__ __forceinline__ int64_t place_of(const decode_item& item, int head) const {
    return (int64_t{item.row} * a.num_heads + head_of(item, head)) * a.max_chunks + item.chunk;
  }

  __device__ __forceinline__ void load_queries(const decode_item& item) {
    for (int i = threadIdx.x; i < heads * quads; i += decode_threads) {
      const int64_t head = int64_t{item.row} * a.num_heads + head_of(item, i / quads);
      reinterpret_cast<float4*>(queries)[i] =
          reinterpret_cast<const float4*>(a.query + head * head_dim)[i % quads];
    }
  }

  // Scores of `key_blocks` blocks, from block `block` of the chunk, which is number `number` of the ring.
  __device__ __forceinline__ void score_blocks(const decode_item& item, int block, int number) {
    const int lane = threadIdx.x % position_lanes, first_head = threadIdx.x / position_lanes * score_heads;
    if (first_head >= heads) return;
    float sums[score_heads][score_positions] = {};
    const uint8_t* tiles[score_positions];
    int rows[score_positions];
    bool valid[score_positions], any = false;
#pragma unroll
    for (int j = 0; j < score_positions; j++) {
      const int place = lane + j * position_lanes;
      const int position = item.chunk_begin + block * block_positions + place;
      tiles[j] = block_at(number + place / block_positions);
      rows[j] = place % block_positions;
      valid[j] = position >= item.begin && position < item.end;
      any = any || valid[j];
    }
    if (any) score_positions_of(queries + first_head * head_dim, tiles, rows, sums);
#pragma unroll
    for (int h = 0; h < score_heads; h++) {
#pragma unroll
      for (int j = 0; j < score_positions; j++) {
        const int place = block * block_positions + lane + j * position_lanes;
        weights[(first_head + h) * chunk_positions + place] = valid[j] ? sums[h][j] : negative_infinity();
      }
    }
  }

  static __device__ __forceinline__ void score_positions_of(const float* query,
                                                            const uint8_t* (&tiles)[score_positions],
                                                            const int (&rows)[score_positions],
                                                            float (&sums)[score_heads][score_positions]) {
#pragma unroll 4
    for (int piece = 0; piece < tile::row_pieces; piece++) {
      uint4 keys[score_positions];
      float scales[score_positions];
#pragma unroll
      for (int j = 0; j < score_positions; j++) {
        keys[j] = tile::swizzled_piece(tiles[j], rows[j], piece);
        scales[j] = tile::scale(tiles[j], rows[j], piece * cache::chunk_values, true);
      }
#pragma unroll
      for (int quad = 0; quad < cache::chunk_values / 4; quad++) {
        float4 k[score_positions];
#pragma unroll
        for (int j = 0; j < score_positions; j++) k[j] = cache::four_of(keys[j], quad, scales[j]);
#pragma unroll
        for (int h = 0; h < score_heads; h++) {
          const float4 q =
              *reinterpret_cast<const float4*>(query + h * head_dim + piece * cache::chunk_values + 4 * quad);
#pragma unroll
          for (int j = 0; j < score_positions; j++) {
            float s = __fmaf_rn(q.x, k[j].x, sums[h][j]);
            s = __fmaf_rn(q.y, k[j].y, s);
            s = __fmaf_rn(q.z, k[j].z, s);
            sums[h][j] = __fmaf_rn(q.w, k[j].w, s);
          }
        }
      }
    }
  }

  // Scores into weights, with what the blocks have to be corrected by; a warp takes a head.
  __device__ __forceinline__ void weigh(const decode_item& item) {
    const int head = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    if (head >= heads) return;
    float* row = weights + head * chunk_positions;
    float scores[chunk_blocks][2], maxima[chunk_blocks], totals[chunk_blocks];
#pragma unroll
    for (int b = 0; b < chunk_blocks; b++) {
      scores[b][0] = row[b * block_positions + lane];
      scores[b][1] = row[b * block_positions + lane + warp_size];
      maxima[b] = fmaxf(scores[b][0], scores[b][1]);
    }
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int b = 0; b < chunk_blocks; b++) {
        maxima[b] = fmaxf(maxima[b], __shfl_xor_sync(all_lanes, maxima[b], distance));
      }
    }
#pragma unroll
    for (int b = 1; b < chunk_blocks; b++) maxima[b] = fmaxf(maxima[b], maxima[b - 1]);
#pragma unroll
    for (int b = 0; b < chunk_blocks; b++) {
      float e[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int place = b * block_positions + lane + i * warp_size;
        const int position = item.chunk_begin + place;
        const bool valid = position >= item.begin && position < item.end;
        e[i] = valid ? exact_exp(scores[b][i] - maxima[b]) : 0.0f;
        row[place] = e[i];
      }
      // Accumulator j adds places j, j + 16, j + 32, j + 48; lanes 16 … 31 hold every second of them.
      const float second = __shfl_down_sync(all_lanes, e[0], 16);
      const float fourth = __shfl_down_sync(all_lanes, e[1], 16);
      totals[b] = ((e[0] + second) + e[1]) + fourth;
    }
#pragma unroll
    for (int b = 0; b < chunk_blocks; b++) totals[b] = sum_of_sixteen_lanes(totals[b], 1);
    float denominator = 0.0f;
#pragma unroll
    for (int b = 0; b < chunk_blocks; b++) {
      const int begin = item.chunk_begin + b * block_positions;
      const bool used = begin < item.end && begin + block_positions > item.begin, first = begin <= item.begin;
      const float correction = used && !first ? exact_exp(maxima[b > 0 ? b - 1 : 0] - maxima[b]) : 1.0f;
      if (used) denominator = first ? totals[b] : __fmaf_rn(denominator, correction, totals[b]);
      if (lane == 0) corrections[head * chunk_blocks + b] = correction;
    }
    if (lane == 0 && !is_spare(item, head)) {
      a.stats[place_of(item, head)] = make_float2(maxima[chunk_blocks - 1], denominator);
    }
  }

  static __device__ __forceinline__ void add_values(float (&numerators)[mix_heads][2], const float* weight,
                                                    float2 v) {
#pragma unroll
    for (int h = 0; h < mix_heads; h++) {
      const float e = weight[h * chunk_positions];
      numerators[h][0] = __fmaf_rn(e, v.x, numerators[h][0]);
      numerators[h][1] = __fmaf_rn(e, v.y, numerators[h][1]);
    }
  }

  // Block `block` of the values, number `number` of the ring, into the numerators of two columns.
  __device__ __forceinline__ void mix_block(const decode_item& item, int block, int number,
                                            float (&numerators)[mix_heads][2]) {
    const int column = threadIdx.x % columns * 2, first_head = threadIdx.x / columns * mix_heads;
    const int first = block * block_positions;
    const int begin = max(item.begin - item.chunk_begin, first);
    const int end = min(item.end - item.chunk_begin, first + block_positions);
    if (first_head >= heads || begin >= end) return;
#pragma unroll
    for (int h = 0; h < mix_heads; h++) {
      const float correction = corrections[(first_head + h) * chunk_blocks + block];
      numerators[h][0] *= correction;
      numerators[h][1] *= correction;
    }
    const uint8_t* values = block_at(number);
    auto value_at = [&](int place) {
      const int row = place - first;
      return cache::load_two(values + row * tile::row_bytes, head_dim, column,
                             tile::scale(values, row, column, false));
    };
    const float* weight = weights + first_head * chunk_positions;
    int place = begin;
#pragma unroll 1
    for (; place < end && place % 4; place++) add_values(numerators, weight + place, value_at(place));
#pragma unroll(mix_heads > 2 ? 2 : 4)
    for (; place + 4 <= end; place += 4) {
      float2 v[4];
      float e[mix_heads][4];
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = value_at(place + i);
#pragma unroll
      for (int h = 0; h < mix_heads; h++) {
        const float* from = weight + h * chunk_positions + place;
        *reinterpret_cast<float4*>(e[h]) = *reinterpret_cast<const float4*>(from);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int h = 0; h < mix_heads; h++) {
          numerators[h][0] = __fmaf_rn(e[h][i], v[i].x, numerators[h][0]);
          numerators[h][1] = __fmaf_rn(e[h][i], v[i].y, numerators[h][1]);
        }
      }
    }
#pragma unroll 1
    for (; place < end; place++) add_values(numerators, weight + place, value_at(place));
  }

  __device__ __forceinline__ void leave(const decode_item& item,
                                        const float (&numerators)[mix_heads][2]) const {
    const int column = threadIdx.x % columns * 2, first_head = threadIdx.x / columns * mix_heads;
#pragma unroll
    for (int h = 0; h < mix_heads; h++) {
      if (is_spare(item, first_head + h)) continue;
      float* to = a.values + place_of(item, first_head + h) * head_dim + column;
      *reinterpret_cast<float2*>(to) = make_float2(numerators[h][0], numerators[h][1]);
    }
  }

  __device__ __forceinline__ void run() {
    constexpr int score_steps = chunk_blocks / key_blocks;
    int num_used = 0;  // blocks
#pragma unroll 1
    for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
      float numerators[mix_heads][2] = {};
      decode_item current;
#pragma unroll 1
      for (int step = 0; step < score_steps + chunk_blocks; step++) {
#pragma unroll 1
        while (num_queued < num_used + stages) queue_block();
        if (step == 0) {
          // An item has more blocks than the ring, so what is being queued is still this one.
          current = item;
          load_queries(current);
        }
        if (step < score_steps) {
          wait_for_copies<stages - key_blocks>();
          __syncthreads();
          score_blocks(current, step * key_blocks, num_used);
          num_used += key_blocks;
        } else {
          if (step == score_steps) weigh(current);
          wait_for_copies<stages - 1>();
          __syncthreads();
          mix_block(current, step - score_steps, num_used, numerators);
          num_used++;
        }
        __syncthreads();
      }
      leave(current, numerators);
    }
    wait_for_copies<0>();
  }
};

// With few items, smaller ones: `narrow` heads instead of `wide`, so that more blocks share the work.
template <class cache, int head_dim, int wide, int narrow, int key_blocks, int stages>
__global__ void __launch_bounds__(decode_threads, 1) attention_decode(const decode_arguments a) {
  extern __shared__ __align__(128) uint8_t shared[];
  wait_for_previous_grid();
  release_next_grid();
  const int group = a.num_heads / a.num_kv_heads, num_chunks = count_chunks(a);
  const int num_narrow = num_chunks * a.num_kv_heads * ((group + narrow - 1) / narrow);
  if (wide == narrow || num_narrow > int(gridDim.x)) {
    decoder<cache, head_dim, wide, key_blocks, stages>(a, shared, num_chunks).run();
  } else {
    decoder<cache, head_dim, narrow, key_blocks, stages>(a, shared, num_chunks).run();
  }
}

}  // namespace coldstream
