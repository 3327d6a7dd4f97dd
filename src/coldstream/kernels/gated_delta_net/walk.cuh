// A block of five warps advances a state over the tokens of a sequence, with 32 columns of a head's state in
// its registers. One warp copies the tokens' vectors from global memory into a ring in shared memory, four
// advance the state (they walk). A multiprocessor often has only this block, and each of its schedulers one
// walking warp, so that no other warp fills that warp's waits. So vectors are read early, the work of
// adjacent tokens overlaps, and the walking warps compute no addresses.
#pragma once

#include "gated_delta_net/delta_rule.cuh"
#include "gated_delta_net/layer.cuh"

namespace coldstream {

constexpr int stage_rows = 8;  // tokens that are copied together
constexpr int num_stages = 4;
constexpr int walk_threads = delta_threads + warp_size;

// One token in shared memory. The gates lie behind every chain of the query, where four floats are free.
template <int D>
struct Token {
  alignas(16) float q[vector_floats<D>];
  alignas(16) float k[vector_floats<D>];
  alignas(16) float v[block_columns];
};

// A ring of tokens, filled stage by stage.
template <int D>
struct Tokens {
  Token<D> ring[num_stages * stage_rows];

  __device__ const Token<D>& at(int t) const { return ring[t % (num_stages * stage_rows)]; }
};

// The addresses in the workspace of the block's vectors for token 0 of its sequence.
struct Sources {
  const float *q, *k, *v;
  const float2* gates;
  int64_t key_stride, value_stride, gate_stride;

  __device__ Sources behind(int64_t num_tokens) const {
    const int64_t keys = num_tokens * key_stride;
    return {
        q + keys,     k + keys,   v + num_tokens * value_stride, gates + num_tokens * gate_stride, key_stride,
        value_stride, gate_stride};
  }
};

// The share of a lane of the copying warp: the same piece of every token's query and key, a piece of the
// values of some tokens, and the gates of one token of a stage, which it writes behind one of the chains.
template <int D>
struct Copier {
  static constexpr int pieces = D / 4, column_pieces = block_columns / 4;
  static constexpr int values_at_once = warp_size / column_pieces;
  static_assert(pieces <= warp_size && stage_rows * num_chains == warp_size, "a lane has one of each");
  int vector_place, value_place, gate_place;  // in floats, in a token
  const float *vector, *value;
  const float2* gates;
  Sources from;

  __device__ Copier(const Sources& from) : from(from) {
    const int lane = threadIdx.x % warp_size, part = lane % pieces * 4;
    vector_place = part / chain_keys<D> * chain_floats<D> + part % chain_keys<D>;
    value_place = lane % column_pieces * 4;
    gate_place = lane % num_chains * chain_floats<D> + chain_keys<D>;
    vector = from.q + part;
    value = from.v + lane / column_pieces * from.value_stride + lane % column_pieces * 4;
    gates = from.gates + lane / num_chains * from.gate_stride;
  }

