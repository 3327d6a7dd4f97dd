#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "ops/binding_checks.h"
#include "ops/ngram.h"

namespace coldstream {

namespace {

using namespace nb::literals;

using Table = std::shared_ptr<NgramTable>;

// The largest of a row's history, which so lies in the batch where a chain leaves a fork behind.
constexpr int64_t max_history = min_fork_rows;

NgramHash checked_hash(std::vector<uint64_t> multipliers, std::vector<uint64_t> sizes,
                       std::vector<uint64_t> offsets, int32_t end_token) {
  const auto context = static_cast<int64_t>(multipliers.size()) - 1;
  const auto heads = static_cast<int64_t>(sizes.size());
  if (context < 1 || context > max_history || heads < 1 || heads % context != 0 ||
      offsets.size() != sizes.size()) {
    refuse("n-grams of up to " + std::to_string(context + 1) + " tokens need as many heads for each length");
  }
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] < 1 || sizes[i] > INT32_MAX || offsets[i] > INT32_MAX - sizes[i])
      refuse("the rows of a head do not fit 31 bits");
  }
  return {std::move(multipliers), std::move(sizes), std::move(offsets), end_token, heads / context};
}

void ngram_ids(Runtime& rt, const Ids1d& token_ids, std::vector<uint64_t> multipliers,
               std::vector<uint64_t> sizes, std::vector<uint64_t> offsets, int32_t end_token,
               const Ids2d& state, const Ids1d& state_ids, const Ids2d& out, const BatchRows* batch,
               const std::optional<Ids1d>& kept, Table table) {
  const int64_t rows = size_of(token_ids, 0), num_states = size_of(state, 0);
  NgramHash hash = checked_hash(std::move(multipliers), std::move(sizes), std::move(offsets), end_token);
  check_contiguous(state, "state", {num_states, static_cast<int64_t>(hash.multipliers.size()) - 1});
  check_contiguous(out, "out", {rows, static_cast<int64_t>(hash.sizes.size())});
  if (table != nullptr) {
    for (size_t i = 0; i < hash.sizes.size(); i++) {
      if (hash.offsets[i] + hash.sizes[i] > static_cast<uint64_t>(table->num_rows))
        refuse("the rows of a head lie outside the table");
    }
  }
  NgramIdsArguments arguments = {
      .capacity = rows,
      .token_ids = ids(token_ids, "token_ids", rows),
      .layout = layout_of(nullptr, ids(state_ids, "state_ids", rows), batch, rows),
      .state = state.data(),
      .num_states = num_states,
      .kept = kept ? kept->data() : nullptr,
      .num_kept = kept ? size_of(*kept, 0) : 0,
      .hash = std::move(hash),
      .table = std::move(table),
      .out = out.data(),
  };
  submit_with(rt, make_ngram_ids(std::move(arguments)), rows, token_ids, state, state_ids, out);
}

void ngram_rows(Runtime& rt, Table table, const Ids2d& row_ids, const Array2d& out) {
  const int64_t rows = size_of(row_ids, 0), heads = size_of(row_ids, 1);
  check_contiguous(row_ids, "ids", {rows, heads});
  const OutputRows to = output(out, "out", rows, heads * table->num_cols);
  submit_with(
      rt, make_ngram_rows(quant_kernels_for(rt.active_tier()), std::move(table), row_ids.data(), heads, to),
      rows, row_ids, out);
}

void ngram_read_ahead(Runtime& rt, Table table, const Ids2d& row_ids) {
  const int64_t rows = size_of(row_ids, 0), heads = size_of(row_ids, 1);
  check_contiguous(row_ids, "ids", {rows, heads});
  submit_with(rt, make_ngram_bytes(std::move(table), row_ids.data(), heads, nullptr), rows, row_ids);
}

