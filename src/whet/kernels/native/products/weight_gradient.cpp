// The gradient of a linear layer's weight, and of its bias: dW (out, in) = dY' X, db (out) = the columns' sums of dY.
//
// Both matrices are rows of tokens, so the product runs over their rows: a tile of dW stays in registers while the
// tokens are read (Goto and van de Geijn 2008, with packing). Each element is summed in the order of the tokens, one block
// of kDepth after the other, for any number of threads.
#include <algorithm>
#include <numeric>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "operators.h"
#include "scratch.h"
#include "vec.h"

namespace whet {
namespace WHET_ISA {
namespace {

constexpr int kRows = kRegisters == 32 ? 14 : 6;  // of dW, in registers
constexpr int kWide = 2 * W;                      // columns of dW, in registers
constexpr int64_t kDepth = 384;                   // tokens per block
constexpr int64_t kColumns = 384;                 // columns of dW whose block of X stays in the second-level cache
constexpr int kStrips = 8;                        // strips of kRows rows that are packed at a time: full cache lines

// Columns [first, first + n) of rows of `width` floats, `Lanes` side by side for each token, zeros after the n-th.
template <int Lanes>
void pack(const float* from, int64_t width, int64_t tokens, int n, float* to) {
  if (n == Lanes) {
    for (int64_t t = 0; t < tokens; ++t) std::memcpy(to + t * Lanes, from + t * width, Lanes * sizeof(float));
    return;
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int i = 0; i < Lanes; ++i) to[t * Lanes + i] = i < n ? from[t * width + i] : 0.0f;
}

struct Tile {
  float* data;
  int64_t ld;
  int rows, columns;
};

// Like pack, for up to kStrips neighbouring strips of kRows columns, stored one after the other.
void pack_strips(const float* from, int64_t width, int64_t tokens, int64_t n, float* to) {
  const int64_t strips = (n + kRows - 1) / kRows;
  if (n < strips * kRows) {
    for (int64_t s = 0; s < strips; ++s)
      pack<kRows>(from + s * kRows, width, tokens, static_cast<int>(std::min<int64_t>(kRows, n - s * kRows)),
                  to + s * kDepth * kRows);
    return;
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t s = 0; s < strips; ++s)
      std::memcpy(to + (s * kDepth + t) * kRows, from + t * width + s * kRows, kRows * sizeof(float));
}

// c = (or +=) left' right over the tokens of a block; left has kRows floats per token, right kWide.
void multiply(const float* left, const float* right, int64_t tokens, Tile c, bool add) {
  VF sum[kRows][2] = {};
  if (add)
    for (int i = 0; i < c.rows; ++i) {
      __builtin_prefetch(c.data + i * c.ld, 1);
      __builtin_prefetch(c.data + i * c.ld + W, 1);
    }
  for (int64_t t = 0; t < tokens; ++t, left += kRows, right += kWide) {
    const VF first = load(right), second = load(right + W);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const VF value = splat(left[i]);
      sum[i][0] += value * first;
      sum[i][1] += value * second;
    }
  }
  if (c.rows == kRows && c.columns == kWide) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      float* row = c.data + i * c.ld;
      store(row, add ? load(row) + sum[i][0] : sum[i][0]);
      store(row + W, add ? load(row + W) + sum[i][1] : sum[i][1]);
    }
    return;
  }
  float lanes[kRows * kWide];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    store(lanes + i * kWide, sum[i][0]);
    store(lanes + i * kWide + W, sum[i][1]);
  }
  for (int i = 0; i < c.rows; ++i)
    for (int j = 0; j < c.columns; ++j) {
      float* at = c.data + i * c.ld + j;
      *at = add ? *at + lanes[i * kWide + j] : lanes[i * kWide + j];
    }
}

void add_columns(const float* packed, int64_t tokens, int n, bool add, float* sums) {
  float total[kRows] = {};
  for (int64_t t = 0; t < tokens; ++t)
    for (int i = 0; i < kRows; ++i) total[i] += packed[t * kRows + i];
  for (int i = 0; i < n; ++i) sums[i] = add ? sums[i] + total[i] : total[i];
}

// Rows [first_row, end_row) and columns [first, end) of dW.
struct Part {
  int64_t first_row, end_row, first, end;
};

void run(const WeightGradient& a, Part part) {
  const int64_t panels = (part.end - part.first + kWide - 1) / kWide;
  float* const right = scratch(static_cast<size_t>(kDepth * (panels * kWide + kStrips * kRows)));
  float* const strips = right + kDepth * panels * kWide;
  for (int64_t t = 0; t < a.rows; t += kDepth) {
    const int64_t tokens = std::min(kDepth, a.rows - t);
    const bool add = a.add || t > 0;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t column = part.first + p * kWide;
      const int n = static_cast<int>(std::min<int64_t>(kWide, part.end - column));
      pack<kWide>(a.x + t * a.width + column, a.width, tokens, n, right + p * kDepth * kWide);
    }
    for (int64_t row = part.first_row; row < part.end_row; row += kRows) {
      const int64_t strip = (row - part.first_row) / kRows % kStrips, ahead = part.end_row - row;
      const int n = static_cast<int>(std::min<int64_t>(kRows, ahead));
      if (strip == 0)
        pack_strips(a.dy + t * a.out + row, a.out, tokens, std::min<int64_t>(kStrips * kRows, ahead), strips);
      const float* const left = strips + strip * kDepth * kRows;
      if (a.dbias && part.first == 0) add_columns(left, tokens, n, add, a.dbias + row);
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t column = part.first + p * kWide;
        const int columns = static_cast<int>(std::min<int64_t>(kWide, part.end - column));
        multiply(left, right + p * kDepth * kWide, tokens, {a.dweight + row * a.width + column, a.width, n, columns}, add);
      }
    }
  }
}

int64_t threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

}  // namespace

void weight_gradient(const WeightGradient& a) {
  if (a.rows == 0 && a.add) return;
  if (a.rows == 0) {
    std::fill(a.dweight, a.dweight + a.out * a.width, 0.0f);
    if (a.dbias) std::fill(a.dbias, a.dbias + a.out, 0.0f);
    return;
  }
  const int64_t blocks = (a.width + kColumns - 1) / kColumns, strips = (a.out + kRows - 1) / kRows;
  const int64_t groups = std::min(strips, threads() / std::gcd(threads(), blocks));
#pragma omp parallel for schedule(static)
  for (int64_t task = 0; task < blocks * groups; ++task) {
    const int64_t block = task % blocks, group = task / blocks;
    run(a, {strips * group / groups * kRows, std::min(a.out, strips * (group + 1) / groups * kRows), block * kColumns,
            std::min(a.width, (block + 1) * kColumns)});
  }
}

}  // namespace WHET_ISA
}  // namespace whet