  // Starts copying the next `count` tokens of a stage.
  template <bool is_whole>
  __device__ __forceinline__ void copy(Token<D>* stage, int count) {
    const int lane = threadIdx.x % warp_size;
    const int64_t key_offset = from.k - from.q;
#pragma unroll
    for (int t = 0; t < stage_rows; t++, vector += from.key_stride) {
      if (lane >= pieces || !(is_whole || t < count)) continue;
      copy_async_16(stage[t].q + vector_place, vector);
      copy_async_16(stage[t].k + vector_place, vector + key_offset);
    }
#pragma unroll
    for (int i = 0; i < stage_rows; i += values_at_once, value += values_at_once * from.value_stride) {
      const int t = i + lane / column_pieces;
      if (is_whole || t < count) copy_async_16(stage[t].v + value_place, value);
    }
    const int t = lane / num_chains;
    if (is_whole || t < count) copy_async_8(stage[t].q + gate_place, gates);
    gates += stage_rows * from.gate_stride;
  }
};

// Starts copying stage `stage` of a sequence of `count` tokens; stages come in order. Closes the group of
// copies.
template <int D>
__device__ __forceinline__ void copy_stage(Copier<D>& copier, Tokens<D>& tokens, int stage, int count) {
  Token<D>* to = tokens.ring + stage % num_stages * stage_rows;
  const int left = count - stage * stage_rows;
  if (left >= stage_rows) {
    copier.template copy<true>(to, stage_rows);
  } else if (left > 0) {
    copier.template copy<false>(to, left);
  }
  commit_copies();
}

// The number comes from a shuffle, so that the compiler knows it to be the same in the whole warp and keeps
// the warp converged behind a conditional branch on it.
__device__ __forceinline__ int own_warp() { return __shfl_sync(all_lanes, threadIdx.x / warp_size, 0); }

// Returns x in an ordinary register: the compiler neither computes it again nor keeps it in a uniform
// register, which takes longer to read.
__device__ __forceinline__ uint32_t fixed(uint32_t x) {
  return __shfl_sync(all_lanes, x, threadIdx.x % warp_size);
}

// Converges the copying warp first, as some of its lanes may have had nothing to copy.
__device__ __forceinline__ void meet_all_warps() { meet_apart_at<walk_threads>(1); }

// The copying warp's part. It and the walking warps meet at a barrier before every stage. By then that stage
// and the next one, whose first tokens the last tokens of this stage read, have arrived, and the previous
// stage is free.
template <int D>
__device__ __forceinline__ void feed_tokens(Tokens<D>& tokens, const Sources& from, int count) {
  Copier<D> copier(from);
#pragma unroll 1
  for (int stage = 0; stage < num_stages - 1; stage++) copy_stage<D>(copier, tokens, stage, count);
  int stage = 0;
  do {
    wait_for_copies<num_stages - 3>();
    meet_all_warps();
    copy_stage<D>(copier, tokens, stage + num_stages - 1, count);
    stage++;
  } while (stage * stage_rows < count - 1);
  wait_for_copies<0>();
}

// Addresses of one token in shared memory: the thread's chain of its query, and the thread's column of its
// value.
template <int D>
struct TokenAddresses {
  uint32_t chain;
  int to_value;

