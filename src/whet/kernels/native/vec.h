// A vector of floats as wide as the instruction set of this translation unit allows, and what the kernels do with one.
// Every name lives in namespace whet::WHET_ISA, so that the copies for several instruction sets do not collide in the linker.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef WHET_ISA
#error "compile with -DWHET_ISA=<name of the instruction set>"
#endif

#define WHET_INLINE static inline __attribute__((always_inline))
#define WHET_INLINE_MEMBER inline __attribute__((always_inline))

namespace whet {
namespace WHET_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#elif defined(__ARM_NEON)
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif
constexpr int W = kVectorBytes / 4;  // floats in a vector

typedef float VF __attribute__((vector_size(kVectorBytes)));
typedef int32_t VI __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VU __attribute__((vector_size(kVectorBytes)));
typedef uint64_t VL __attribute__((vector_size(kVectorBytes)));
typedef uint16_t VH __attribute__((vector_size(kVectorBytes / 2)));

// The same types without a promise of alignment, for memory of other owners.
typedef float VFMem __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef uint32_t VUMem __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef uint16_t VHMem __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

WHET_INLINE VF splat(float x) { return x - VF{}; }
WHET_INLINE VU splat_u(uint32_t x) { return x + VU{}; }
WHET_INLINE VI splat_i(int32_t x) { return x + VI{}; }
WHET_INLINE VF select(VI take_first, VF first, VF second) { return take_first ? first : second; }

// a > b ? a : b in every lane, so b where one is NaN; compilers do not select the instruction.
WHET_INLINE VF larger(VF a, VF b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

WHET_INLINE VI lane_numbers() {
  VI lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i;
  return lanes;
}

// ---- memory: fp32 or bf16 storage, fp32 in registers ----

WHET_INLINE VF load(const float* p) { return *reinterpret_cast<const VFMem*>(p); }
WHET_INLINE VU load(const uint32_t* p) { return *reinterpret_cast<const VUMem*>(p); }
WHET_INLINE void store(float* p, VF x) { *reinterpret_cast<VFMem*>(p) = x; }
WHET_INLINE void store(uint32_t* p, VU x) { *reinterpret_cast<VUMem*>(p) = x; }

WHET_INLINE VF load(const bf16* p) {
#if defined(__AVX512F__)  // GCC widens by halves
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return reinterpret_cast<VF>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#else
  const VH half = *reinterpret_cast<const VHMem*>(p);
  return reinterpret_cast<VF>(__builtin_convertvector(half, VU) << 16);
#endif
}

// Round to nearest, ties to even; a NaN stays a (quiet) NaN. The processor's own instruction takes what is below 2^-126
// for zero.
WHET_INLINE void store(bf16* p, VF x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &half, sizeof half);
#else
  const VU bits = reinterpret_cast<VU>(x);
  const VU rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const VU kept = (x == x) ? rounded : ((bits >> 16) | 0x40u);
#if defined(__AVX512F__)  // GCC shuffles
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(kept)));
#else
  *reinterpret_cast<VHMem*>(p) = __builtin_convertvector(kept, VH);
#endif
#endif
}

// The first n < W lanes; the others read as zero and are not written.
template <class T>
WHET_INLINE VF load_some(const T* p, int n) {
  T lanes[W] = {};
  std::memcpy(lanes, p, sizeof(T) * n);
  return load(lanes);
}

template <class T>
WHET_INLINE void store_some(T* p, VF x, int n) {
  T lanes[W];
  store(lanes, x);
  std::memcpy(p, lanes, sizeof(T) * n);
}

// What one value becomes when it is stored as T and read back.
WHET_INLINE VF rounded_to(VF x, const float*) { return x; }
WHET_INLINE VF rounded_to(VF x, const bf16*) {
  bf16 lanes[W];
  store(lanes, x);
  return load(lanes);
}

// Calls body(first, n) for each full vector and once for the rest, so that tails need no extra code.
template <class Body>
WHET_INLINE void for_vectors(int64_t width, Body body) {
  int64_t c = 0;
  for (; c + W <= width; c += W) body(c, W);
  if (c < width) body(c, static_cast<int>(width - c));
}

template <class T>
WHET_INLINE VF get(const T* p, int n) {
  return n == W ? load(p) : load_some(p, n);
}

template <class T>
WHET_INLINE void put(T* p, VF x, int n) {
  if (n == W)
    store(p, x);
  else
    store_some(p, x, n);
}

// ---- reductions ----

typedef float V4 __attribute__((vector_size(16)));
typedef float V4Mem __attribute__((vector_size(16), aligned(4), may_alias));

// Four of the eight floats of a and b, numbered 0..3 and 4..7 (GCC has the first form since version 12).
#if defined(__clang__) || __GNUC__ >= 12
#define WHET_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t I4 __attribute__((vector_size(16)));
#define WHET_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I4{__VA_ARGS__})
#endif

WHET_INLINE float sum_of(V4 x) {
  const V4 pairs = x + WHET_SHUFFLE(x, x, 2, 3, 0, 1);
  return pairs[0] + pairs[1];
}

WHET_INLINE float max_of(V4 x) {
  const V4 other = WHET_SHUFFLE(x, x, 2, 3, 0, 1);
  const V4 pairs = x > other ? x : other;
  return pairs[0] > pairs[1] ? pairs[0] : pairs[1];
}

struct Quarters {
  V4 part[W / 4];
};

WHET_INLINE float lane_sum(VF x) {
  Quarters q;
  std::memcpy(&q, &x, sizeof x);
  for (int n = W / 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) q.part[i] += q.part[i + n];
  return sum_of(q.part[0]);
}

WHET_INLINE float lane_max(VF x) {
  Quarters q;
  std::memcpy(&q, &x, sizeof x);
  for (int n = W / 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) q.part[i] = q.part[i] > q.part[i + n] ? q.part[i] : q.part[i + n];
  return max_of(q.part[0]);
}

// ---- operations that the compiler's vector extension lacks ----

WHET_INLINE VF square_root(VF x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(x);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(x);
#elif defined(__aarch64__)
  return vsqrtq_f32(x);
#else
  for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// The 64-bit products of the low 32 bits of each 64-bit lane; the high bits do not matter.
WHET_INLINE VL multiply_low_words(VL a, VL b) {
#if defined(__AVX512F__)
  return reinterpret_cast<VL>(_mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<VL>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<VL>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#elif defined(__aarch64__)
  return reinterpret_cast<VL>(vmull_u32(vmovn_u64(reinterpret_cast<uint64x2_t>(a)),
                                        vmovn_u64(reinterpret_cast<uint64x2_t>(b))));
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

}  // namespace WHET_ISA
}  // namespace whet
