// The C interface of the library: each operator runs in the best instruction set of this processor.
#include <cstdlib>
#include <cstring>

#include "args.h"

#ifdef WHET_BF16
#include <cpuid.h>
#endif

#define WHET_EXPORT extern "C" __attribute__((visibility("default")))

namespace whet {

#define WHET_TABLE(name)        \
  namespace name {              \
  extern const Table table;     \
  }
#ifdef WHET_X86
WHET_TABLE(x86_64_v4)
WHET_TABLE(x86_64_v3)
#endif
#ifdef WHET_BF16
WHET_TABLE(x86_64_v4_bf16)
#endif
WHET_TABLE(baseline)

namespace {

struct Isa {
  const char* name;
  const Table* table;
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
const Table* of_v4([[maybe_unused]] const char* most) {
#ifdef WHET_BF16
  const bool asked = most && std::strcmp(most, "v4_bf16") == 0, left_out = most && std::strcmp(most, "v4") == 0;
  const bool wanted = asked || (!left_out && !pairs_are_slow());
  if (wanted && __builtin_cpu_supports("avx512bf16")) return &x86_64_v4_bf16::table;
#endif
  return &x86_64_v4::table;
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
  if (v3_allowed && supports_v3()) return {"x86-64-v3", &x86_64_v3::table};
  return {"x86-64", &baseline::table};
#elif defined(__ARM_NEON)
  return {"neon", &baseline::table};
#else
  return {"baseline", &baseline::table};
#endif
}

const Isa& chosen() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace
}  // namespace whet

WHET_EXPORT const char* whet_isa() { return whet::chosen().name; }

#define WHET_ENTRY_POINT(name, Args)                                                       \
  WHET_EXPORT void whet_##name(const whet::Args* args) { whet::chosen().table->name(*args); } \
  WHET_EXPORT size_t whet_sizeof_##name() { return sizeof(whet::Args); }
WHET_OPERATORS(WHET_ENTRY_POINT)
