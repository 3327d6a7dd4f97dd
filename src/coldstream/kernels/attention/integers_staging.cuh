// Keys and values of a tile in the layout that products of warpgroups read, and the threads that copy them:
// keys as rows of channels, values as rows of positions, in rows of 128 bytes whose chunks of 16 are
// swizzled.
#pragma once

#include "attention/integers_items.cuh"
#include "cuda/warpgroups.cuh"

namespace coldstream {

constexpr int copying_threads = 128, stages = 2;
constexpr int copying_barrier =
    1;  // of the copying threads; multiplying warpgroups have the following numbers

template <int bits, int head_dim>
struct StagedTile {
  using KeptRow = CacheRow<bits, head_dim>;
  static constexpr int planes = KeptRow::planes, chunks_of_head = head_dim / 16;
  static constexpr int bytes = block_positions * planes * head_dim;  // of keys, and of values
  static constexpr int value_rows = bytes / swizzled_row_bytes;
  static constexpr int scale_bytes = 2 * block_positions * 4;
  static_assert((bits == 16 || bits == 8) && head_dim % 128 == 0);

  // Place of 16 positions of a channel, in the order of `position_in_word`.
  __device__ static constexpr int value_place(int plane, int channel, int sixteen) {
    return swizzled_place<value_rows>(value_row(channel), 4 * value_half(plane, channel) + sixteen);
  }

  // A row has both planes of a channel, or two channels of one plane.
  __device__ static constexpr int value_row(int channel) { return channel % value_rows; }
  __device__ static constexpr int value_half(int plane, int channel) {
    return planes == 2 ? plane : channel / value_rows;
  }

  // Descriptor of channels channel … channel + 31 and positions 32 · step … 32 · step + 31; `values` from
  // `same_for_warp`.
  __device__ static uint64_t part_of_values(uint32_t values, int plane, int channel, int step) {
    const int place = value_row(channel) * swizzled_row_bytes + value_half(plane, channel) * 64;
    return describe_swizzled_from(values, place + step * 32);
  }

  // Channels 32 · step … 32 · step + 31 of the positions from 8 · eight on.
  __device__ static uint64_t part_of_keys(uint32_t keys, int plane, int eight, int step) {
    const int chunk = plane * chunks_of_head + 2 * step, row = chunk / 8 * block_positions + 8 * eight;
    return describe_swizzled_from(keys, row * swizzled_row_bytes + chunk % 8 * 16);
  }
};

// Description of a tile for the multiplying warps.
struct TileNote {
  ItemPairs item;
  int begin, end;  // the rows of the run
  int tile;        // −1 after the last
  bool begins_item, begins_run, ends_chunk;
};

// In shared memory, behind queries.
template <int bits, int head_dim>
struct Staging {
  using Tile = StagedTile<bits, head_dim>;
  static constexpr int arrived_at = stages * 2 * Tile::bytes, scales_at = arrived_at + Tile::bytes;
  static constexpr int barriers_at = scales_at + stages * Tile::scale_bytes,
                       notes_at = barriers_at + stages * 16;
  static constexpr int bytes = notes_at + stages * int(sizeof(TileNote));
  uint8_t* const shared;

  __device__ uint8_t* keys(int stage) const { return shared + stage * 2 * Tile::bytes; }
  __device__ uint8_t* values(int stage) const { return keys(stage) + Tile::bytes; }
  __device__ float* scales(int stage) const {  // of keys, then of values
    return reinterpret_cast<float*>(shared + scales_at + stage * Tile::scale_bytes);
  }
  __device__ TileNote& note(int stage) const { return reinterpret_cast<TileNote*>(shared + notes_at)[stage]; }
  __device__ uint32_t full(int stage) const { return shared_address(shared + barriers_at) + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8 * stages; }
};

// The copying threads. A tile's values are copied in the cache's layout while the tile before is multiplied,
// and then transposed into their stage.
template <int bits, int head_dim>
struct TileCopier {
  using Tile = StagedTile<bits, head_dim>;
  using KeptRow = typename Tile::KeptRow;

