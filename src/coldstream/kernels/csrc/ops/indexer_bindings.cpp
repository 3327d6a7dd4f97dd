#include <nanobind/stl/optional.h>

#include "ops/binding_checks.h"
#include "ops/indexer.h"

namespace coldstream {

namespace {

using namespace nb::literals;

using IndexCache = nb::ndarray<nb::ndim<4>, nb::device::cpu>;

void choose_blocks(Runtime& rt, const Array2d& query, const Array2d& key, const Array3d& angles,
                   const Array3d& block_angles, const nb::object& heads, const IndexCache& cache,
                   const Ids1d& positions, const Ids1d& state_ids, const Ids2d& out, const BatchRows* batch) {
  const int64_t rows = size_of(key, 0), size = size_of(key, 1), num_pairs = size_of(angles, 1);
  const int64_t num_heads = size > 0 ? size_of(query, 1) / size : 0, num_words = size_of(out, 1);
  const auto block_size = field<int64_t>(heads, "block_size"), top_k = field<int64_t>(heads, "top_k");
  check_block_size(block_size);
  if (num_heads < 1 || top_k < block_size) refuse("an indexer without heads or blocks chooses nothing");
  if (2 * num_pairs > size) refuse("angles rotate more dimensions than a head has");
  const nb::dlpack::dtype half = {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
  if (cache.dtype() != half && cache.dtype() != nb::dtype<float>()) {
    refuse("the cache of an indexer must be float16 or float32");
  }
  if (batch != nullptr && size_of(cache, 1) != attention_chunk) {
    refuse("a batch needs caches in blocks of " + std::to_string(attention_chunk) + " positions");
  }
  check_contiguous(cache, "cache", {size_of(cache, 0), size_of(cache, 1), 1, size});
  check_contiguous(angles, "angles", {rows, num_pairs, 2});
  check_contiguous(block_angles, "block_angles", {rows, num_pairs, 2});
  check_contiguous(out, "out", {rows, num_words});
  const auto q_norm = field<Array1d>(heads, "q_norm"), k_norm = field<Array1d>(heads, "k_norm");
  const IndexerArguments arguments = {
      .capacity = rows,
      .num_heads = num_heads,
      .head_size = size,
      .num_rope_pairs = num_pairs,
      .query = input(query, "query", rows, num_heads * size),
      .key = input(key, "key", rows, size),
      .angles = {angles.data(), 2 * num_pairs},
      .block_angles = {block_angles.data(), 2 * num_pairs},
      .q_norm = vector(q_norm, "q_norm", size),
      .k_norm = vector(k_norm, "k_norm", size),
      .eps = field<float>(heads, "eps", true),
      .num_blocks = top_k / block_size,
      .block_size = block_size,
      .cache = cache.data(),
      .type = cache.dtype() == half ? CacheType::f16 : CacheType::f32,
      .places = {layout_of(ids(positions, "positions", rows), ids(state_ids, "state_ids", rows), batch, rows),
                 size_of(cache, 0), size_of(cache, 1)},
      .words = out.data(),
      .num_words = num_words,
  };
  if (num_words * 32 * block_size < arguments.places.max_positions()) {
    refuse(std::to_string(num_words) + " words are too few for the blocks of " +
           std::to_string(arguments.places.max_positions()) + " positions");
  }
  submit_with(rt, make_choose_blocks(kernels_of(rt), arguments), rows, query, key, angles, block_angles,
              q_norm, k_norm, cache, positions, state_ids, out);
}

}  // namespace

void bind_indexer(nb::module_& m) {
  m.def(
      "choose_blocks", choose_blocks, "runtime"_a, nb::arg("query").noconvert(), nb::arg("key").noconvert(),
      nb::arg("angles").noconvert(), nb::arg("block_angles").noconvert(), "heads"_a,
      nb::arg("cache").noconvert(), nb::arg("positions").noconvert(), nb::arg("state_ids").noconvert(),
      nb::arg("out").noconvert(), nb::arg("batch").none() = nb::none(),
      "`Ops.choose_blocks`: query [T, H·D], key [T, D], angles and block_angles [T, pairs, 2], float32; heads "
      "as `IndexerHeads`; cache [sequences, positions, 1, D] of float16 or float32, contiguous, written; "
      "positions and state_ids int32 [T]; out int32 [T, words]. With batch, the cache is [blocks, 256, 1, D]. "
      "ValueError when run with a row outside the cache; then none has been read or written out of bounds.");
}

}  // namespace coldstream
