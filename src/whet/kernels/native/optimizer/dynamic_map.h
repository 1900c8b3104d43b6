// The dynamic map of 8 bits (Dettmers et al. 2022, arXiv:2110.02861): seven decades, each with twice the values of the one
// below, evenly spaced; plus 0 and 1. Encoding and decoding are arithmetic: no table of 256 entries is read.
//
// Signed codes: sign bit and n; n = 0 is zero, n in [2^i, 2^(i+1)) decade i; 0x80, minus zero, represents 1.
// Unsigned codes: u = code + 1; u = 1 is zero, u in [2^(i+1), 2^(i+2)) decade i, u = 256 is one. A positive number never
// becomes zero there: a second moment of zero would mean no noise at all.
#pragma once

#include "vec.h"

namespace whet {
namespace WHET_ISA {

constexpr int kDecades = 7;

// Intrinsics, because GCC 12 splits these conversions into single elements.
WHET_INLINE VI load_codes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<VI>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<VI>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  VI codes;
  for (int i = 0; i < W; ++i) codes[i] = p[i];
  return codes;
#endif
}

WHET_INLINE void store_codes(uint8_t* p, VI codes) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
  const __m256i all = reinterpret_cast<__m256i>(codes);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
#else
  for (int i = 0; i < W; ++i) p[i] = static_cast<uint8_t>(codes[i]);
#endif
}

// One entry for each level: 0 for zero, i + 1 for decade i. Twice, because a wide vector uses four bits of an index.
struct Levels {
  float of[16];
  constexpr void put(int level, double value) { of[level] = of[level + 8] = static_cast<float>(value); }
};

// The low three bits of each number select an entry; higher bits do not matter.
WHET_INLINE VF look_up(const Levels& table, VI level) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(level), _mm512_loadu_ps(table.of));
#elif defined(__AVX2__)
  return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.of), reinterpret_cast<__m256i>(level));
#else
  VF found;
  for (int i = 0; i < W; ++i) found[i] = table.of[level[i] & 7];
  return found;
#endif
}

// decade i: 10^(i - 6) * (0.1 + 0.9 * (place + 0.5) / places), places = 2^i (signed) or 2^(i + 1) (unsigned).
struct DynamicMap {
  Levels slope, offset;  // decoding: value = slope * number + offset, the number being n or u
  Levels spread;         // encoding: spread * value + 8 / 9 is 1 + place / places, not yet rounded down
  Levels border;         // from border[level] on a value belongs to the next level: halfway between the nearest two codes
  float top;             // from here on it is 1
};

constexpr double power_of_ten(int i) { return i == 0 ? 1.0 : power_of_ten(i + 1) / 10.0; }  // i <= 0
constexpr double code_value(int i, double place, double places) {
  return power_of_ten(i - kDecades + 1) * (0.1 + 0.9 * (place + 0.5) / places);
}

// The tables of encoding begin with zero. Those of decoding have decade i at i + 1 for n; at i for u, by its exponent.
constexpr DynamicMap dynamic_map(bool is_signed) {
  DynamicMap map{};
  double last = 0.0;
  for (int i = 0; i < kDecades; ++i) {
    const double places = is_signed ? 1 << i : 2 << i, decade = power_of_ten(i - kDecades + 1);
    const int level = is_signed ? i + 1 : i;
    map.slope.put(level, 0.9 * decade / places);
    map.offset.put(level, decade * (0.1 - 0.9 + 0.45 / places));
    map.spread.put(i + 1, 1.0 / (0.9 * decade));
    map.border.put(i, 0.5 * (last + code_value(i, 0.0, places)));
    last = code_value(i, places - 1.0, places);
  }
  if (!is_signed) {
    map.slope.put(7, 1.0 / 255.0);  // u = 1 is 0, u = 256 is 1: the same low bits of the exponent
    map.offset.put(7, -1.0 / 255.0);
    map.border.put(0, 1.17549435e-38);  // the smallest normal number
  }
  map.border.put(kDecades, 2.0);  // never reached
  map.top = static_cast<float>(0.5 * (last + 1.0));
  return map;
}

constexpr DynamicMap kSigned = dynamic_map(true);
constexpr DynamicMap kUnsigned = dynamic_map(false);

WHET_INLINE VF decode_signed(VI code) {
  const VF n = __builtin_convertvector(code & 0x7F, VF);
  const VI exponent = (reinterpret_cast<VI>(n) >> 23) - 126;  // 1 for n = 1, which is decade 0; below 0 for n = 0
  const VI level = exponent > 0 ? exponent : VI{};
  const VF size = look_up(kSigned.slope, level) * n + look_up(kSigned.offset, level);
  const VI sign = (code & 0x80) << 24;
  const VF value = reinterpret_cast<VF>(reinterpret_cast<VI>(size) | sign);
  return select(code == 0x80, splat(1.0f), value);
}

WHET_INLINE VF decode_unsigned(VI code) {
  const VF u = __builtin_convertvector(code + 1, VF);
  const VI level = reinterpret_cast<VI>(u) >> 23;  // 128, whose low bits are 0, for u = 2, which is decade 0
  return look_up(kUnsigned.slope, level) * u + look_up(kUnsigned.offset, level);
}

// The level of y >= 0. The bits of a float are about its logarithm; of the level that they give or the next it is one.
WHET_INLINE VI level_of(const DynamicMap& map, VF y) {
  constexpr float kLog10Of2 = 0.30103f;
  const VF bits = __builtin_convertvector(reinterpret_cast<VI>(y), VF);
  const VF guess = bits * splat(kLog10Of2 / (1 << 23)) + splat(7.25f - 127.0f * kLog10Of2);
  const VI level = __builtin_convertvector(larger(guess, VF{}), VI);
  return level - (y >= look_up(map.border, level));
}

// 2^23 + 2^23 * place / places, rounded down; a value between two decades is rounded to the nearer end.
WHET_INLINE VI place_of(const DynamicMap& map, VF y, VI level) {
  const VF place = larger(look_up(map.spread, level) * y + splat(8.0f / 9.0f), splat(1.0f));
  const VF most = splat(1.99999988f);
  const VF held = place < most ? place : most;
  return (reinterpret_cast<VI>(held) & 0x7FFFFF) | 0x800000;
}

WHET_INLINE VI shifted_right(VI x, VI by) {
#if defined(__AVX512F__)
  return reinterpret_cast<VI>(_mm512_srlv_epi32(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(by)));
#else
  return x >> by;
#endif
}

// The nearest code of y in [-1, 1].
WHET_INLINE VI encode_signed(VF y) {
  const VF size = reinterpret_cast<VF>(reinterpret_cast<VI>(y) & 0x7FFFFFFF);
  const VI level = level_of(kSigned, size);
  const VI n = shifted_right(place_of(kSigned, size, level), 24 - level);
  const VI sign = reinterpret_cast<VI>(reinterpret_cast<VU>(y) >> 24) & 0x80;
  const VI code = n > 0 ? n | sign : n;
  return (y >= splat(kSigned.top)) ? splat_i(0x80) : code;
}

// The nearest code of y in [0, 1] that is not zero, unless y is.
WHET_INLINE VI encode_unsigned(VF y) {
  const VI level = level_of(kUnsigned, y);
  const VI u = shifted_right(place_of(kUnsigned, y, level), 23 - level);
  return (y >= splat(kUnsigned.top)) ? splat_i(255) : u - 1;
}

}  // namespace WHET_ISA
}  // namespace whet
