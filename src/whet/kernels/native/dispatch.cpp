// Chooses the best instruction set of this processor: Python calls the operators of that set.
#include <cstdlib>
#include <cstring>

#include "operator.h"

#ifdef WHET_BF16
#include <cpuid.h>
#endif

namespace whet {
namespace {

struct Isa {
  const char* name;
  const char* operators;  // what the names of its functions begin with
};

#ifdef WHET_X86
bool supports_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}

bool supports_v4() {
  return supports_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#ifdef WHET_BF16
// Intel's cores since Sapphire Rapids multiply pairs of bf16 at half the rate at which they multiply fp32, which is
// therefore the faster format for values that are in registers: attention takes 1.5 times as long in pairs
// (benchmarks/cpu/operators.py). These cores are those of Intel's that have AVX-512 FP16.
bool pairs_are_slow() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_is("intel") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 23 & 1);
}
#endif

// The operators of x86-64-v4. With bf16 instructions if the compiler knows and the processor has them: where they are
// asked for, or are the faster ones and not left out.
const char* of_v4([[maybe_unused]] const char* most) {
#ifdef WHET_BF16
  const bool asked = most && std::strcmp(most, "v4_bf16") == 0, left_out = most && std::strcmp(most, "v4") == 0;
  const bool wanted = asked || (!left_out && !pairs_are_slow());
  if (wanted && __builtin_cpu_supports("avx512bf16")) return "x86_64_v4_bf16";
#endif
  return "x86_64_v4";
}
#endif

// WHET_ISA names the best set that may be used: v4_bf16, v4 (without bf16 instructions), v3 or baseline. Sets that the
// processor lacks are never used.
Isa choose() {
#ifdef WHET_X86
  const char* most = std::getenv("WHET_ISA");
  const bool v3_allowed = !most || std::strcmp(most, "baseline") != 0;
  const bool v4_allowed = v3_allowed && (!most || std::strcmp(most, "v3") != 0);
  if (v4_allowed && supports_v4()) return {"x86-64-v4", of_v4(most)};
  if (v3_allowed && supports_v3()) return {"x86-64-v3", "x86_64_v3"};
  return {"x86-64", "baseline"};
#elif defined(__ARM_NEON)
  return {"neon", "baseline"};
#else
  return {"baseline", "baseline"};
#endif
}

const Isa& chosen() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace
}  // namespace whet

extern "C" {
WHET_EXPORT const char* whet_isa() { return whet::chosen().name; }
WHET_EXPORT const char* whet_operators() { return whet::chosen().operators; }
WHET_EXPORT const char* whet_sources() { return WHET_SOURCES; }
}
