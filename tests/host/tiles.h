// The tiles of AMX as plain code, for the kernels of the tier on a machine that has none: included in front
// of their sources by COLDSTREAM_EMULATE_AMX. Meaning: Intel 64 and IA-32 Architectures Software Developer's
// Manual, volume 2, LDTILECFG, TILELOADD, TDPBSSD, TILESTORED. What the hardware answers with a fault ends
// the process.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace emulated_tiles {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct Tiles {
  Config shape;
  int8_t data[8][16][64];
};

// On the heap, as a library that is loaded late has little memory for variables of a thread.
static thread_local Tiles* state = nullptr;

static inline void release() {
  free(state);
  state = nullptr;
}

static inline void load_config(const void* from) {
  release();
  state = static_cast<Tiles*>(calloc(1, sizeof(Tiles)));
  if (state == nullptr) abort();
  memcpy(&state->shape, from, sizeof(Config));
  if (state->shape.palette != 1 || state->shape.start_row != 0) abort();
  for (int i = 0; i < 16; i++) {
    const bool is_tile = i < 8 && state->shape.rows[i] <= 16 && state->shape.row_bytes[i] <= 64;
    const bool is_unused = state->shape.rows[i] == 0 && state->shape.row_bytes[i] == 0;
    if (!is_unused && !(is_tile && state->shape.rows[i] > 0 && state->shape.row_bytes[i] > 0)) abort();
  }
}

static inline void check(int tile) {
  if (state == nullptr || state->shape.rows[tile] == 0) abort();
}

static inline void zero(int tile) {
  check(tile);
  memset(state->data[tile], 0, sizeof(state->data[tile]));
}

static inline void load(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int row = 0; row < state->shape.rows[tile]; row++) {
    memcpy(state->data[tile][row], static_cast<const int8_t*>(from) + row * stride,
           state->shape.row_bytes[tile]);
  }
}

static inline void store(int tile, void* to, int64_t stride) {
  check(tile);
  for (int row = 0; row < state->shape.rows[tile]; row++) {
    memcpy(static_cast<int8_t*>(to) + row * stride, state->data[tile][row], state->shape.row_bytes[tile]);
  }
}

// Without sanitizers' checks, which would take most of a test's time and see only tiles here.
__attribute__((no_sanitize("address", "undefined"), optimize("O3"))) static void add_products(int sums, int a,
                                                                                              int b) {
  check(sums), check(a), check(b);
  const Config& shape = state->shape;
  if (shape.rows[sums] != shape.rows[a] || shape.row_bytes[sums] != shape.row_bytes[b] ||
      shape.row_bytes[a] != 4 * shape.rows[b]) {
    abort();
  }
  for (int row = 0; row < shape.rows[sums]; row++) {
    int32_t added[16];
    memcpy(added, state->data[sums][row], sizeof(added));
    for (int word = 0; word < shape.rows[b]; word++) {
      const int8_t *left = state->data[a][row] + 4 * word, *right = state->data[b][word];
      for (int column = 0; column < 16; column++) {  // beyond the tile's columns bytes are 0
        for (int i = 0; i < 4; i++) added[column] += left[i] * right[4 * column + i];
      }
    }
    memcpy(state->data[sums][row], added, sizeof(added));
  }
  for (int row = shape.rows[sums]; row < 16; row++) memset(state->data[sums][row], 0, 64);
}

}  // namespace emulated_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig(from) emulated_tiles::load_config(from)
#define _tile_release() emulated_tiles::release()
#define _tile_zero(tile) emulated_tiles::zero(tile)
#define _tile_loadd(tile, from, stride) emulated_tiles::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_tiles::store(tile, to, stride)
#define _tile_dpbssd(sums, a, b) emulated_tiles::add_products(sums, a, b)
