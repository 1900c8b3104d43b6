// Sums of four products of bytes in each 32-bit lane: with VNNI if the processor has it, else in pairs of 16 bits. Both
// are exact, so the instruction set never changes a result.
#pragma once

#include "vec.h"

// Functions that may run only after a check of the processor; the rest of the file needs only its instruction set.
#if defined(__AVX512BW__)
#define WHET_HAS_VNNI 1
#define WHET_VNNI __attribute__((target("avx512vnni")))
#elif defined(__AVX2__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define WHET_HAS_VNNI 1
#define WHET_VNNI __attribute__((target("avxvnni")))
#else
#define WHET_HAS_VNNI 0
#define WHET_VNNI
#endif

namespace whet {
namespace WHET_ISA {

inline bool processor_has_vnni() {
#if defined(__AVX512BW__)
  return __builtin_cpu_supports("avx512vnni");
#elif WHET_HAS_VNNI
  return __builtin_cpu_supports("avxvnni");
#else
  return false;
#endif
}

#if WHET_HAS_VNNI
struct Vnni {
  // sum + the products of each lane's four bytes, unsigned on the left, with the four signed bytes of `right`.
  static WHET_INLINE_MEMBER WHET_VNNI VI dot(VI sum, VI left, int32_t right) {
#if defined(__AVX512BW__)
    return reinterpret_cast<VI>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(left),
                                                    _mm512_set1_epi32(right)));
#else
    return reinterpret_cast<VI>(_mm256_dpbusd_avx_epi32(
        reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(left), _mm256_set1_epi32(right)));
#endif
  }
};
#endif

// The products of neighbouring signed 16-bit lanes, added in pairs.
WHET_INLINE VI pairs(VI a, VI b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<VI>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<VI>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<VI>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

struct Plain16 {
  static WHET_INLINE_MEMBER VI dot(VI sum, VI left, int32_t right) {
    const VI bytes = splat_i(right), low = splat_i(0x00FF00FF);
    const VI even = (bytes << 24 >> 24 & 0xFFFF) | (bytes << 8 >> 24 << 16);
    const VI odd = (bytes << 16 >> 24 & 0xFFFF) | (bytes >> 24 << 16);
    return sum + pairs(left & low, even) + pairs((left >> 8) & low, odd);
  }
};

}  // namespace WHET_ISA
}  // namespace whet
