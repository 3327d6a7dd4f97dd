#include "bindings.h"

#include <nanobind/stl/optional.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>

#include "hybrid/expert_server.h"
#include "hybrid/ngram_server.h"

namespace coldstream {

namespace {

using namespace nb::literals;

using Word = nb::ndarray<uint32_t, nb::shape<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows2d = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids2d = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows3d = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// A server and the arrays it works on.
class BoundServer {
 public:
  BoundServer(Runtime& rt, Word request, Word done, Rows2d x, Ids2d ids, Rows3d out, bool is_prefill,
              std::optional<Words> ahead)
      : arrays_{keep(request), keep(done), keep(x), keep(ids), keep(out)},
        hidden_size_(static_cast<int64_t>(x.shape(1))),
        server_(rt.pool(), quant_kernels_for(rt.active_tier()),
                make_mailbox(request, done, x, ids, out, ahead), is_prefill) {
    if (ahead) arrays_.push_back(keep(*ahead));
  }

  int add_layer(const Weight& gate, const Weight& up, const Weight& down, std::shared_ptr<ExpertPool> pool,
                const ExpertGlu* glu) {
    const bool belong_together = gate.num_matrices == up.num_matrices &&
                                 gate.num_matrices == down.num_matrices && gate.num_rows == up.num_rows &&
                                 down.num_cols == gate.num_rows;
    if (!belong_together || gate.num_cols != hidden_size_ || up.num_cols != hidden_size_ ||
        down.num_rows != hidden_size_) {
      throw std::invalid_argument("gate, up and down must be experts for rows of " +
                                  std::to_string(hidden_size_) + " values");
    }
    if (glu != nullptr && !glu->fits(gate))
      throw std::invalid_argument("biases must be [experts, rows of gate]");
    const int layer = pool == nullptr ? -1 : pool->layer_of(gate.addresses);
    for (const Weight* w : {&gate, &up, &down}) {
      const bool lies_there =
          pool == nullptr ? w->addresses == nullptr : layer >= 0 && pool->layer_of(w->addresses) == layer;
      if (!lies_there)
        throw std::invalid_argument("gate, up and down must lie in one layer of the pool given");
    }
    return server_.add_layer(gate, up, down, glu == nullptr ? ExpertGlu{} : *glu, std::move(pool), layer);
  }
  void begin() { server_.begin(); }
  void end() { server_.end(); }
  void check() { server_.check(); }
  double awake_s() const { return std::chrono::duration<double>(server_.awake_for()).count(); }
  void stay_awake_for(double seconds) {
    if (!(seconds >= 0 && seconds <= most_awake_s)) {
      throw std::invalid_argument("threads that stay awake for " + std::to_string(seconds) +
                                  " s behind a request, not for 0 to " + std::to_string(most_awake_s));
    }
    server_.stay_awake_for(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
  }
  nb::list expected() {
    nb::list layers;
    for (const Expected& layer : server_.expected()) {
      layers.append(nb::make_tuple(layer.experts, layer.right, layer.asked));
    }
    return layers;
  }
  int64_t read_ahead_bytes() { return server_.read_ahead_bytes(); }
  nb::list work() {
    nb::list layers;
    for (const LayerWork& layer : server_.work()) {
      layers.append(nb::make_tuple(layer.requests, layer.pairs, layer.seconds));
    }
    return layers;
  }

 private:
  static Mailbox make_mailbox(const Word& request, const Word& done, const Rows2d& x, const Ids2d& ids,
                              const Rows3d& out, const std::optional<Words>& ahead) {
    const size_t rows = x.shape(0), ranks = ids.shape(1);
    if (rows < 1 || rows > 0xffff || ranks < 1 || ids.shape(0) != rows || out.shape(0) != rows ||
        out.shape(1) != ranks || out.shape(2) != x.shape(1)) {
      throw std::invalid_argument("a mailbox is x [T, E], ids [T, K] and out [T, K, E], T at most 65535");
    }
    if (ahead && ahead->shape(0) < ranks) {
      throw std::invalid_argument("of " + std::to_string(ranks) + " experts of a layer, " +
                                  std::to_string(ahead->shape(0)) + " have a word for what is expected");
    }
    return {request.data(),
            done.data(),
            {x.data(), static_cast<int64_t>(x.shape(1))},
            ids.data(),
            static_cast<int>(ranks),
            out.data(),
            static_cast<int>(rows),
            ahead ? ahead->data() : nullptr};
  }

  static constexpr double most_awake_s = 3600;
  std::vector<std::shared_ptr<void>> arrays_;
  int64_t hidden_size_;
  ExpertServer server_;
};

using Bytes2dOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The same for rows of a table of n-grams.
class BoundNgramServer {
 public:
  BoundNgramServer(Runtime& rt, Word request, Word done, Ids2d ids, Bytes2dOut out,
                   std::shared_ptr<NgramTable> table)
      : arrays_{keep(request), keep(done), keep(ids), keep(out)},
        server_(rt.pool(), make_mailbox(request, done, ids, out, *table), table) {}