void ngram_gate(Runtime& rt, const Array2d& key, const Array2d& query, const Array2d& value,
                const Array2d& out) {
  const int64_t rows = size_of(key, 0), width = size_of(key, 1), size = size_of(value, 1);
  if (size < 1 || width % size != 0) {
    refuse(std::to_string(width) + " values are no whole number of streams of " + std::to_string(size));
  }
  auto next =
      make_ngram_gate(kernels_of(rt), input(key, "key", rows, width), input(query, "query", rows, width),
                      input(value, "value", rows, size), output(out, "out", rows, width), width / size, size);
  submit_with(rt, std::move(next), rows, key, query, value, out);
}

void ngram_conv(Runtime& rt, const Array2d& streams, const Array2d& gated, const Array2d& normed,
                const Array2d& taps, int64_t dilation, const State3d& state, const Ids1d& state_ids,
                const Array2d& out, const BatchRows* batch, const std::optional<Array2d>& kept) {
  const int64_t rows = size_of(streams, 0), width = size_of(streams, 1), num_taps = size_of(taps, 1);
  const int64_t num_states = size_of(state, 0);
  if (num_taps < 2 || num_taps > 16 || dilation < 1 || (num_taps - 1) * dilation > max_history) {
    refuse("a convolution over " + std::to_string(num_taps) + " rows " + std::to_string(dilation) +
           " apart reaches too far back");
  }
  check(taps, "the kernel", {width, num_taps});
  check_contiguous(state, "state", {num_states, (num_taps - 1) * dilation, width});
  if (kept) check_contiguous(*kept, "kept", {size_of(*kept, 0), width});
  NgramConvArguments arguments = {
      .capacity = rows,
      .streams = input(streams, "streams", rows, width),
      .gated = input(gated, "gated", rows, width),
      .normed = input(normed, "normed", rows, width),
      .taps = std::vector<float>(width * num_taps),
      .num_taps = num_taps,
      .dilation = dilation,
      .width = width,
      .state = state.data(),
      .num_states = num_states,
      .layout = layout_of(nullptr, ids(state_ids, "state_ids", rows), batch, rows),
      .kept = kept ? kept->data() : nullptr,
      .num_kept = kept ? size_of(*kept, 0) : 0,
      .out = output(out, "out", rows, width),
  };
  for (int64_t c = 0; c < width; c++) {
    for (int64_t j = 0; j < num_taps; j++)
      arguments.taps[j * width + c] = taps.data()[c * taps.stride(0) + j];
  }
  submit_with(rt, make_ngram_conv(kernels_of(rt), std::move(arguments)), rows, streams, gated, normed, state,
              state_ids, out);
}

void commit_ngram(Runtime& rt, const Ids1d& kept_ids, const Array2d& kept, const Ids2d& token_state,
                  const State3d& state, const Ids1d& state_id, const Ids1d& sources) {
  const int64_t rows = size_of(sources, 0), num_states = size_of(state, 0), width = size_of(state, 2);
  const int64_t num_kept = size_of(kept, 0), context = size_of(token_state, 1);
  check_contiguous(token_state, "token_state", {num_states, context});
  check_contiguous(kept, "kept", {num_kept, width});
  const CommitNgramArguments arguments = {
      .ids = token_state.data(),
      .conv = state.data(),
      .num_states = num_states,
      .context = context,
      .history = size_of(state, 1),
      .width = width,
      .kept_ids = ids(kept_ids, "kept_ids", num_kept),
      .kept = kept.data(),
      .num_kept = num_kept,
      .state_id = ids(state_id, "state_id", 1),
      .sources = ids(sources, "sources", rows),
  };
  submit_with(rt, make_commit_ngram(arguments), rows, kept_ids, kept, token_state, state, state_id, sources);
}

}  // namespace