  // A tile's addresses in the cache, and its number of positions.
  struct Source {
    const uint8_t *keys, *values;
    int count;
    TileNote note;
  };

  const Staging<bits, head_dim> to;
  const int64_t position_bytes;
  const int thread;
  Source last;
  int number = 0;  // of tiles that were begun

  // Chunks of different positions are in different banks, as the threads of a warp read four of them.
  __device__ static int arrived_place(int plane, int position, int chunk) {
    return (plane * block_positions + position) * head_dim + (chunk ^ position / 16 * 2) * 16;
  }

  // Some positions at a time, each by as many threads as it has chunks of 16 bytes. A thread's first position
  // is less than rows_at_once, a power of two, so that where the others go is known to the compiler from
  // where the first one does.
  static constexpr int row_chunks = Tile::planes * Tile::chunks_of_head,
                       rows_at_once = copying_threads / row_chunks;
  static_assert((rows_at_once & (rows_at_once - 1)) == 0 && rows_at_once <= 16);

  // place: where the thread's position i comes to lie.
  template <class Place>
  __device__ void copy_rows(const uint8_t* rows, int count, Place place) const {
    const int chunk = thread % row_chunks, first = thread / row_chunks;
    const uint8_t* from = rows + first * position_bytes + chunk * 16;
    const int64_t bytes_at_once = rows_at_once * position_bytes;
#pragma unroll
    for (int i = 0; i < block_positions; i += rows_at_once) {
      copy_if_below(count, first + i, place(i), from);
      from += bytes_at_once;
    }
  }

  __device__ void copy_values(const Source& from) const {
    const int chunk = thread % row_chunks, first = thread / row_chunks;
    const uint32_t arrived = shared_address(to.shared + to.arrived_at);
    const int own = arrived_place(chunk / Tile::chunks_of_head, first, chunk % Tile::chunks_of_head);
    copy_rows(from.values, from.count,
              [arrived, own](int i) { return arrived + (own ^ i / 16 * 2 * 16) + i * head_dim; });
    commit_copies();
  }

  __device__ void copy_keys(const Source& from, int stage) const {
    const int own = swizzled_place<block_positions>(thread / row_chunks, thread % row_chunks);
    const uint32_t keys = shared_address(to.keys(stage));
    copy_rows(from.keys, from.count,
              [keys, own](int i) { return keys + (own ^ i % 8 * 16) + i * swizzled_row_bytes; });
    const int position = thread % block_positions;
    const uint8_t* const row =
        (thread < block_positions ? from.keys : from.values) + position * position_bytes;
    copy_word_if_below(from.count, position, shared_address(to.scales(stage)) + thread * 4,
                       row + KeptRow::code_bytes);
    commit_copies();
  }

  // Four bytes of each of four positions become four positions of each of four channels.
  __device__ static void transpose(const uint32_t (&rows)[4], uint32_t (&columns)[4][4], int word) {
    const uint32_t first = __byte_perm(rows[0], rows[1], 0x5140),
                   second = __byte_perm(rows[2], rows[3], 0x5140);
    const uint32_t third = __byte_perm(rows[0], rows[1], 0x7362),
                   fourth = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0][word] = __byte_perm(first, second, 0x5410);
    columns[1][word] = __byte_perm(first, second, 0x7632);
    columns[2][word] = __byte_perm(third, fourth, 0x5410);
    columns[3][word] = __byte_perm(third, fourth, 0x7632);
  }

