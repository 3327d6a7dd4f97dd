// Instruction-set tiers. A tier is chosen once per runtime and all tiers give the same bits (see
// docs/arithmetic.md), so the choice changes the speed only.
#pragma once

namespace coldstream {

// neon and dotprod, which is NEON with products of bytes, are those of AArch64; generic is of every machine,
// and the others of x86-64.
enum class Tier : int { generic = 0, avx2 = 1, avx_vnni = 2, avx512 = 3, amx = 4, neon = 5, dotprod = 6 };

// All of them; of one machine's, each is faster than those before it.
inline constexpr Tier tiers[] = {Tier::generic, Tier::avx2, Tier::avx_vnni, Tier::avx512,
                                 Tier::amx,     Tier::neon, Tier::dotprod};

// The best tier that this machine (CPU and, for amx, kernel permission) can run.
Tier tier_best();
bool tier_supported(Tier t);
const char* tier_name(Tier t);
// Throws std::invalid_argument naming the known tiers.
Tier tier_from_name(const char* name);

}  // namespace coldstream
