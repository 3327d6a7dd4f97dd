// The n-gram embedding: rows of a table by hashes of the last tokens, asked of the host, the gate, the
// dilated convolution, and the commit of a draft tree. See reference.py for their meaning and cuda.py for the
// launchers; take_rows.cu has what takes the rows.
#include "cuda/answer.cuh"
#include "cuda/quantize.cuh"
#include "cuda/vectors.cuh"
#include "rms_norm/norm_row.cuh"

using namespace coldstream;

constexpr int ids_threads = 1024, gate_threads = 128, conv_columns = 128;
constexpr int most_tokens = 4, most_heads = 192, max_taps = 16, most_history = 16, tile_rows = 16;

// Of a step. `parents`: of every row that which it follows, −1 for what its sequence has committed.
struct NgramRows {
  const int32_t* token_ids;
  const int32_t* state_ids;  // −1 for a row of no sequence
  const int32_t* parents;
  const int32_t* kept;  // the row in what is kept of trees, −1 for a row of a chain; null: there are none
  int num_rows;

  __device__ bool is_of_tree(int row) const { return kept && kept[row] >= 0; }
  __device__ bool advances(int row) const { return !is_of_tree(row) && state_ids[row] >= 0; }

  // Whether the state after a row of a chain is left in the slot of its state.
  __device__ bool is_last_of_state(int row) const {
    const int next = row + 1;
    return next == num_rows || parents[next] != row || state_ids[next] != state_ids[row];
  }

  // The row `back` rows before one; from −1 downwards what came before the batch, the last first.
  __device__ int before(int row, int back) const {
    for (; back > 0; back--) {
      const int parent = parents[row];
      if (parent < 0) return -back;
      row = parent;
    }
    return row;
  }
};

struct NgramHashing {
  uint64_t multipliers[most_tokens];
  uint32_t sizes[most_heads], offsets[most_heads];
  int num_heads, heads_per_order, context;  // context: tokens before the current one
  int end_token;
};

struct NgramTokens {
  int32_t* state;  // [states, context], the last ids plus 1
  int32_t* kept;   // [kept rows] of trees, or null
};

// In host memory; mailbox.py has the protocol.
struct NgramRequest {
  uint32_t *request, *done;
  int32_t* ids;  // [rows, heads]
};

// One more than the id of the token `back` before a row, 0 for none.
__device__ __forceinline__ int32_t token_before(const NgramRows& rows, const NgramTokens& tokens, int context,
                                                int row, int back) {
  const int found = rows.before(row, back);
  if (found >= 0) return rows.token_ids[found] + 1;
  if (found < -context) return 0;
  return tokens.state[int64_t(rows.state_ids[row]) * context + context + found];
}

// The row of the table for a head of a row of the step; −1 for a row of no sequence.
__device__ __forceinline__ int32_t hashed(const NgramRows& rows, const NgramHashing& hash,
                                          const NgramTokens& tokens, int row, int head) {
  if (rows.state_ids[row] < 0) return -1;
  uint64_t mixed = uint64_t(rows.token_ids[row]) * hash.multipliers[0];
  bool has_ended = false;
  for (int back = 1; back <= 1 + head / hash.heads_per_order; back++) {
    const int32_t found = has_ended ? 0 : token_before(rows, tokens, hash.context, row, back);
    has_ended = found == 0 || found - 1 == hash.end_token;
    mixed ^= uint64_t(has_ended ? hash.end_token : found - 1) * hash.multipliers[back];
  }
  return int32_t(mixed % hash.sizes[head] + hash.offsets[head]);
}

