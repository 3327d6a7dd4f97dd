#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "sample/sampler.h"

namespace coldstream {

namespace {

using namespace nb::literals;
using Logits1d = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words1d = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A row and what becomes of it.
struct Choice {
  TokenSettings settings;
  Logits1d logits;
  std::optional<Logits1d> changed;
  std::optional<Words1d> allowed;
  std::optional<RankedTokens> ranked;
  ChosenToken chosen = {};
};

void check_ids(const std::vector<int32_t>& ids, int64_t vocab) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab) {
      throw std::invalid_argument("token " + std::to_string(id) + " is not of a vocabulary of " +
                                  std::to_string(vocab));
    }
  }
}

std::unique_ptr<Choice> make_choice(Logits1d logits, std::optional<Logits1d> changed, double temperature,
                                    int64_t top_k, double top_p, double min_p, float repetition_penalty,
                                    float presence_penalty, float frequency_penalty,
                                    std::vector<int32_t> recent, uint64_t seed, uint64_t position,
                                    std::vector<int32_t> biased, std::vector<float> biases,
                                    std::optional<Words1d> allowed, std::optional<int64_t> logprobs) {
  const auto vocab = int64_t(logits.shape(0));
  if (vocab < 1 || (changed && int64_t(changed->shape(0)) != vocab)) {
    throw std::invalid_argument("logits and changed must be of one vocabulary");
  }
  if (allowed && int64_t(allowed->shape(0)) != (vocab + mask_bits - 1) / mask_bits) {
    throw std::invalid_argument("allowed must have a bit for each of " + std::to_string(vocab) + " tokens");
  }
  if (biased.size() != biases.size()) throw std::invalid_argument("each of biased has one of biases");
  check_ids(recent, vocab);
  check_ids(biased, vocab);
  std::sort(recent.begin(), recent.end());
  auto made = std::make_unique<Choice>();
  made->settings = {temperature,
                    top_p,
                    min_p,
                    seed,
                    position,
                    repetition_penalty,
                    presence_penalty,
                    frequency_penalty,
                    top_k,
                    changed.has_value(),
                    std::move(recent),
                    std::move(biased),
                    std::move(biases),
                    allowed ? allowed->data() : nullptr};
  if (logprobs) {
    made->ranked.emplace();
    made->ranked->likeliest.resize(std::clamp<int64_t>(*logprobs, 0, vocab));
  }
  made->logits = std::move(logits);
  made->changed = std::move(changed);
  made->allowed = std::move(allowed);
  return made;
}

TokenRow row_of(Choice& each) {
  return {each.logits.data(), each.changed ? each.changed->data() : nullptr, &each.settings, &each.chosen,
          each.ranked ? &*each.ranked : nullptr};
}

void choose_tokens(const std::vector<Choice*>& choices) {
  if (choices.empty()) return;
  const auto vocab = int64_t(choices[0]->logits.shape(0));
  std::vector<TokenRow> rows;
  for (Choice* each : choices) {
    if (int64_t(each->logits.shape(0)) != vocab) throw std::invalid_argument("rows are of one vocabulary");
    rows.push_back(row_of(*each));
  }
  nb::gil_scoped_release unlocked;
  const auto bytes = std::make_unique_for_overwrite<std::byte[]>(RowMemory::num_bytes(vocab));
  const RowMemory memory(bytes.get(), vocab);
  for (const TokenRow& row : rows) finish_row(row, vocab, memory);
}

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::class_<Choice>(m, "TokenChoice", "A row of logits, what determines the token after it, and that token.")
      .def(nb::new_(&make_choice), "logits"_a.noconvert(), "changed"_a.noconvert().none(), nb::kw_only(),
           "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a, "presence_penalty"_a,
           "frequency_penalty"_a, "recent"_a, "seed"_a, "position"_a, "biased"_a, "biases"_a,
           "allowed"_a.noconvert().none(), "logprobs"_a.none(),
           "logits, changed: float32 [vocab], contiguous, which it keeps; with `changed` the token is chosen "
           "from these, which need not be finite. allowed: uint32 [ceil(vocab / 32)], which it keeps, a bit "
           "for each token that may be chosen; None: all may. ValueError for tokens outside of the "
           "vocabulary.")
      .def_prop_ro("token", [](const Choice& each) { return each.chosen.token; })
      .def_prop_ro(
          "fault", [](const Choice& each) { return each.chosen.fault; },
          "0, or how many logits are not finite, or -1 if the best one is not once all are changed.")
      .def_prop_ro(
          "ranked",
          [](const Choice& each) {
            const RankedTokens& ranked = each.ranked.value();
            return std::make_tuple(ranked.likeliest, ranked.rank, ranked.total);
          },
          "Of the logits: the likeliest tokens by rank, the rank of the chosen one, and the weight of all at "
          "temperature 1. Only with `logprobs`.");
  m.def("choose_tokens", &choose_tokens, "choices"_a,
        "Chooses the token of each row, as decoding.sampling defines it. ValueError for rows of different "
        "vocabularies.");
}

}  // namespace coldstream