  __device__ TokenAddresses behind(int num_tokens) const {
    return {chain + num_tokens * uint32_t(sizeof(Token<D>)), to_value};
  }
  __device__ uint32_t query() const { return chain; }
  __device__ uint32_t gates() const { return chain + 4 * chain_keys<D>; }
  __device__ uint32_t key() const { return chain + 4 * vector_floats<D>; }
  __device__ uint32_t value() const { return chain + to_value; }
};

// Two tokens behind one with an even number.
template <int D>
__device__ __forceinline__ TokenAddresses<D> second_behind(const TokenAddresses<D>& token,
                                                           uint32_t end_of_ring) {
  TokenAddresses<D> found = token.behind(2);
  if (found.chain == end_of_ring) found.chain -= sizeof(Tokens<D>);
  return found;
}

template <int D, int begin = 0, int end = chain_keys<D>>
__device__ __forceinline__ void load_chain(uint32_t from, float (&k)[chain_keys<D>]) {
#pragma unroll
  for (int m = begin; m < end; m += 4) {
    load_shared_4(from + 4 * m, k[m], k[m + 1], k[m + 2], k[m + 3]);
  }
}

// Entries of a key that are read two tokens ahead, so that the chain of the prediction can start at once.
constexpr int keys_ahead = 8;

// Entries of an output that are computed with the next token, whose work fills the gaps of their chain.
template <int D>
constexpr int late_entries = chain_keys<D> / 4;

// The state of a walk between two tokens.
template <int D>
struct Walk {
  float state[chain_keys<D>];    // decayed for the token
  float change;                  // strength · (value − prediction) of the token
  float decay, strength, value;  // of the token after it
  float last_output;             // chain of the token before it, up to the late entries
  float late_state[late_entries<D>], late_q[late_entries<D>];
};

// Completes the output of the previous token.
template <int D>
__device__ __forceinline__ float finish_output(const Walk<D>& walk) {
  float output = walk.last_output;
#pragma unroll
  for (int m = 0; m < late_entries<D>; m++) output = __fmaf_rn(walk.late_q[m], walk.late_state[m], output);
  return sum_of_chains(output);
}

template <int D>
__device__ __forceinline__ void load_gates(const TokenAddresses<D>& token, Walk<D>& walk) {
  load_shared_2(token.gates(), walk.decay, walk.strength);
  load_shared_1(token.value(), walk.value);
}

// The state before token 0, whose key is k; reads what the first step expects in registers.
template <int D>
__device__ __forceinline__ void enter(Walk<D>& walk, const TokenAddresses<D>& token,
                                      const TokenAddresses<D>& next, float (&k)[chain_keys<D>],
                                      float (&next_k)[chain_keys<D>]) {
  load_chain<D>(token.key(), k);
  load_gates<D>(token, walk);
  float prediction = 0.0f;
#pragma unroll
  for (int m = 0; m < chain_keys<D>; m++) {
    walk.state[m] = walk.state[m] * walk.decay;
    prediction = __fmaf_rn(k[m], walk.state[m], prediction);
  }
  walk.change = walk.strength * (walk.value - sum_of_chains(prediction));
  load_chain<D, 0, keys_ahead>(next.key(), next_k);
  load_gates<D>(next, walk);
  walk.last_output = 0.0f;
#pragma unroll
  for (int m = 0; m < late_entries<D>; m++) walk.late_q[m] = walk.late_state[m] = 0.0f;
}

// Applies the token whose key is k, predicts the next token's value, and completes the output of the previous
// one, which goes to `out` if `stores`. Reads the rest of the next key, and the first entries of the one
// after it in place of k. Values read past the end of the sequence are not used. The loads stand in the step
// that uses them, where the compiler issues them first; loads for a later step would be issued last, and the
// next token would wait for them.
template <int D>
__device__ __forceinline__ void advance(Walk<D>& walk, float (&k)[chain_keys<D>],
                                        float (&next_k)[chain_keys<D>], const TokenAddresses<D>& token,
                                        const TokenAddresses<D>& next, const TokenAddresses<D>& after,
                                        bool stores, float* out) {
  constexpr int first_late = chain_keys<D> - late_entries<D>;
  float q[chain_keys<D>], updated[chain_keys<D>], prediction = 0.0f, output = 0.0f;
  load_chain<D, keys_ahead>(next.key(), next_k);
  load_chain<D>(token.query(), q);
  const float last_output = finish_output<D>(walk);
  if (stores) *out = last_output;
#pragma unroll
  for (int m = 0; m < chain_keys<D>; m++) {
    updated[m] = __fmaf_rn(k[m], walk.change, walk.state[m]);
    walk.state[m] = updated[m] * walk.decay;
    prediction = __fmaf_rn(next_k[m], walk.state[m], prediction);
  }
  load_chain<D, 0, keys_ahead>(after.key(), k);
  const float strength = walk.strength, value = walk.value;
  load_gates<D>(after, walk);
  walk.change = strength * (value - sum_of_chains(prediction));
#pragma unroll
  for (int m = 0; m < first_late; m++) output = __fmaf_rn(q[m], updated[m], output);
  walk.last_output = output;
#pragma unroll
  for (int m = 0; m < late_entries<D>; m++) {
    walk.late_q[m] = q[first_late + m];
    walk.late_state[m] = updated[first_late + m];
  }
}

// Walks over all tokens of a sequence. `out` is the thread's column of token 0's output, `token` its
// addresses for token 0.
template <int D>
__device__ __forceinline__ void walk_tokens(Walk<D>& walk, const Tokens<D>& tokens, TokenAddresses<D> token,
                                            int count, float* out, int out_stride) {
  float even_k[chain_keys<D>], odd_k[chain_keys<D>];
  const uint32_t end_of_ring = token.chain + sizeof(Tokens<D>);
  const bool has_first_chain = own_chain() == 0;
  bool stores = false;  // no output precedes token 0
  out -= out_stride;
  meet_all_warps();
  enter<D>(walk, token, token.behind(1), even_k, odd_k);
  for (int left = count - 1; left > 0; left -= stage_rows) {
    if (left < count - 1) meet_all_warps();
    int i = min(stage_rows, left);
    for (; i >= 2; i -= 2) {
      const TokenAddresses<D> next = token.behind(1), after = second_behind<D>(token, end_of_ring);
      advance<D>(walk, even_k, odd_k, token, next, after, stores, out);
      stores = has_first_chain;
      advance<D>(walk, odd_k, even_k, next, after, after.behind(1), stores, out + out_stride);
      out += 2 * int64_t(out_stride);
      token = after;
    }
    if (i == 0) continue;
    const TokenAddresses<D> after = second_behind<D>(token, end_of_ring);
    advance<D>(walk, even_k, odd_k, token, token.behind(1), after, stores, out);
    stores = has_first_chain;
    out += out_stride;
  }
  const float before_last = finish_output<D>(walk);
  if (stores) *out = before_last;
  const Token<D>& last = tokens.at(count - 1);
  const float output = sum_of_chains(update<D>(walk.state, last.k, last.q, walk.change));
  if (has_first_chain) out[out_stride] = output;
}

}  // namespace coldstream