void bind_ngram(nb::module_& m) {
  nb::class_<NgramTable>(m, "NgramTable",
                         "Rows of a table in a file, read by their place and kept by use in bounded memory.")
      .def(
          "__init__",
          [](NgramTable* self, int fd, uint64_t offset, int quant_type, int64_t num_rows, int64_t num_cols,
             int64_t row_bytes, uint64_t cache_bytes) {
            new (self) NgramTable(fd, offset, static_cast<QuantType>(quant_type), num_rows, num_cols,
                                  row_bytes, cache_bytes);
          },
          "fd"_a, "offset"_a, "quant_type"_a, "num_rows"_a, "num_cols"_a, "row_bytes"_a, "cache_bytes"_a,
          "The table at byte `offset` of the open descriptor `fd`, which may be closed afterwards. Raises "
          "OSError.")
      .def_prop_ro("num_cols", [](const NgramTable& table) { return table.num_cols; })
      .def_prop_ro("row_bytes", [](const NgramTable& table) { return table.row_bytes; })
      .def_prop_ro("cache_bytes", &NgramTable::cache_bytes, "Memory of the rows that are kept.")
      .def_prop_ro("hits", &NgramTable::hits)
      .def_prop_ro("misses", &NgramTable::misses, "Rows that were read from the file.")
      .def_prop_ro("problem", &NgramTable::problem,
                   "0, an error of the system while a row was read, or -1 if the file has become shorter. "
                   "Results are then undefined.");
  m.def("ngram_ids", ngram_ids, "runtime"_a, nb::arg("token_ids").noconvert(), "multipliers"_a, "sizes"_a,
        "offsets"_a, "end_token"_a, nb::arg("state").noconvert(), nb::arg("state_ids").noconvert(),
        nb::arg("out").noconvert(), nb::arg("batch").none() = nb::none(),
        nb::arg("kept").noconvert().none() = nb::none(), "table"_a.none() = nb::none(),
        "`Ops.ngram_ids` of int32 token_ids [T], into contiguous int32 out [T, heads]. Advances state int32 "
        "[states, context], and writes rows of trees to kept int32 [R]. The rows of table are asked for. "
        "ValueError when run with a state or a row that does not exist.");
  m.def("ngram_rows", ngram_rows, "runtime"_a, "table"_a, nb::arg("ids").noconvert(),
        nb::arg("out").noconvert(),
        "The rows of the table by contiguous int32 ids [T, heads], dequantised into float32 out [T, heads · "
        "columns]. ValueError when run with an id outside the table.");
  m.def("ngram_read_ahead", ngram_read_ahead, "runtime"_a, "table"_a, nb::arg("ids").noconvert(),
        "Brings rows of the table by contiguous int32 ids [T, heads] into its memory.");
  m.def("ngram_gate", ngram_gate, "runtime"_a, nb::arg("key").noconvert(), nb::arg("query").noconvert(),
        nb::arg("value").noconvert(), nb::arg("out").noconvert(),
        "`Ops.ngram_gate` of key and query [T, C·E] and value [T, E], into out [T, C·E], float32.");
  m.def(
      "ngram_conv", ngram_conv, "runtime"_a, nb::arg("streams").noconvert(), nb::arg("gated").noconvert(),
      nb::arg("normed").noconvert(), nb::arg("kernel").noconvert(), "dilation"_a,
      nb::arg("state").noconvert(), nb::arg("state_ids").noconvert(), nb::arg("out").noconvert(),
      nb::arg("batch").none() = nb::none(), nb::arg("kept").noconvert().none() = nb::none(),
      "`Ops.ngram_conv`: streams, gated, normed and out [T, W], a kernel [W, K], float32. Advances state "
      "[states, history, W], and writes normed rows of trees to kept [R, W]. The kernel is copied. ValueError "
      "when run with a state or a row that does not exist; then nothing has changed.");
  m.def("commit_ngram", commit_ngram, "runtime"_a, nb::arg("kept_ids").noconvert(),
        nb::arg("kept").noconvert(), nb::arg("token_state").noconvert(), nb::arg("state").noconvert(),
        nb::arg("state_id").noconvert(), nb::arg("sources").noconvert(),
        "`Ops.commit_ngram`: advances the states of number state_id [1] as a chain of the rows sources int32 "
        "[T] of kept_ids [R] and kept [R, W] would. ValueError when run with one that does not exist; then "
        "nothing has changed.");
}

}  // namespace coldstream