  void begin() { server_.begin(); }
  void end() { server_.end(); }
  void check() { server_.check(); }

 private:
  static NgramMailbox make_mailbox(const Word& request, const Word& done, const Ids2d& ids,
                                   const Bytes2dOut& out, const NgramTable& table) {
    const size_t rows = ids.shape(0), heads = ids.shape(1);
    if (rows < 1 || rows > INT32_MAX || heads < 1 || out.shape(0) != rows ||
        out.shape(1) != heads * static_cast<size_t>(table.row_bytes)) {
      throw std::invalid_argument("a mailbox is ids [T, heads] and out [T, heads · " +
                                  std::to_string(table.row_bytes) + "]");
    }
    return {request.data(),         done.data(), ids.data(), out.data(), static_cast<int>(rows),
            static_cast<int>(heads)};
  }

  std::vector<std::shared_ptr<void>> arrays_;
  NgramServer server_;
};

}  // namespace

static void bind_ngram_server(nb::module_& m) {
  nb::class_<BoundNgramServer>(m, "NgramServer",
                               "A thread that reads rows of a table when asked through words in memory.")
      .def(
          nb::init<Runtime&, Word, Word, Ids2d, Bytes2dOut, std::shared_ptr<NgramTable>>(), "runtime"_a,
          nb::arg("request").noconvert(), nb::arg("done").noconvert(), nb::arg("ids").noconvert(),
          nb::arg("out").noconvert(), "table"_a,
          "Over int32 ids [T, heads], -1 for none, and uint8 out [T, heads · bytes of a row], which are kept. A "
          "client zeroes `done`, then stores its rows to `request`; `done` becomes 1. `runtime` has the "
          "threads that read for a prompt.")
      .def("begin", &BoundNgramServer::begin, "Looks for requests from now on.")
      .def("end", &BoundNgramServer::end, "Pauses: no request comes before the next `begin`.")
      .def("check", &BoundNgramServer::check,
           "Raises the first error of a request since the last call: ValueError, GenerationFault.");
}

void bind_hybrid(nb::module_& m) {
  bind_ngram_server(m);
  nb::class_<BoundServer>(m, "ExpertServer",
                          "Threads that compute routed experts when asked through words in memory.")
      .def(nb::init<Runtime&, Word, Word, Rows2d, Ids2d, Rows3d, bool, std::optional<Words>>(), "runtime"_a,
           nb::arg("request").noconvert(), nb::arg("done").noconvert(), nb::arg("x").noconvert(),
           nb::arg("ids").noconvert(), nb::arg("out").noconvert(), "is_prefill"_a = false,
           nb::arg("ahead").noconvert().none() = nb::none(),
           "Over float32 x [T, E], int32 ids [T, K] and float32 out [T, K, E], which are kept. A client "
           "zeroes `done`, then stores (layer + 1) | rows << 16 to `request`; `done` becomes 1. Pairs of id "
           "-1 are left as they are. is_prefill: whether requests are those of prompts, which take few slots "
           "of a pool. ahead: uint32 words, at least one for each of K experts, in which the client may say "
           "what a layer will probably ask for.")
      .def(
          "add_layer", &BoundServer::add_layer, "gate"_a, "up"_a, "down"_a, "pool"_a.none() = nb::none(),
          "glu"_a.none() = nb::none(),
          "The experts of the next layer; returns its number. pool: the one that they are parts of, or None.")
      .def_prop_rw("awake_s", &BoundServer::awake_s, &BoundServer::stay_awake_for,
                   "Of a server for prompts: how long threads poll from `begin` and from each answer on, "
                   "before they sleep. 0 at first. Others' threads poll until `end`.")
      .def("begin", &BoundServer::begin, "Looks for requests from now on.")
      .def("end", &BoundServer::end, "Pauses: no request comes before the next `begin`.")
      .def("expected", &BoundServer::expected,
           "(experts that the client expected, those of them that it asked for, all that it asked for with "
           "one row) of each layer so far.")
      .def("read_ahead_bytes", &BoundServer::read_ahead_bytes,
           "Bytes of expected experts that were read ahead so far.")
      .def("work", &BoundServer::work,
           "(requests, pairs, seconds from a request to its answer) of each layer so far.")
      .def("check", &BoundServer::check,
           "Raises the first error of a request since the last call: ModelChangedError, ValueError, "
           "GenerationFault.");
}

}  // namespace coldstream
