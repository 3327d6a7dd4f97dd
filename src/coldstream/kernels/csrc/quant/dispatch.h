// From a type known at run time to a template instance.
#pragma once

#include "quant/weight.h"

namespace coldstream {

// Calls f.template operator()<Q>() for a quantised type Q; the caller has checked quant_is_integer.
template <typename F>
static inline void dispatch_integer(QuantType type, F&& f) {
  switch (type) {
#define COLDSTREAM_CASE(name) \
  case QuantType::name:       \
    return f.template operator()<QuantType::name>();
    COLDSTREAM_CASE(q4_0)
    COLDSTREAM_CASE(q4_1)
    COLDSTREAM_CASE(q5_0)
    COLDSTREAM_CASE(q5_1)
    COLDSTREAM_CASE(q8_0)
    COLDSTREAM_CASE(q2_0)
    COLDSTREAM_CASE(iq4_nl)
    COLDSTREAM_CASE(mxfp4)
    COLDSTREAM_CASE(q2_k)
    COLDSTREAM_CASE(q3_k)
    COLDSTREAM_CASE(q4_k)
    COLDSTREAM_CASE(q5_k)
    COLDSTREAM_CASE(q6_k)
    COLDSTREAM_CASE(tq2_0)
    COLDSTREAM_CASE(iq4_xs)
    COLDSTREAM_CASE(iq2_xxs)
    COLDSTREAM_CASE(iq2_xs)
    COLDSTREAM_CASE(iq2_s)
    COLDSTREAM_CASE(iq3_xxs)
    COLDSTREAM_CASE(iq3_s)
    COLDSTREAM_CASE(iq1_s)
    COLDSTREAM_CASE(iq1_m)
#undef COLDSTREAM_CASE
    default:
      __builtin_unreachable();
  }
}

}  // namespace coldstream
