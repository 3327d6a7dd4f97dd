// The n-gram embedding of one layer: ids of rows of its table, these rows, the gate, the convolution.
// kernels/ngram/reference.py has their meaning.
#pragma once

#include <vector>

#include "ops/float_ops.h"
#include "ops/ngram_table.h"
#include "quant/kernels.h"

namespace coldstream {

// How the last tokens become rows of the table: one of each head, of `heads_per_order` for each length.
struct NgramHash {
  std::vector<uint64_t> multipliers;     // [longest n-gram], of a token, the one before it, …
  std::vector<uint64_t> sizes, offsets;  // [heads]
  int32_t end_token;                     // what comes before it, and before a text, counts as it
  int64_t heads_per_order;
};

struct NgramIdsArguments {
  int64_t capacity;          // rows
  const int32_t* token_ids;  // [T]
  RowLayout layout;
  // [states, context], contiguous: one more than the ids of the last tokens, the oldest first; 0: none
  int32_t* state;
  int64_t num_states;
  int32_t* kept;  // [kept rows]: of rows of draft trees, one more than their ids
  int64_t num_kept;
  NgramHash hash;
  std::shared_ptr<NgramTable> table;  // asked to read the rows soon
  int32_t* out;                       // [T, heads], contiguous
};
std::unique_ptr<Op> make_ngram_ids(NgramIdsArguments arguments);
// A row of the table as floats, out [T, heads · columns]; zeros for row −1.
std::unique_ptr<Op> make_ngram_rows(const QuantKernels& kernels, std::shared_ptr<NgramTable> table,
                                    const int32_t* ids, int64_t num_heads, OutputRows out);
// The bytes of a row of the table, zeros for row −1. False for one that does not exist.
bool read_ngram_bytes(NgramTable& table, int32_t id, uint8_t* out);
// The same of all rows, out [T, heads · row_bytes], which nobody has asked for before. Null: they are only
// brought into memory, and those that do not exist are left out.
std::unique_ptr<Op> make_ngram_bytes(std::shared_ptr<NgramTable> table, const int32_t* ids, int64_t num_heads,
                                     uint8_t* out);
// key, query and out [T, C · size], value [T, size]
std::unique_ptr<Op> make_ngram_gate(const FloatKernels& kernels, InputRows key, InputRows query,
                                    InputRows value, OutputRows out, int64_t num_streams, int64_t size);

struct NgramConvArguments {
  int64_t capacity;  // rows
  InputRows streams, gated, normed;
  std::vector<float> taps;  // [num_taps, width]: one row a tap, the current token's last
  int64_t num_taps, dilation, width;
  float* state;  // [states, history, width], contiguous: the last normed rows
  int64_t num_states;
  RowLayout layout;
  float* kept;  // [kept rows, width]: normed rows of draft trees
  int64_t num_kept;
  OutputRows out;

  int64_t history() const { return (num_taps - 1) * dilation; }
};
std::unique_ptr<Op> make_ngram_conv(const FloatKernels& kernels, NgramConvArguments arguments);

// Advances the states at *state_id by the rows `sources` of what is kept, as a chain of them would.
struct CommitNgramArguments {
  int32_t* ids;  // [states, context]
  float* conv;   // [states, history, width]
  int64_t num_states, context, history, width;
  const int32_t* kept_ids;  // [kept rows]
  const float* kept;        // [kept rows, width]
  int64_t num_kept;
  const int32_t *state_id, *sources;
};
std::unique_ptr<Op> make_commit_ngram(const CommitNgramArguments& arguments);

}  // namespace coldstream
