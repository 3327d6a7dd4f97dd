// Copies a weight matrix to a warp or a block: by units of rows and passes of columns, through a ring of
// stages in shared memory.
#pragma once

#include "cuda/weight_types.cuh"

namespace coldstream {

// A weight matrix and how it is walked, as skinny_shapes.py lays it out.
struct MatrixShape {
  int type;
  int num_rows;
  int num_cols;
  int row_bytes;
  int pass_bytes;  // of a row in one pass
  int num_passes;
  int unit_rows;
  int stage_stride;  // bytes from row to row in the ring
  int spread;        // log2 of the quads of a unit

  // Whether a unit is copied as it lies in the matrix, otherwise row by row.
  __device__ __forceinline__ bool is_copied_at_once() const {
    return num_passes == 1 && stage_stride == row_bytes;
  }
};

// A pass of a unit in shared memory.
struct Staged {
  const uint8_t* memory;
  uint32_t address;  // low bits of the source address of row 0
  int stage_stride;
  int row_bytes;  // 0 if all rows were copied as one

  // `is_aligned`: every row begins on 16 bytes.
  template <bool is_aligned>
  __device__ __forceinline__ const uint8_t* row(int r) const {
    return memory + r * stage_stride + (is_aligned ? 0 : (address + r * row_bytes) & 15);
  }
};

// Starts the copies of one pass of a unit. Chunks of 16 aligned bytes are copied that hold a byte of the
// rows. Lanes go through the same instructions, of which the last ones copy where there are such chunks.
__device__ __forceinline__ void stage(uint8_t* memory, const MatrixShape& shape, const uint8_t* data,
                                      int unit, int pass) {
  constexpr int step = warp_size * 16, at_a_time = 4;
  const int first_row = unit * shape.unit_rows, rows = min(shape.unit_rows, shape.num_rows - first_row);
  const bool at_once = shape.is_copied_at_once();
  const int skipped = pass * shape.pass_bytes;
  const int bytes = at_once ? rows * shape.row_bytes : min(shape.pass_bytes, shape.row_bytes - skipped);
  const int first = threadIdx.x % warp_size * 16;
  const uint8_t* from = data + int64_t(first_row) * shape.row_bytes + skipped;
  uint8_t* to = memory + first;
#pragma unroll 1
  for (int r = 0; r < (at_once ? 1 : rows); r++) {
    const int before = reinterpret_cast<uint64_t>(from) & 15;
    const uint8_t* chunk = from - before + first;
    uint8_t* place = to;
    int left = bytes + before;
#pragma unroll 1
    for (; left >= at_a_time * step; left -= at_a_time * step) {
#pragma unroll
      for (int k = 0; k < at_a_time; k++) copy_async_16(place + k * step, chunk + k * step);
      chunk += at_a_time * step, place += at_a_time * step;
    }
#pragma unroll
    for (int k = 0; k < at_a_time; k++)
      copy_if_below(left, first + k * step, shared_address(place) + k * step, chunk + k * step);
    from += shape.row_bytes;
    to += shape.stage_stride;
  }
}

// A matrix, and which of its units are the warp's (or the block's).
struct Work {
  MatrixShape shape;
  const uint8_t* data;
  int num_units;
  int first_unit;
  int unit_stride;
};

// The ring of a warp: `stages` of `stage_bytes` each.
struct Ring {
  uint8_t* memory;
  int stage_bytes;
  int stages;

  __device__ __forceinline__ uint8_t* stage_at(int index) const { return memory + index * stage_bytes; }
  __device__ __forceinline__ int after(int index) const { return index + 1 == stages ? 0 : index + 1; }
  __device__ __forceinline__ void wait() const {
    if (stages == 1) wait_for_copies<0>();
    if (stages == 2) wait_for_copies<1>();
    if (stages == 3) wait_for_copies<2>();
    if (stages >= 4) wait_for_copies<3>();
    __syncwarp();
  }
  // For the thread's copies that began before those of a ring that has just been filled.
  __device__ __forceinline__ void wait_for_earlier_copies() const {
    if (stages == 1) wait_for_copies<1>();
    if (stages >= 2) wait_for_copies<2>();
  }
};

struct Cursor {
  int unit, pass;

  __device__ __forceinline__ void advance(const Work& work) {
    if (++pass < work.shape.num_passes) return;
    pass = 0;
    unit += work.unit_stride;
  }
  __device__ __forceinline__ void start_copies(const Work& work, uint8_t* memory) const {
    if (unit < work.num_units) stage(memory, work.shape, work.data, unit, pass);
    commit_copies();
  }
};

// Fills the ring; may run before the previous grid has ended. Returns the cursor for `multiply`.
__device__ __forceinline__ Cursor fill_ring(const Work& work, const Ring& ring) {
  Cursor ahead = {work.first_unit, 0};
  for (int i = 0; i < ring.stages; i++) {
    ahead.start_copies(work, ring.stage_at(i));
    ahead.advance(work);
  }
  return ahead;
}

}  // namespace coldstream
