#include <nanobind/stl/optional.h>

#include <optional>

#include "ops/binding_checks.h"

namespace coldstream {

namespace {

using namespace nb::literals;

void add(Runtime& rt, const Array2d& x, const Array2d& y, const Array2d& out) {
  const int64_t rows = size_of(x, 0), size = size_of(x, 1);
  auto next = make_add(kernels_of(rt), input(x, "x", rows, size), input(y, "y", rows, size),
                       output(out, "out", rows, size), size);
  submit_with(rt, std::move(next), rows, x, y, out);
}

void add_bias(Runtime& rt, const Array2d& x, const Array1d& bias, const Array2d& out) {
  const int64_t rows = size_of(x, 0), size = size_of(x, 1);
  const InputRows biases = {vector(bias, "bias", size), 0};  // the same for all rows
  auto next =
      make_add(kernels_of(rt), input(x, "x", rows, size), biases, output(out, "out", rows, size), size);
  submit_with(rt, std::move(next), rows, x, bias, out);
}

void glu(Runtime& rt, const Array2d& gate, const Array2d& up, const Array2d& out, int kind, float limit) {
  if (kind < 0 || kind >= num_glu_kinds) refuse("unknown gated unit " + std::to_string(kind));
  const int64_t rows = size_of(gate, 0), size = size_of(gate, 1);
  auto next = make_glu(kernels_of(rt), {static_cast<GluKind>(kind), limit}, input(gate, "gate", rows, size),
                       input(up, "up", rows, size), output(out, "out", rows, size), size);
  submit_with(rt, std::move(next), rows, gate, up, out);
}

void rms_norm(Runtime& rt, const Array2d& x, const Array1d& weight, float eps, const Array2d& out) {
  const int64_t rows = size_of(x, 0), size = size_of(x, 1);
  auto next = make_rms_norm(kernels_of(rt), input(x, "x", rows, size), vector(weight, "weight", size), eps,
                            output(out, "out", rows, size), size);
  submit_with(rt, std::move(next), rows, x, weight, out);
}

void inject_norm(Runtime& rt, const std::optional<Array2d>& streams, const Array2d& update,
                 const std::optional<Array2d>& injection, const Array1d& weight, float eps,
                 const Array2d& total, const Array2d& normed) {
  const int64_t rows = size_of(update, 0), size = size_of(update, 1), width = size_of(weight, 0);
  if (size < 1 || width % size != 0) {
    refuse(std::to_string(width) + " weights are no whole number of streams of " + std::to_string(size));
  }
  if (streams.has_value() != injection.has_value()) refuse("streams come with the weights of their update");
  const InjectArguments arguments = {
      .streams = streams ? input(*streams, "streams", rows, width) : InputRows{},
      .injection = injection ? input(*injection, "injection", rows, width / size) : InputRows{},
      .update = input(update, "update", rows, size),
      .weight = vector(weight, "weight", width),
      .eps = eps,
      .total = output(total, "total", rows, width),
      .normed = output(normed, "normed", rows, width),
      .num_streams = width / size,
      .size = size,
  };
  auto next = make_inject_norm(kernels_of(rt), arguments);
  if (streams) {
    submit_with(rt, std::move(next), rows, *streams, update, *injection, weight, total, normed);
  } else {
    submit_with(rt, std::move(next), rows, update, weight, total, normed);
  }
}

void apply_scalar(Runtime& rt, const char* name, ScalarKernel kernel, const Array2d& x, float number,
                  const Array2d& out) {
  const int64_t rows = size_of(x, 0), size = size_of(x, 1);
  auto next =
      make_scalar(name, kernel, input(x, "x", rows, size), number, output(out, "out", rows, size), size);
  submit_with(rt, std::move(next), rows, x, out);
}

void scaled_silu(Runtime& rt, const Array2d& x, int64_t divisor, const Array2d& out) {
  if (divisor < 1) refuse("a divisor of " + std::to_string(divisor));
  apply_scalar(rt, "scaled_silu", kernels_of(rt).scaled_silu, x, static_cast<float>(divisor), out);
}

void scale(Runtime& rt, const Array2d& x, float factor, const Array2d& out) {
  apply_scalar(rt, "scale", kernels_of(rt).scale, x, factor, out);
}

void softcap(Runtime& rt, const Array2d& x, float cap, const Array2d& out) {
  if (!(cap > 0.0f)) refuse("a cap of " + std::to_string(cap));
  apply_scalar(rt, "softcap", kernels_of(rt).softcap, x, cap, out);
}

void mix_streams(Runtime& rt, const Array2d& normed, const Array2d& gates, const Array2d& out) {
  const int64_t rows = size_of(normed, 0), width = size_of(normed, 1), size = size_of(out, 1);
  if (size < 1 || width % size != 0) {
    refuse(std::to_string(width) + " values are no whole number of streams of " + std::to_string(size));
  }
  auto next = make_mix_streams(kernels_of(rt), input(normed, "normed", rows, width),
                               input(gates, "gates", rows, width), output(out, "out", rows, size),
                               width / size, size);
  submit_with(rt, std::move(next), rows, normed, gates, out);
}

void rope_angles(Runtime& rt, const Ids1d& positions, double theta, const Array3d& out,
                 const std::optional<Doubles1d>& factors, double magnitude, int32_t block_size) {
  const int64_t rows = size_of(positions, 0), num_pairs = size_of(out, 1);
  check(positions, "positions", {rows});
  check_contiguous(out, "out", {rows, num_pairs, 2});
  if (factors) check_contiguous(*factors, "factors", {num_pairs});
  if (block_size < 1) refuse("a block has at least one position");
  const RopeArguments rope = {
      .num_dims = 2 * num_pairs,
      .theta = theta,
      .factors = factors ? factors->data() : nullptr,
      .magnitude = magnitude,
      .block_size = block_size,
  };
  submit_with(rt, make_rope_angles(rope, positions.data(), {out.data(), 2 * num_pairs}), rows, positions,
              out);
}

void combine_experts(Runtime& rt, const Array3d& routed, const Array2d& topk_weights,
                     const std::optional<Array2d>& shared, const std::optional<Array2d>& shared_gate,
                     const Array2d& out, const std::optional<Array2d>& bias,
                     const std::optional<Ids2d>& ids) {
  const int64_t rows = size_of(routed, 0), k = size_of(routed, 1), size = size_of(routed, 2);
  check(routed, "routed", {rows, k, size});
  if (shared_gate && !shared) refuse("a gate comes with its shared expert");
  if (bias.has_value() != ids.has_value()) refuse("biases of experts come with the experts of each row");
  if (bias) {
    check_contiguous(*bias, "bias", {size_of(*bias, 0), size});
    check_contiguous(*ids, "ids", {rows, k});
  }
  const CombineArguments arguments = {
      .routed = routed.data(),
      .row_stride = routed.stride(0),
      .rank_stride = routed.stride(1),
      .num_experts_per_tok = k,
      .size = size,
      .weights = input(topk_weights, "topk_weights", rows, k),
      .shared = shared ? input(*shared, "shared", rows, size) : InputRows{},
      .shared_gate = shared_gate ? input(*shared_gate, "shared_gate", rows, 1) : InputRows{},
      .bias = bias ? bias->data() : nullptr,
      .ids = ids ? ids->data() : nullptr,
      .out = output(out, "out", rows, size),
  };
  if (rows > INT32_MAX / 1024) refuse(std::to_string(rows) + " rows are more than one call takes");
  std::vector<std::shared_ptr<void>> owners = {keep(routed), keep(topk_weights), keep(out)};
  for (const auto* each : {&shared, &shared_gate, &bias}) {
    if (*each) owners.push_back(keep(**each));
  }
  if (ids) owners.push_back(keep(*ids));
  submit(rt, make_combine_experts(kernels_of(rt), arguments), static_cast<int>(rows), std::move(owners));
}

void check_router_weight(const Weight& matrix) {
  const bool is_f32 = matrix.type == QuantType::f32;
  if (!is_f32 && matrix.type != QuantType::f16 && matrix.type != QuantType::bf16) {
    refuse("router weights must be F32, F16 or BF16: dequantise others to F32");
  }
  if (matrix.num_matrices != 1) refuse("a router weight is one matrix, not a stack");
  if (reinterpret_cast<uintptr_t>(matrix.data) % (is_f32 ? 4 : 2) != 0) {
    refuse("a router weight must be aligned");
  }
}

Gating gating_of(const std::string& name) {
  if (name == "softmax") return Gating::softmax;
  if (name == "sigmoid") return Gating::sigmoid;
  if (name == "softmax of the chosen") return Gating::softmax_of_chosen;
  if (name == "square root of softplus") return Gating::root_of_softplus;
  refuse("no router has the gating " + name);
}

// The vectors of a `ChoiceRule` of ops.py.
struct RuleVectors {
  std::optional<Array1d> bias, selection_bias, expert_scale;

