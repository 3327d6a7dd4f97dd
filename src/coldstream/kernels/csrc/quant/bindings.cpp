#include "bindings.h"

#include <nanobind/stl/optional.h>

#include <optional>
#include <tuple>
#include <utility>

#include "quant/blocks.h"
#include "quant/embed.h"
#include "quant/experts.h"
#include "quant/grid_loads.h"
#include "quant/linear.h"
#include "quant/pooled_experts.h"
#include "runtime/mapped_file.h"

namespace coldstream {

namespace {

using namespace nb::literals;

using Bytes1d = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids1d = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids2d = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;
using Input2d = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Array3d = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using Biases = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ArrayFlat = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

[[noreturn]] void invalid(const std::string& message) { throw std::invalid_argument(message); }

std::string shape_text(std::initializer_list<int64_t> sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// A weight whose bytes begin at `offset` of `available` bytes.
Weight make_weight(const uint8_t* data, uint64_t available, uint64_t offset, int type_id, int64_t rows,
                   int64_t cols, int64_t matrices, std::shared_ptr<void> owner) {
  const QuantGeometry* geometry = quant_geometry_find(type_id);
  if (geometry == nullptr) invalid("unknown tensor type " + std::to_string(type_id));
  if (rows < 1 || cols < 1 || matrices < 1) invalid("a weight needs at least one matrix, row and column");
  if (cols % geometry->block_elements != 0) {
    invalid(std::string(geometry->name) + " rows hold multiples of " +
            std::to_string(geometry->block_elements) + " values, not " + std::to_string(cols));
  }
  int64_t row_bytes, matrix_bytes, total;
  if (__builtin_mul_overflow(cols / geometry->block_elements, geometry->block_bytes, &row_bytes) ||
      __builtin_mul_overflow(row_bytes, rows, &matrix_bytes) ||
      __builtin_mul_overflow(matrix_bytes, matrices, &total) || offset > available ||
      static_cast<uint64_t>(total) > available - offset) {
    invalid(std::string(geometry->name) + " weight " + shape_text({matrices, rows, cols}) + " at byte " +
            std::to_string(offset) + " does not fit into " + std::to_string(available) + " bytes");
  }
  const uint8_t* begin = data + offset;
  if (type_id == static_cast<int>(QuantType::f32) &&
      reinterpret_cast<uintptr_t>(begin) % alignof(float) != 0) {
    invalid("F32 weights must begin at a multiple of 4 bytes, not at byte " + std::to_string(offset));
  }
  return {begin, geometry->type, matrices, rows, cols, row_bytes, matrix_bytes, std::move(owner)};
}

Weight rows_of(const Weight& w, int64_t begin, int64_t end) {
  if (begin < 0 || begin >= end || end > w.num_rows) {
    invalid("rows " + std::to_string(begin) + " … " + std::to_string(end) + " of " +
            std::to_string(w.num_rows));
  }
  Weight view = w;
  if (w.addresses != nullptr) {
    view.first_byte += begin * w.row_bytes;
  } else {
    view.data += begin * w.row_bytes;
  }
  view.num_rows = end - begin;
  return view;
}

template <typename Array>
void check_rows(const Array& a, const char* name, int64_t rows, int64_t cols) {
  const int64_t num_rows = static_cast<int64_t>(a.shape(0)), num_cols = static_cast<int64_t>(a.shape(1));
  if (num_rows != rows || num_cols != cols) {
    invalid(std::string(name) + " has shape " + shape_text({num_rows, num_cols}) + " instead of " +
            shape_text({rows, cols}));
  }
  if ((cols > 1 && a.stride(1) != 1) || (rows > 1 && a.stride(0) < cols)) {
    invalid(std::string(name) +
            " must have unit stride along its last dimension and rows that do not overlap");
  }
}

int num_rows_of(size_t rows) {
  if (rows > INT32_MAX / 2) invalid("more rows than an op takes");
  return static_cast<int>(rows);
}

void check_in_place(const Weight& w) {
  if (w.addresses != nullptr) invalid("a weight of a pool is for pooled_experts: it may not be in memory");
}

void check_single(const Weight& w, const char* name) {
  check_in_place(w);
  if (w.num_matrices != 1) invalid(std::string(name) + " is a stack of matrices, not one");
}

Weight weight_of_pool(std::shared_ptr<ExpertPool> pool, int layer, int index, int type_id, int64_t rows,
                      int64_t cols) {
  const ExpertPool::Part& p = pool->part_at(layer, index);
  const int64_t matrices = pool->num_experts();
  const uint64_t all = p.bytes * static_cast<uint64_t>(matrices);
  Weight w = make_weight(nullptr, p.offset + all, p.offset, type_id, rows, cols, matrices, nullptr);
  if (static_cast<uint64_t>(w.matrix_bytes) != p.bytes) {
    invalid("matrices of " + std::to_string(p.bytes) + " bytes are not " + shape_text({rows, cols}));
  }
  w.data = nullptr;
  w.addresses = pool->addresses(layer, index);
  w.owner = std::move(pool);
  return w;
}

void bind_weight(nb::module_& m) {
  nb::class_<Weight>(m, "Weight",
                     "A matrix [rows, cols] or a stack of them, in GGUF's block layout where it lies.")
      .def_static(
          "from_file",
          [](std::shared_ptr<MappedFile> file, uint64_t offset, int type_id, int64_t rows, int64_t cols,
             int64_t matrices) {
            const uint8_t* data = file->data();
            const uint64_t size = file->size();
            return make_weight(data, size, offset, type_id, rows, cols, matrices, std::move(file));
          },
          "file"_a, "offset"_a, "type_id"_a, "rows"_a, "cols"_a, "matrices"_a = 1,
          "A weight at byte `offset` of a mapped file, read in place. Raises ValueError unless it lies "
          "within the file.")
      .def_static(
          "from_array",
          [](Bytes1d array, int type_id, int64_t rows, int64_t cols, int64_t matrices) {
            return make_weight(array.data(), array.size(), 0, type_id, rows, cols, matrices, keep(array));
          },
          nb::arg("array").noconvert(), "type_id"_a, "rows"_a, "cols"_a, "matrices"_a = 1,
          "A weight in a uint8 array [bytes], which is kept, not copied. Raises ValueError unless it fits.")
      .def_static("from_pool", weight_of_pool, "pool"_a, "layer"_a, "part"_a, "type_id"_a, "rows"_a, "cols"_a,
                  "A part of a pool's layer: a stack of matrices that are read when they are needed, for "
                  "pooled_experts alone. Raises ValueError unless it has that size.")
      .def("rows", rows_of, "begin"_a, "end"_a,
           "A view of these output rows of every matrix. Raises ValueError unless 0 <= begin < end <= "
           "num_rows.")
      .def_prop_ro(
          "address", [](const Weight& w) { return reinterpret_cast<uintptr_t>(w.data); },
          "Where the first matrix lies: for a device that has its memory registered, not for reading.")
      .def_ro("matrix_bytes", &Weight::matrix_bytes, "From one matrix to the next.")
      .def_prop_ro("type_id", [](const Weight& w) { return static_cast<int>(w.type); })
      .def_ro("num_matrices", &Weight::num_matrices)
      .def_ro("num_rows", &Weight::num_rows)
      .def_ro("num_cols", &Weight::num_cols);
}

void linear(Runtime& rt, Input2d x, const std::vector<Weight>& weights, const std::vector<Array2d>& outs) {
  if (weights.empty() || weights.size() != outs.size())
    invalid("linear needs one output for each of one or more weights");
  const int64_t rows = num_rows_of(x.shape(0)), cols = weights[0].num_cols;
  check_rows(x, "x", rows, cols);
  std::vector<LinearPart> parts;
  std::vector<std::shared_ptr<void>> owners = {keep(x)};
  for (size_t i = 0; i < weights.size(); i++) {
    check_single(weights[i], "a weight of linear");
    if (weights[i].num_cols != cols) invalid("the weights of one linear must have the same number of inputs");
    check_rows(outs[i], "an output of linear", rows, weights[i].num_rows);
    parts.push_back({weights[i], {outs[i].data(), outs[i].stride(0)}});
    owners.push_back(keep(outs[i]));
  }
  const QuantKernels& kernels = quant_kernels_for(rt.active_tier());
  const FloatRowsIn in = {x.data(), x.stride(0)};
  submit(rt, std::make_unique<LinearOp>(kernels, in, cols, std::move(parts), static_cast<int>(rows)),
         static_cast<int>(rows), std::move(owners));
}

void embed(Runtime& rt, const Weight& table, Ids1d token_ids, Array2d out) {
  check_single(table, "an embedding table");
  const int rows = num_rows_of(token_ids.shape(0));
  check_rows(out, "out", rows, table.num_cols);
  const FloatRowsOut to = {out.data(), out.stride(0)};
  submit(rt, std::make_unique<EmbedOp>(quant_kernels_for(rt.active_tier()), table, token_ids.data(), to),
         rows, {keep(token_ids), keep(out)});
}

void make_glu(ExpertGlu* to, int kind, float limit, std::optional<Biases> gate, std::optional<Biases> up) {
  if (kind < 0 || kind >= num_glu_kinds) invalid("unknown gated unit " + std::to_string(kind));
  if (gate.has_value() != up.has_value()) invalid("gate and up have biases together");
  new (to) ExpertGlu{{static_cast<GluKind>(kind), limit}};
  if (!gate) return;
  if (gate->shape(0) != up->shape(0) || gate->shape(1) != up->shape(1)) {
    invalid("biases of gate and up have different shapes");
  }
  to->gate_bias = gate->data();
  to->up_bias = up->data();
  to->bias_shape[0] = static_cast<int64_t>(gate->shape(0));
  to->bias_shape[1] = static_cast<int64_t>(gate->shape(1));
  to->owner =
      std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(keep(*gate), keep(*up));
}

RoutedExpertsArgs experts_args(const Input2d& x, const Ids2d& topk_ids, const Weight& gate, const Weight& up,
                               const Weight& down, const ExpertGlu* glu, const Array3d& out) {
  const int rows = num_rows_of(x.shape(0));
  const int64_t ranks = static_cast<int64_t>(topk_ids.shape(1));
  if (gate.num_matrices != up.num_matrices || gate.num_matrices != down.num_matrices ||
      gate.num_rows != up.num_rows || gate.num_cols != up.num_cols || down.num_cols != gate.num_rows) {
    invalid("gate " + shape_text({gate.num_matrices, gate.num_rows, gate.num_cols}) + ", up " +
            shape_text({up.num_matrices, up.num_rows, up.num_cols}) + " and down " +
            shape_text({down.num_matrices, down.num_rows, down.num_cols}) + " do not belong together");
  }
  if (glu != nullptr && !glu->fits(gate)) invalid("biases must be [experts, rows of gate]");
  check_rows(x, "x", rows, gate.num_cols);
  check_rows(topk_ids, "topk_ids", rows, ranks);
  if (ranks < 1 || ranks > 1024 || gate.num_matrices > INT32_MAX / 2 || rows * ranks > INT32_MAX / 2) {
    invalid("topk_ids " + shape_text({rows, ranks}) + " is outside what routed_experts takes");
  }
  if (static_cast<int64_t>(out.shape(0)) != rows || static_cast<int64_t>(out.shape(1)) != ranks ||
      static_cast<int64_t>(out.shape(2)) != down.num_rows || (down.num_rows > 1 && out.stride(2) != 1) ||
      (ranks > 1 && out.stride(1) < down.num_rows) ||
      (rows > 1 && out.stride(0) < (ranks - 1) * out.stride(1) + down.num_rows)) {
    invalid("out must have shape " + shape_text({rows, ranks, down.num_rows}) +
            ", unit stride last and no overlaps");
  }
  return {{x.data(), x.stride(0)},
          topk_ids.data(),
          topk_ids.stride(0),
          static_cast<int>(ranks),
          gate,
          up,
          down,
          out.data(),
          out.stride(0),
          out.stride(1),
          glu == nullptr ? ExpertGlu{} : *glu};
}

void routed_experts(Runtime& rt, Input2d x, Ids2d topk_ids, const Weight& gate, const Weight& up,
                    const Weight& down, Array3d out, const ExpertGlu* glu) {
  RoutedExpertsArgs args = experts_args(x, topk_ids, gate, up, down, glu, out);
  for (const Weight* w : {&gate, &up, &down}) check_in_place(*w);
  const int rows = num_rows_of(x.shape(0));
  submit(rt, std::make_unique<RoutedExpertsOp>(quant_kernels_for(rt.active_tier()), std::move(args), rows),
         rows, {keep(x), keep(topk_ids), keep(out)});
}

// The layer of the pool that `experts` is a part of, and the ids that its router chose.
PooledLayer layer_of(std::shared_ptr<ExpertPool> pool, const Weight& experts, const Ids2d& topk_ids) {
  const int layer = pool->layer_of(experts.addresses);
  if (layer < 0) invalid("the experts do not lie in this pool");
  const int64_t ranks = static_cast<int64_t>(topk_ids.shape(1));
  check_rows(topk_ids, "topk_ids", num_rows_of(topk_ids.shape(0)), ranks);
  if (ranks < 1 || ranks > 1024) invalid("topk_ids have " + std::to_string(ranks) + " columns");
  return {std::move(pool), layer, topk_ids.data(), topk_ids.stride(0), static_cast<int>(ranks)};
}

void request_experts(Runtime& rt, std::shared_ptr<ExpertPool> pool, const Weight& gate, Ids2d topk_ids) {
  submit(rt, std::make_unique<RequestExpertsOp>(layer_of(std::move(pool), gate, topk_ids)),
         num_rows_of(topk_ids.shape(0)), {keep(topk_ids)});
}

void pooled_experts(Runtime& rt, std::shared_ptr<ExpertPool> pool, Input2d x, Ids2d topk_ids,
                    const Weight& gate, const Weight& up, const Weight& down, Array3d out,
                    const ExpertGlu* glu) {
  RoutedExpertsArgs args = experts_args(x, topk_ids, gate, up, down, glu, out);
  PooledLayer from = layer_of(pool, gate, topk_ids);
  if (pool->layer_of(up.addresses) != from.layer || pool->layer_of(down.addresses) != from.layer) {
    invalid("gate, up and down lie in different layers of the pool");
  }
  const int rows = num_rows_of(x.shape(0));
  submit(rt,
         std::make_unique<PooledExpertsOp>(quant_kernels_for(rt.active_tier()), std::move(args),
                                           std::move(from), rows),
         rows, {keep(x), keep(topk_ids), keep(out)});
}

template <typename T>
nb::ndarray<nb::numpy, T> new_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t size : shape) count *= size;
  auto* data = new T[count]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape.size(), shape.begin(), owner);
}

