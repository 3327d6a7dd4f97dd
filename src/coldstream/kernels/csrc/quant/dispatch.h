// From a type known at run time to a template instance.
#pragma once

#include <utility>

#include "quant/blocks.h"

namespace coldstream {

// Calls f.template operator()<Q>() for a quantised type Q; the caller has checked quant_is_integer.
template <typename F>
static inline void dispatch_integer(QuantType type, F&& f) {
  const auto call = [&]<QuantType Q>() {
    if constexpr (quant_is_integer(Q)) {
      if (type == Q) f.template operator()<Q>();
    }
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (call.template operator()<quant_geometries[i].type>(), ...);
  }(std::make_index_sequence<std::size(quant_geometries)>());
}

}  // namespace coldstream
