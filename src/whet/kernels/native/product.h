// Small matrix products out of cache: C (m, n) = or += A (m, depth) B (depth, n), for the blocks of attention.
//
// B and C are rows of n floats, n a multiple of W, with leading dimensions ldb and ldc. A may lie either way: element
// (i, k) is a[i * row + k * col]. Tiles of rows x (NV vectors) stay in registers over the whole depth; narrow ones are
// taller, so that each value that is read serves as many sums.
#pragma once

#include "vec.h"

namespace whet {
namespace WHET_ISA {

constexpr int kTileVectors = kRegisters == 32 ? 4 : 2;
constexpr int tile_rows(int n_vectors) { return kRegisters == 32 && n_vectors <= 2 ? 12 : 6; }

struct Left {
  const float* a;
  int64_t row, col;
};

struct Block {
  float* data;
  int64_t ld;
};

template <int M, int NV>
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
      const VF left = splat(l.a[i * l.row + k * l.col]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(c.data + i * c.ld + j * W, sum[i][j]);
}

// All rows that M-high tiles can serve; the rest is left to lower ones.
template <int M, int NV>
static inline void rows_of_tiles(int64_t& m, Left& l, const float* b, int64_t ldb, Block& c, int64_t depth, bool add) {
  for (; m >= M; m -= M) {
    tile<M, NV>(l, b, ldb, c, depth, add);
    l.a += M * l.row;
    c.data += M * c.ld;
  }
}

template <int NV>
static void panel(int64_t m, Left l, const float* b, int64_t ldb, Block c, int64_t depth, bool add) {
  rows_of_tiles<tile_rows(NV), NV>(m, l, b, ldb, c, depth, add);
  rows_of_tiles<4, NV>(m, l, b, ldb, c, depth, add);
  rows_of_tiles<2, NV>(m, l, b, ldb, c, depth, add);
  rows_of_tiles<1, NV>(m, l, b, ldb, c, depth, add);
}

struct Size {
  int64_t m, n, depth;
};

static inline void product(Size s, Left l, const float* b, int64_t ldb, Block c, bool add) {
  int64_t j = 0;
  for (; j + kTileVectors * W <= s.n; j += kTileVectors * W)
    panel<kTileVectors>(s.m, l, b + j, ldb, {c.data + j, c.ld}, s.depth, add);
  for (; j + 2 * W <= s.n; j += 2 * W) panel<2>(s.m, l, b + j, ldb, {c.data + j, c.ld}, s.depth, add);
  for (; j < s.n; j += W) panel<1>(s.m, l, b + j, ldb, {c.data + j, c.ld}, s.depth, add);
}

}  // namespace WHET_ISA
}  // namespace whet