// Asks the host for the rows of the table. One block, as all rows are hashed before a state moves on.
__global__ void __launch_bounds__(ids_threads)
    ngram_ids(const __grid_constant__ NgramRows rows, const __grid_constant__ NgramHashing hash,
              const __grid_constant__ NgramTokens tokens, const __grid_constant__ NgramRequest box) {
  wait_for_previous_grid();
  for (int i = threadIdx.x; i < rows.num_rows * hash.num_heads; i += blockDim.x)
    box.ids[i] = hashed(rows, hash, tokens, i / hash.num_heads, i % hash.num_heads);
  __syncthreads();
  for (int row = threadIdx.x; row < rows.num_rows; row += blockDim.x) {
    if (rows.is_of_tree(row)) tokens.kept[rows.kept[row]] = rows.token_ids[row] + 1;
    if (!rows.advances(row) || !rows.is_last_of_state(row)) continue;
    int32_t last[most_tokens];
    for (int i = 0; i < hash.context; i++)
      last[i] = token_before(rows, tokens, hash.context, row, hash.context - 1 - i);
    for (int i = 0; i < hash.context; i++)
      tokens.state[int64_t(rows.state_ids[row]) * hash.context + i] = last[i];
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_relaxed_system(box.done, 0);
    store_release_system(box.request, uint32_t(rows.num_rows));
  }
}

__device__ __forceinline__ float4 times(float a, float4 b) { return {a * b.x, a * b.y, a * b.z, a * b.w}; }

// A warp for each stream of a row; keys, queries and results are [rows, streams · size], values [rows, size].
// grid (rows · streams / warps).
__global__ void __launch_bounds__(gate_threads)
    ngram_gate_rows(const float* key, const float* query, const float* value, float* out, int num_parts,
                    int num_streams, int size) {
  wait_for_previous_grid();
  release_next_grid();
  const int64_t part = int64_t(blockIdx.x) * (blockDim.x / warp_size) + threadIdx.x / warp_size;
  if (part >= num_parts) return;
  const float *k = key + part * size, *x = query + part * size, *v = value + part / num_streams * size;
  float p = 0.0f;
#pragma unroll 32
  for (int i = threadIdx.x % 16; i < size; i += 16) p = __fmaf_rn(k[i], x[i], p);
  const float gate = sum_of_sixteen_lanes(p, 1) / sqrtf(float(size));
  const float distance = sqrtf(fmaxf(fabsf(gate), 1e-6f));
  const float opened = exact_sigmoid(gate > 0.0f ? distance : gate < 0.0f ? -distance : 0.0f);
  for (int i = 4 * (threadIdx.x % warp_size); i < size; i += 4 * warp_size)
    store_four<true>(out + part * size, i, size, times(opened, load_four<true>(v, i, size)));
}

struct NgramConv {
  const float *streams, *gated, *normed;  // [rows, width]
  const float* taps;                      // [width, num_taps], the current row's last
  float* state;                           // [states, history, width], the last normed rows
  float* kept;                            // [kept rows, width], or null
  float* out;                             // [rows, width]
  int width, num_taps, dilation;

  __device__ int history() const { return (num_taps - 1) * dilation; }

  // A column of what came before a row: a row of the batch, or from −1 downwards of its state.
  __device__ float input(const NgramRows& rows, int row, int found, int column) const {
    if (found >= 0) return normed[int64_t(found) * width + column];
    return state[(int64_t(rows.state_ids[row]) * history() + history() + found) * width + column];
  }

  // Leaves a column of the state after a row in the slot of its state.
  __device__ void advance(const NgramRows& rows, int row, int column) const {
    int in_batch = 0;  // rows of the chain before it
    for (int at = rows.parents[row]; at >= 0 && in_batch < history() - 1; at = rows.parents[at]) in_batch++;
    float* to = state + int64_t(rows.state_ids[row]) * history() * width + column;
    // Ascending, so that what moves up within the state is read before it is overwritten.
    for (int i = 0; i < history(); i++) {
      const int back = history() - 1 - i;
      to[int64_t(i) * width] = input(rows, row, back <= in_batch ? row - back : in_batch - back, column);
    }
  }
};

