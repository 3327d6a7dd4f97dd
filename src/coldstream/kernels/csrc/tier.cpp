#include "tier.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace coldstream {

namespace {

constexpr const char* names[] = {"generic", "avx2", "avx_vnni", "avx512", "amx", "neon", "dotprod"};

#if defined(__x86_64__)

// What cpuid says of leaves 1 and 7, and which registers the operating system saves (XCR0): one that does not
// save the wide ones counts as a CPU without them. `__builtin_cpu_supports` would do, but Zig's library
// answers no to everything.
struct Features {
  unsigned leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, saved = 0;

  Features() {
    unsigned eax, ebx, edx, unused;
    if (!__get_cpuid(1, &eax, &ebx, &leaf1_ecx, &edx) || !(leaf1_ecx & bit_OSXSAVE)) return;
    asm volatile("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    __get_cpuid_count(7, 0, &eax, &leaf7_ebx, &leaf7_ecx, &edx);
  }
};

bool has_all(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

bool has_avx2(const Features& cpu) {
  constexpr unsigned vectors = 0x6;  // of 16 and of 32 bytes
  return has_all(cpu.saved, vectors) && has_all(cpu.leaf1_ecx, bit_AVX | bit_FMA | bit_F16C) &&
         has_all(cpu.leaf7_ebx, bit_AVX2 | bit_BMI2);
}

bool has_avx2() { return has_avx2(Features()); }

// cpuid 7.1: EAX bit 4 is AVX-VNNI.
bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}

bool has_avx512() {
  constexpr unsigned masks_and_vectors = 0xe0;  // and the upper 16 vectors
  const Features cpu;
  return has_avx2(cpu) && has_all(cpu.saved, masks_and_vectors) &&
         has_all(cpu.leaf7_ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL) &&
         has_all(cpu.leaf7_ecx, bit_AVX512VNNI | bit_AVX512VBMI);
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
bool has_avx_vnni() { return false; }
bool has_avx512() { return false; }
bool has_amx() { return false; }

#endif

#if defined(__aarch64__)
bool has_neon() { return true; }  // which compilers take for granted
bool has_dotprod() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#else
bool has_neon() { return false; }
bool has_dotprod() { return false; }
#endif

}  // namespace

bool tier_supported(Tier t) {
  switch (t) {
    case Tier::generic:
      return true;
    case Tier::avx2:
      return has_avx2();
    case Tier::avx_vnni:
      return has_avx_vnni();
    case Tier::avx512:
      return has_avx512();
    case Tier::amx:
      return has_amx();
    case Tier::neon:
      return has_neon();
    case Tier::dotprod:
      return has_dotprod();
  }
  return false;
}

Tier tier_best() { return *std::find_if(std::rbegin(tiers), std::rend(tiers), tier_supported); }

const char* tier_name(Tier t) { return names[static_cast<int>(t)]; }

Tier tier_from_name(const char* name) {
  for (Tier t : tiers) {
    if (std::strcmp(name, tier_name(t)) == 0) return t;
  }
  throw std::invalid_argument(std::string("unknown tier '") + name +
                              "': use generic, avx2, avx_vnni, avx512, amx, neon, dotprod or auto");
}

}  // namespace coldstream