// The quantised inputs of a group in their own order.
void copy_group(const QuantKernels& kernels, const ActivationRow& row, size_t group, int8_t* out) {
  const int8_t* q = row.q + group * group_elements;
  if (row.form == ActivationForm::by_group || !kernels.interleaves_blocks) {
    std::memcpy(out, q, group_elements);
    return;
  }
  constexpr int together = 8;
  for (int i = 0; i < group_elements; i += together) {
    const int block = i / block_elements, step = i % block_elements / together;
    std::memcpy(out + i, q + (step * blocks_per_group + block) * together, together);
  }
}

nb::tuple quantize_activations(Runtime& rt, Input2d x, int scale_size) {
  if (scale_size != group_elements && scale_size != block_elements)
    invalid("scale_size must be 256 or 32, not " + std::to_string(scale_size));
  const auto form = scale_size == group_elements ? ActivationForm::by_group : ActivationForm::by_block;
  const int64_t rows = static_cast<int64_t>(x.shape(0)), cols = static_cast<int64_t>(x.shape(1));
  check_rows(x, "x", rows, cols);
  const size_t groups = static_cast<size_t>(num_groups(cols));
  auto q = new_array<int8_t>({x.shape(0), groups * group_elements});
  const size_t num_scales = groups * static_cast<size_t>(ActivationRow::scales_per_group(form));
  auto scales = new_array<float>({x.shape(0), num_scales});
  auto sums = new_array<int16_t>({x.shape(0), groups * 16});
  Scratch memory;
  memory.reserve(ActivationRow::bytes(cols, form));
  const ActivationRow row = ActivationRow::at(memory.data(), cols, form);
  const QuantKernels& kernels = quant_kernels_for(rt.active_tier());
  for (size_t t = 0; t < x.shape(0); t++) {
    kernels.quantize_row(x.data() + static_cast<int64_t>(t) * x.stride(0), cols, row);
    for (size_t g = 0; g < groups; g++)
      copy_group(kernels, row, g, q.data() + (t * groups + g) * group_elements);
    std::memcpy(scales.data() + t * num_scales, row.scales, num_scales * sizeof(float));
    std::memcpy(sums.data() + t * groups * 16, row.sums, groups * 16 * sizeof(int16_t));
  }
  return nb::make_tuple(q, scales, sums);
}

