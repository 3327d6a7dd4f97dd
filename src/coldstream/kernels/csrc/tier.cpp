#include "tier.h"

#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace coldstream {

namespace {

constexpr const char* names[] = {"generic", "avx2", "avx512", "amx"};

#if defined(__x86_64__)

// The compiler's own detection reads cpuid and, for the wide registers, XCR0: an operating system that does
// not save them counts as a CPU without them.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
}

// cpuid 7.0: EDX bit 24 is AMX-TILE, bit 25 is AMX-INT8. The tile registers are 8 KiB a thread, so Linux
// grants them only to a process that asks; the permission covers every thread started afterwards.
#if defined(COLDSTREAM_EMULATE_AMX)
bool has_amx() { return has_avx512(); }
#else
bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx >> 24 & 3) != 3) return false;
  constexpr long arch_req_xcomp_perm = 0x1023, xfeature_xtiledata = 18;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
}
#endif

#else

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_amx() { return false; }

#endif

}  // namespace

bool tier_supported(Tier t) {
  switch (t) {
    case Tier::generic:
      return true;
    case Tier::avx2:
      return has_avx2();
    case Tier::avx512:
      return has_avx512();
    case Tier::amx:
      return has_amx();
  }
  return false;
}

Tier tier_best() {
  for (Tier t : {Tier::amx, Tier::avx512, Tier::avx2}) {
    if (tier_supported(t)) return t;
  }
  return Tier::generic;
}

const char* tier_name(Tier t) { return names[static_cast<int>(t)]; }

Tier tier_from_name(const char* name) {
  for (int i = 0; i < 4; i++) {
    if (std::strcmp(name, names[i]) == 0) return static_cast<Tier>(i);
  }
  throw std::invalid_argument(std::string("unknown tier '") + name +
                              "': use generic, avx2, avx512, amx or auto");
}

}  // namespace coldstream
