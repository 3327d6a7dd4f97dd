// Rows of a step whose tokens an earlier launch has chosen: their token ids, or that there is no such row.
#include "cuda/common.cuh"
#include "sample/rows.cuh"

using namespace coldstream;

// The inputs of a step: `columns` arrays of `stride` numbers, token ids in front.
struct StepRows {
  int* values;
  int stride;
  int columns;
};

struct Admission {
  int row;                  // of the step
  int chosen;               // its token
  int first_end, num_ends;  // tokens after which the row is of no sequence, among those of all rows
};

// A block for each admission. A row of no sequence has token 0 and −1 in all other columns, as padding has.
__global__ void __launch_bounds__(warp_size)
    admit_rows(StepRows rows, const SampledToken* chosen, const Admission* admissions, const int* ends) {
  const Admission own = admissions[blockIdx.x];
  const SampledToken found = chosen[own.chosen];
  bool is_end = found.fault != 0;
  for (int i = threadIdx.x; i < own.num_ends; i += warp_size) {
    is_end |= ends[own.first_end + i] == found.token;
  }
  const bool is_left_out = __any_sync(all_lanes, is_end);
  if (threadIdx.x == 0) rows.values[own.row] = is_left_out ? 0 : found.token;
  if (!is_left_out) return;
  for (int column = 1 + threadIdx.x; column < rows.columns; column += warp_size) {
    rows.values[int64_t(column) * rows.stride + own.row] = -1;
  }
}