  static RuleVectors of(const nb::object& record) {
    return {field<std::optional<Array1d>>(record, "bias"),
            field<std::optional<Array1d>>(record, "selection_bias"),
            field<std::optional<Array1d>>(record, "expert_scale")};
  }
};

ChoiceRule rule_of(const nb::object& record, const RuleVectors& vectors, int64_t num_experts) {
  const nb::object spec = record.attr("spec");
  const auto optional = [&](const std::optional<Array1d>& array, const char* name) -> const float* {
    return array ? vector(*array, name, num_experts) : nullptr;
  };
  const ChoiceRule rule = {
      .gating = gating_of(field<std::string>(spec, "gating")),
      .bias = optional(vectors.bias, "bias"),
      .selection_bias = optional(vectors.selection_bias, "selection_bias"),
      .expert_scale = optional(vectors.expert_scale, "expert_scale"),
      .is_normalised = field<bool>(spec, "normalised"),
      .scale = field<float>(spec, "scale", true),
      .num_groups = field<int64_t>(spec, "num_groups"),
      .num_used_groups = field<int64_t>(spec, "num_used_groups"),
  };
  const bool is_divided = rule.num_groups > 1;
  if (rule.num_groups < 1 || num_experts % rule.num_groups != 0 ||
      (is_divided && num_experts < 2 * rule.num_groups) || rule.num_used_groups < 1 ||
      rule.num_used_groups > rule.num_groups) {
    refuse(std::to_string(num_experts) + " experts in " + std::to_string(rule.num_groups) +
           " groups, of which " + std::to_string(rule.num_used_groups) + " are used");
  }
  return rule;
}

void router(Runtime& rt, const Array2d& x, const Weight& matrix, const Ids2d& topk_ids,
            const Array2d& topk_weights, const nb::object& rule) {
  const int64_t rows = size_of(x, 0), k = size_of(topk_ids, 1);
  check_router_weight(matrix);
  if (k < 1 || k > matrix.num_rows) {
    refuse("cannot choose " + std::to_string(k) + " of " + std::to_string(matrix.num_rows) + " experts");
  }
  check_contiguous(topk_ids, "topk_ids", {rows, k});
  check_contiguous(topk_weights, "topk_weights", {rows, k});
  const RuleVectors vectors = rule.is_none() ? RuleVectors{} : RuleVectors::of(rule);
  const RouterArguments arguments = {
      .capacity = rows,
      .x = input(x, "x", rows, matrix.num_cols),
      .matrix = matrix,
      .rule = rule.is_none() ? ChoiceRule{} : rule_of(rule, vectors, matrix.num_rows),
      .num_experts_per_tok = k,
      .topk_ids = topk_ids.data(),
      .topk_weights = topk_weights.data(),
  };
  submit_with(rt, make_router(kernels_of(rt), arguments), rows, x, topk_ids, topk_weights, rule);
}

void top_log_probs(Runtime& rt, const Array2d& logits, const Ids2d& ids, const Array2d& log_probs) {
  const int64_t rows = size_of(logits, 0), size = size_of(logits, 1), k = size_of(ids, 1);
  if (k < 1 || k > size) {
    refuse("cannot choose " + std::to_string(k) + " of " + std::to_string(size) + " tokens");
  }
  check_contiguous(ids, "ids", {rows, k});
  check_contiguous(log_probs, "log_probs", {rows, k});
  auto next = make_top_log_probs(kernels_of(rt), input(logits, "logits", rows, size), size, k, ids.data(),
                                 log_probs.data());
  submit_with(rt, std::move(next), rows, logits, ids, log_probs);
}

void bind_row_ops(nb::module_& m) {
  m.def("add", add, "runtime"_a, nb::arg("x").noconvert(), nb::arg("y").noconvert(),
        nb::arg("out").noconvert(), "out = x + y, all float32 [T, E]. `out` may be x or y.");
  m.def("add_bias", add_bias, "runtime"_a, nb::arg("x").noconvert(), nb::arg("bias").noconvert(),
        nb::arg("out").noconvert(),
        "out = x + bias in each row; x and out float32 [T, E], bias [E]. `out` may be x.");
  m.def("glu", glu, "runtime"_a, nb::arg("gate").noconvert(), nb::arg("up").noconvert(),
        nb::arg("out").noconvert(), "kind"_a = 0, "limit"_a = 0.0f,
        "out = glu(gate, up), all float32 [T, F]. `out` may be gate or up. kind: a number of `GATED_UNITS`.");
  m.def("rms_norm", rms_norm, "runtime"_a, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), "eps"_a,
        nb::arg("out").noconvert(),
        "out = x / sqrt(mean(x²) + eps) · weight; x and out float32 [T, E], weight [E].");
  m.def("inject_norm", inject_norm, "runtime"_a, nb::arg("streams").noconvert().none(),
        nb::arg("update").noconvert(), nb::arg("injection").noconvert().none(), nb::arg("weight").noconvert(),
        "eps"_a, nb::arg("total").noconvert(), nb::arg("normed").noconvert(),
        "`Ops.inject_norm` of streams [T, C·E], update [T, E], injection [T, C] and weight [C·E], into total "
        "and normed [T, C·E], float32. `total` may be streams. With streams and injection None, all streams "
        "become the update.");
  m.def("scaled_silu", scaled_silu, "runtime"_a, nb::arg("x").noconvert(), "divisor"_a,
        nb::arg("out").noconvert(), "out = silu(x / divisor), all float32 [T, F]. `out` may be x.");
  m.def("scale", scale, "runtime"_a, nb::arg("x").noconvert(), "factor"_a, nb::arg("out").noconvert(),
        "out = x · factor, all float32 [T, E]. `out` may be x.");
  m.def("softcap", softcap, "runtime"_a, nb::arg("x").noconvert(), "cap"_a, nb::arg("out").noconvert(),
        "out = cap · tanh(x / cap), all float32 [T, V]. `out` may be x.");
  m.def("mix_streams", mix_streams, "runtime"_a, nb::arg("normed").noconvert(), nb::arg("gates").noconvert(),
        nb::arg("out").noconvert(),
        "out [T, E] = the mean over C streams of normed · sigmoid(gates), both [T, C·E], float32.");
  m.def(
      "rope_angles", rope_angles, "runtime"_a, nb::arg("positions").noconvert(), "theta"_a,
      nb::arg("out").noconvert(), nb::arg("factors").noconvert().none() = nb::none(), "magnitude"_a = 1.0,
      "block_size"_a = 1,
      "cos and sin of position · theta^(−i / pairs) · factors[i], times magnitude, into out, float32 [T, pairs, 2]; "
      "of the first position of its block. "
      "positions int32 [T], factors float64 [pairs] or None for 1. ValueError when run with a negative position.");
  m.def("combine_experts", combine_experts, "runtime"_a, nb::arg("routed").noconvert(),
        nb::arg("topk_weights").noconvert(), nb::arg("shared").noconvert().none(),
        nb::arg("shared_gate").noconvert().none(), nb::arg("out").noconvert(),
        nb::arg("bias").noconvert().none() = nb::none(), nb::arg("ids").noconvert().none() = nb::none(),
        "out [T, E] = Σ_k topk_weights[:, k] · routed[:, k] in rank order + sigmoid(shared_gate) · shared; "
        "routed [T, K, E], topk_weights [T, K], shared [T, E], shared_gate [T, 1], float32. The shared "
        "expert has weight 1 if shared_gate is None; the sum is alone if both are. bias [experts, E] of "
        "each row's expert, int32 ids [T, K], is first added to routed.");
  m.def(
      "top_log_probs", top_log_probs, "runtime"_a, nb::arg("logits").noconvert(), nb::arg("ids").noconvert(),
      nb::arg("log_probs").noconvert(),
      "The k greatest of each row of logits [T, V], float32, of equal ones the lowest ids first: ids int32 and "
      "log_probs float32 [T, k], contiguous; log_probs of a softmax over the row, NaN unless all logits are finite.");
  m.def("router", router, "runtime"_a, nb::arg("x").noconvert(), "weight"_a, nb::arg("topk_ids").noconvert(),
        nb::arg("topk_weights").noconvert(), "rule"_a.none() = nb::none(),
        "`Ops.router`: x [T, E] float32, weight F32, F16 or BF16 [experts, E]; writes contiguous topk_ids "
        "int32 [T, K] "
        "and topk_weights float32 [T, K]. rule: a `ChoiceRule`, None for a renormalised softmax.");
}

}  // namespace

void bind_ops(nb::module_& m) {
  bind_row_ops(m);
  bind_mixers(m);
  bind_indexer(m);
  bind_ngram(m);
}

}  // namespace coldstream