// The rows whose state is to be kept, of a tile of rows.
__device__ __forceinline__ void advance_tile(const NgramConv& conv, const NgramRows& rows, int first,
                                             int column) {
  for (int row = first; row < min(first + tile_rows, rows.num_rows); row++) {
    if (rows.advances(row) && rows.is_last_of_state(row)) conv.advance(rows, row, column);
  }
}

// A thread for a column of a tile of rows. advances: whether these are all rows, so that states move on
// behind them; else another launch does it. grid (width / columns, rows / tile).
__global__ void __launch_bounds__(conv_columns)
    ngram_conv_rows(const __grid_constant__ NgramConv conv, const __grid_constant__ NgramRows rows,
                    int advances) {
  __shared__ int found[tile_rows][max_taps];
  wait_for_previous_grid();
  release_next_grid();
  const int first = blockIdx.y * tile_rows, column = blockIdx.x * conv_columns + threadIdx.x;
  for (int i = threadIdx.x; i < tile_rows * conv.num_taps; i += blockDim.x) {
    const int row = first + i / conv.num_taps, tap = i % conv.num_taps;
    if (row < rows.num_rows)
      found[i / conv.num_taps][tap] = rows.before(row, (conv.num_taps - 1 - tap) * conv.dilation);
  }
  __syncthreads();
  if (column >= conv.width) return;
  for (int row = first; row < min(first + tile_rows, rows.num_rows); row++) {
    const int64_t at = int64_t(row) * conv.width + column;
    if (rows.state_ids[row] < 0) {  // whose results are not used
      conv.out[at] = conv.streams[at];
      continue;
    }
    float sum = 0.0f;
    for (int tap = 0; tap < conv.num_taps; tap++) {
      const float x = conv.input(rows, row, found[row - first][tap], column);
      sum = __fmaf_rn(conv.taps[int64_t(column) * conv.num_taps + tap], x, sum);
    }
    conv.out[at] = conv.streams[at] + (conv.gated[at] + exact_silu(sum));
    if (rows.is_of_tree(row)) conv.kept[int64_t(rows.kept[row]) * conv.width + column] = conv.normed[at];
  }
  if (advances) advance_tile(conv, rows, first, column);
}

// The states behind rows that ngram_conv_rows has computed. grid as there.
__global__ void __launch_bounds__(conv_columns)
    ngram_advance(const __grid_constant__ NgramConv conv, const __grid_constant__ NgramRows rows) {
  wait_for_previous_grid();
  release_next_grid();
  const int column = blockIdx.x * conv_columns + threadIdx.x;
  if (column < conv.width) advance_tile(conv, rows, blockIdx.y * tile_rows, column);
}

struct NgramPath {
  const int32_t *state_id, *count;  // of one number
  const int32_t* kept;              // [count]
  const int32_t* kept_tokens;
  const float* kept_rows;
  int32_t* tokens;  // [states, context]
  float* conv;      // [states, history, width]
  int context, history, width;
};

// The last `length` of a state's values and the path's, `width` apart.
template <typename T>
__device__ __forceinline__ void move_up(T* state, const T* kept, const NgramPath& path, int length,
                                        int64_t width) {
  const int count = *path.count;
  for (int i = 0; i < length; i++) {
    const int from = count - length + i;
    state[i * width] = from >= 0 ? kept[path.kept[from] * width] : state[(length + from) * width];
  }
}

// Advances states by a path of a draft tree: a thread for a column of rows, and one more for the tokens.
__global__ void __launch_bounds__(conv_columns) ngram_commit(const __grid_constant__ NgramPath path) {
  wait_for_previous_grid();
  release_next_grid();
  const int64_t state_id = *path.state_id;
  const int column = blockIdx.x * conv_columns + threadIdx.x;
  if (*path.count == 0 || state_id < 0 || column > path.width) return;
  if (column == path.width) {
    move_up(path.tokens + state_id * path.context, path.kept_tokens, path, path.context, 1);
    return;
  }
  float* state = path.conv + state_id * path.history * path.width + column;
  move_up(state, path.kept_rows + column, path, path.history, path.width);
}
