// What a device decides within a fused step; reference.py defines it, cuda.py has the launchers.
//
// Each kernel is one warp, whose lanes share out the rows.
#include "cuda/common.cuh"
#include "sample/rows.cuh"

using namespace coldstream;

constexpr int num_columns = 7;  // of a row: token, position, state, segment, index, parent, kept

struct FusedState {
  int length;        // positions of the model's sequence
  int block_length;  // rows of the block's sequence
  int left;          // tokens that may still be chosen; 0: the text has ended
  int root;          // the token that was chosen last, whose row is not computed yet
  int last_row;      // the row that was kept last, whose output the next draft follows
  int state_id, block_state_id;
  int num_ends;  // tokens that end the text
};

struct FusedStep {
  FusedState* state;
  int* model_rows;             // [num_columns, num_rows]
  int* block_rows;             // [num_columns, num_rows]
  int* link_row;               // [num_columns]
  const int* kept;             // [num_rows]
  int* count;                  // of the kept rows
  int* first;                  // positions before them
  RowSettings* settings;       // [num_rows]
  const SampledToken* chosen;  // [num_rows]
  const int* ends;
  const int* candidate;  // the likeliest token after the block's last row
  int* result;           // count and fault, then a token for each of the kept rows
  int num_rows;          // of the model's step: the root and the draft
};

// One row of `rows`; without `is_used` it belongs to no sequence.
__device__ __forceinline__ void write_row(int* rows, int stride, int row, bool is_used,
                                          const int (&values)[num_columns]) {
  for (int column = 0; column < num_columns; column++) {
    rows[column * stride + row] = is_used ? values[column] : column ? -1 : 0;
  }
}

// Token number `depth` of the draft; and the block's row after it, unless the step has no row for a next one.
__global__ void __launch_bounds__(warp_size) extend_draft(FusedStep step, int depth) {
  if (threadIdx.x != 0) return;
  const FusedState& state = *step.state;
  const int token = *step.candidate;
  const int at = state.block_length + depth;
  step.model_rows[1 + depth] = token;
  const bool has_next = depth + 2 < min(step.num_rows, state.left);
  write_row(step.link_row, 1, 0, has_next, {token, at, state.block_state_id, 0, at, -1, -1});
}

// The rows of the model's step, whose drafted tokens are there, and the positions of the tokens after them.
__global__ void __launch_bounds__(warp_size) write_model_rows(FusedStep step) {
  const FusedState& state = *step.state;
  for (int row = threadIdx.x; row < step.num_rows; row += warp_size) {
    const int token = row == 0 ? state.root : step.model_rows[row];
    const int at = state.length + row;
    write_row(step.model_rows, step.num_rows, row, row < state.left,
              {token, at, state.state_id, 0, at, row - 1, step.kept[row]});
    step.settings[row].position = at + 1;
  }
}

// What is kept of the step, and the block's rows of it.
__global__ void __launch_bounds__(warp_size) accept_rows(FusedStep step) {
  const FusedState state = *step.state;
  const int most = min(step.num_rows, state.left);
  int count = 0, left = state.left, fault = 0;
  for (int row = 0; row < most; row++) {
    const SampledToken found = step.chosen[row];
    fault = found.fault;
    if (fault != 0) {
      left = 0;
      break;
    }
    count++;
    bool is_end = false;
    for (int i = threadIdx.x; i < state.num_ends; i += warp_size) is_end |= step.ends[i] == found.token;
    left = __any_sync(all_lanes, is_end) ? 0 : left - 1;
    if (left == 0 || row + 1 == step.num_rows || step.model_rows[row + 1] != found.token) break;
  }
  for (int row = threadIdx.x; row < step.num_rows; row += warp_size) {
    const int token = step.chosen[row].token, at = state.block_length + row;
    write_row(step.block_rows, step.num_rows, row, row < count,
              {token, at, state.block_state_id, 0, at, row - 1, -1});
    step.result[2 + row] = row < count ? token : -1;
  }
  __syncthreads();  // all lanes have read the state
  if (threadIdx.x != 0) return;
  *step.count = count;
  *step.first = state.length;
  step.result[0] = count;
  step.result[1] = fault;
  step.state->length = state.length + count;
  step.state->block_length = state.block_length + count;
  step.state->left = left;
  if (count > 0) step.state->root = step.chosen[count - 1].token;
  step.state->last_row = max(count - 1, 0);
}