  // Words of a channel have the positions that a lane's weights are of: 2w, 2w + 1, 2w + 8 and 2w + 9 of
  // sixteen. A thread takes 16 positions of four channels, `own` of them first and then those 128 further, so
  // that all places are at distances from its first ones that the compiler knows, but for an exchange of
  // halves of a row.
  __device__ void transpose_values(int stage) const {
    constexpr int quads_at_once = copying_threads / 4, channels_at_once = 4 * quads_at_once;
    const int sixteen = thread % 4, own = thread / 4;
    const uint8_t* const from =
        to.shared + to.arrived_at + arrived_place(0, 16 * sixteen, own / 4) + own % 4 * 4;
    uint32_t first[4];
#pragma unroll
    for (int c = 0; c < 4; c++) first[c] = Tile::value_place(0, 4 * own + c, sixteen);
#pragma unroll
    for (int plane = 0; plane < Tile::planes; plane++) {
#pragma unroll
      for (int channel = 0; channel < head_dim; channel += channels_at_once) {
        uint32_t columns[4][4];
#pragma unroll
        for (int word = 0; word < 4; word++) {
          uint32_t rows[4];
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const int position = 2 * word + k % 2 + k / 2 * 8;
            rows[k] = *reinterpret_cast<const uint32_t*>(
                from + (plane * block_positions + position) * head_dim + channel);
          }
          transpose(rows, columns, word);
        }
        const int place = Tile::value_row(channel) * swizzled_row_bytes,
                  half = Tile::value_half(plane, channel) * 64;
#pragma unroll
        for (int c = 0; c < 4; c++)
          *reinterpret_cast<uint4*>(to.values(stage) + (first[c] ^ half) + place) =
              make_uint4(columns[c][0], columns[c][1], columns[c][2], columns[c][3]);
      }
    }
  }

  // Finishes the tile before, and begins the one at `from`; without one at the end.
  __device__ void begin(const Source* from) {
    const int before = number - 1, stage = before % stages;
    if (number) {
      wait_barrier(to.empty(stage), before / stages % 2 ^ 1);
      copy_keys(last, stage);
      wait_for_copies<1>();
      meet_at<copying_threads>(copying_barrier);
      transpose_values(stage);
      if (thread == 0) to.note(stage) = last.note;
      meet_at<copying_threads>(copying_barrier);
    }
    if (from) {
      last = *from;
      copy_values(last);
    }
    if (number) {
      if (from)
        wait_for_copies<1>();
      else
        wait_for_copies<0>();
      see_copies();
      arrive_barrier(to.full(stage));
    }
    number++;
  }

  __device__ void begin(const IntegersArguments& a, const RowRun& run, const TileNote& note) {
    const int first = note.tile * block_positions;
    const int block = a.rows.tables[int64_t{run.segment} * a.rows.table_stride + first / chunk_positions];
    const int64_t offset = block * a.strides.block_bytes +
                           first % chunk_positions * a.strides.position_bytes +
                           int64_t{note.item.kv_head} * KeptRow::bytes;
    const Source from = {a.k_cache + offset, a.v_cache + offset, min(block_positions, run.num_kept - first),
                         note};
    begin(&from);
  }

  __device__ void end() {
    const int after = number, stage = after % stages;
    if (number) begin(nullptr);
    wait_barrier(to.empty(stage), after / stages % 2 ^ 1);
    if (thread == 0) to.note(stage).tile = -1;
    arrive_barrier(to.full(stage));
  }

  // The tiles of all runs of the block's items, in order; with a choice those that a row of the run sees.
  template <int block_pairs, bool is_chosen>
  __device__ void copy_all(const IntegersArguments& a) {
    BlockItems<block_pairs> items(a);
    while (items.next()) {
      bool begins_item = true;
      for (int begin_row = items.first_row; begin_row < items.last_row;) {
        const RowRun run(a.rows, begin_row, items.last_row);
        int first_tile, last_tile;
        if (items.find_tiles(run, first_tile, last_tile)) {
          SeenTiles<is_chosen> seen;
          first_tile = seen.from(a.chosen, run.begin, run.end, first_tile, last_tile);
          for (int at = first_tile, next; at <= last_tile; at = next) {
            next = seen.from(a.chosen, run.begin, run.end, at + 1, last_tile);
            const bool ends_chunk = next > last_tile || next / chunk_blocks != at / chunk_blocks;
            begin(a, run, {items, run.begin, run.end, at, begins_item, at == first_tile, ends_chunk});
            begins_item = false;
          }
        }
        begin_row = run.end;
      }
    }
    end();
  }
};

}  // namespace coldstream
