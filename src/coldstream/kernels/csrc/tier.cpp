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

constexpr const char* NAMES[] = {"generic", "avx2", "avx512", "amx"};

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
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

#else

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_amx() { return false; }

#endif

}  // namespace

bool tier_supported(tier t) {
  switch (t) {
    case tier::generic:
      return true;
    case tier::avx2:
      return has_avx2();
    case tier::avx512:
      return has_avx512();
    case tier::amx:
      return has_amx();
  }
  return false;
}

tier tier_best() {
  for (tier t : {tier::amx, tier::avx512, tier::avx2}) {
    if (tier_supported(t)) return t;
  }
  return tier::generic;
}

const char* tier_name(tier t) { return NAMES[static_cast<int>(t)]; }

tier tier_from_name(const char* name) {
  for (int i = 0; i < 4; i++) {
    if (std::strcmp(name, NAMES[i]) == 0) return static_cast<tier>(i);
  }
  throw std::invalid_argument(std::string("unknown tier '") + name +
                              "': use generic, avx2, avx512, amx or auto");
}

}  // namespace coldstream
