// Small matrix products out of cache: C (m, n) = or += A (m, depth) B (depth, n), for the blocks of attention.
//
// B and C are rows of n 32-bit units, n a multiple of W, with leading dimensions ldb and ldc. A may have either layout:
// element (i, k) is a[i * row + k * col]. Tiles of rows x (NV vectors) stay in registers over the
// complete depth; narrow ones are taller, so that each value that is read is used in as many sums.
#pragma once

#include <type_traits>

#include "vec.h"

namespace whet {
namespace WHET_ISA {

// A unit of A and B: one float, or two bf16 of neighbouring depths. C is fp32.
struct Singles {
  static constexpr int64_t n = 1;
  WHET_INLINE_MEMBER static VF multiply_add(VF sum, VF a, VF b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int64_t n = 2;
  WHET_INLINE_MEMBER static VF multiply_add(VF sum, VF a, VF b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

// fp32, and bf16 on processors without its dot product, are fp32 in products. Elsewhere bf16 stays bf16, two to a unit.
#if defined(__AVX512BF16__)
template <class T>
using UnitOf = typename std::conditional<std::is_same<T, bf16>::value, Pairs, Singles>::type;
#else
template <class T>
using UnitOf = Singles;
#endif

template <class T>
constexpr bool kPaired = UnitOf<T>::n == 2;

// Units that hold n elements.
template <class T>
inline int64_t units(int64_t n) {
  return (n + UnitOf<T>::n - 1) / UnitOf<T>::n;
}

constexpr int kTileVectors = kRegisters == 32 ? 4 : 2;
constexpr int tile_rows(int n_vectors) {
  return kRegisters == 16 || n_vectors == 4 ? 6 : n_vectors == 3 ? 8 : 12;
}

struct Left {
  const float* a;
  int64_t row, col;
};

struct Block {
  float* data;
  int64_t ld;
};

// The unit at p in every lane, bit by bit: two bf16 are not a float.
WHET_INLINE VF splat_unit(const float* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return reinterpret_cast<VF>(splat_u(bits));
}

template <class Unit, int M, int NV>
static inline void tile(Left l, const float* b, int64_t ldb, Block c, int64_t depth, bool add) {
  VF sum[M][NV];
#pragma GCC unroll 12
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) sum[i][j] = add ? load(c.data + i * c.ld + j * W) : VF{};
  for (int64_t k = 0; k < depth; ++k) {
    VF right[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) right[j] = load(b + k * ldb + j * W);
#pragma GCC unroll 12
    for (int i = 0; i < M; ++i) {
      const VF left = splat_unit(l.a + i * l.row + k * l.col);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sum[i][j] = Unit::multiply_add(sum[i][j], left, right[j]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(c.data + i * c.ld + j * W, sum[i][j]);
}

// All rows that fill tiles of height M; lower tiles compute the rest.
template <class Unit, int M, int NV>
static inline void rows_of_tiles(int64_t& m, Left& l, const float* b, int64_t ldb, Block& c, int64_t depth, bool add) {
  for (; m >= M; m -= M) {
    tile<Unit, M, NV>(l, b, ldb, c, depth, add);
    l.a += M * l.row;
    c.data += M * c.ld;
  }
}

template <class Unit, int NV>
static void panel(int64_t m, Left l, const float* b, int64_t ldb, Block c, int64_t depth, bool add) {
  rows_of_tiles<Unit, tile_rows(NV), NV>(m, l, b, ldb, c, depth, add);
  if (tile_rows(NV) > 8) rows_of_tiles<Unit, 8, NV>(m, l, b, ldb, c, depth, add);
  rows_of_tiles<Unit, 4, NV>(m, l, b, ldb, c, depth, add);
  rows_of_tiles<Unit, 2, NV>(m, l, b, ldb, c, depth, add);
  rows_of_tiles<Unit, 1, NV>(m, l, b, ldb, c, depth, add);
}

// depth counts units.
struct Size {
  int64_t m, n, depth;
};

template <class Unit>
static inline void product(Size s, Left l, const float* b, int64_t ldb, Block c, bool add) {
  int64_t j = 0;
  for (; j + kTileVectors * W <= s.n; j += kTileVectors * W)
    panel<Unit, kTileVectors>(s.m, l, b + j, ldb, {c.data + j, c.ld}, s.depth, add);
  const int64_t rest = (s.n - j) / W;
  b += j;
  c.data += j;
  if (rest == 3) panel<Unit, 3>(s.m, l, b, ldb, c, s.depth, add);
  if (rest == 2) panel<Unit, 2>(s.m, l, b, ldb, c, s.depth, add);
  if (rest == 1) panel<Unit, 1>(s.m, l, b, ldb, c, s.depth, add);
}

}  // namespace WHET_ISA
}  // namespace whet