void dequantize(Runtime& rt, const Weight& w, ArrayFlat out) {
  check_in_place(w);
  if (static_cast<int64_t>(out.size()) != w.num_matrices * w.num_rows * w.num_cols) {
    invalid("out must hold the " + shape_text({w.num_matrices, w.num_rows, w.num_cols}) +
            " values of the weight");
  }
  submit(rt, std::make_unique<DequantizeOp>(quant_kernels_for(rt.active_tier()), w, out.data()), 1,
         {keep(out)});
}

nb::list geometry() {
  nb::list rows;
  for (const QuantGeometry& g : quant_geometries) {
    rows.append(nb::make_tuple(static_cast<int>(g.type), g.name, g.block_elements, g.block_bytes));
  }
  return rows;
}

}  // namespace

void bind_quant(nb::module_& m) {
  bind_weight(m);
  nb::class_<ExpertGlu>(m, "ExpertGlu", "How an expert's gate and up become one.")
      .def("__init__", make_glu, "kind"_a = 0, "limit"_a = 0.0f,
           nb::arg("gate_bias").noconvert().none() = nb::none(),
           nb::arg("up_bias").noconvert().none() = nb::none(),
           "kind: a number of `GATED_UNITS`; limit: of a clamped one. Biases float32 [experts, F], both or "
           "neither, are added before. Raises ValueError for others.");
  m.def("quant_geometry", geometry, "(type id, name, elements per block, bytes per block) of every type.");
  m.def(
      "gather_grid",
      [](int type_id, bool gathers) {
        if (quant_geometry_find(type_id) == nullptr)
          invalid("unknown tensor type " + std::to_string(type_id));
        gathers_grid[type_id] = gathers;
      },
      "type_id"_a, "gathers"_a,
      "Whether tiers with 512-bit registers gather entries of a type's grid. For tests: they time both ways "
      "when they are first chosen. Raises ValueError for an unknown type.");
  m.def(
      "linear", linear, "runtime"_a, nb::arg("x").noconvert(), "weights"_a, nb::arg("outs").noconvert(),
      "x [T, in] times each weight [out, in] into outs, float32 [T, out] each. x is quantised once for all.");
  m.def("embed", embed, "runtime"_a, "table"_a, nb::arg("token_ids").noconvert(), nb::arg("out").noconvert(),
        "Rows of the table by int32 token_ids [T] into out [T, E]. Raises ValueError for an id outside the "
        "table.");
  m.def("routed_experts", routed_experts, "runtime"_a, nb::arg("x").noconvert(),
        nb::arg("topk_ids").noconvert(), "gate"_a, "up"_a, "down"_a, nb::arg("out").noconvert(),
        "glu"_a.none() = nb::none(),
        "down_e(glu(gate_e x, up_e x)) for int32 topk_ids [T, K] into out [T, K, E]. Rows of id -1 are left "
        "as they are. Raises ValueError for any other id outside the experts.");
  m.def("request_experts", request_experts, "runtime"_a, "pool"_a, "gate"_a, nb::arg("topk_ids").noconvert(),
        "Begins to read the experts, int32 topk_ids [T, K], of gate's layer of the pool that are not in "
        "memory. Raises ValueError for an id outside the experts, ModelChangedError if the file cannot be "
        "read.");
  m.def("pooled_experts", pooled_experts, "runtime"_a, "pool"_a, nb::arg("x").noconvert(),
        nb::arg("topk_ids").noconvert(), "gate"_a, "up"_a, "down"_a, nb::arg("out").noconvert(),
        "glu"_a.none() = nb::none(),
        "routed_experts of what request_experts was called for last, each expert as soon as it is there. "
        "Raises ModelChangedError if the file cannot be read.");
  m.def("quantize_activations", quantize_activations, "runtime"_a, nb::arg("x").noconvert(),
        "scale_size"_a = group_elements,
        "(int8 [T, 256·G], float32 scales, int16 sums [T, 16·G]) of x [T, K], padded to whole groups of 256, "
        "with a scale for each `scale_size` inputs: 256 or 32. Raises ValueError for others.");
  m.def("dequantize", dequantize, "runtime"_a, "weight"_a, nb::arg("out").noconvert(),
        "All values of a weight into a contiguous float32 array of as many elements.");
}

}  // namespace coldstream
