// The gradient of a linear layer's weight, and of its bias: dW (out, in) = dY' X, db (out) = the columns' sums of dY.
//
// Both matrices are rows of tokens, so the product runs over their rows: a tile of dW stays in registers while the
// tokens are read (Goto and van de Geijn 2008, with packing). Each element is summed in fp32 in the order of the tokens,
// one block of kDepth after the other, for any number of threads. bf16 is packed as units (product.h): pairs of
// neighbouring tokens, or fp32 on processors without the dot product of pairs.
#include <algorithm>
#include <numeric>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "operator.h"
#include "product.h"
#include "scratch.h"

namespace whet {
namespace WHET_ISA {

// dweight = dy' x, dbias = the sum of dy's rows, both fp32; rows tokens of `out`, dy_stride apart, and of `width`. With
// `add` both are added to what is there.
WHET_ARGUMENTS(WeightGradient,
  int64_t rows, width, out, dy_stride;
  int32_t dtype, add;
  const void* dy;
  const void* x;
  float* dweight;
  float* dbias;  // null: not wanted
)

// Whether this processor multiplies bf16 in pairs, without widening it first.
WHET_ARGUMENTS(Bf16Support,
  int32_t* pairs;
)

namespace {

constexpr int kRows = kRegisters == 32 ? 14 : 6;  // of dW, in registers
constexpr int kWide = 2 * W;                      // columns of dW, in registers
constexpr int64_t kDepth = 384;                   // units per block
constexpr int64_t kColumns = 384;                 // columns of dW whose block of X stays in the second-level cache
constexpr int kStrips = 8;                        // strips of kRows rows that are packed at a time: full cache lines

// Rows of `width` elements, one for each token, from a token and a column on.
template <class T>
struct Tokens {
  const T* from;
  int64_t width, n;

  // The units of n columns of the `unit`-th token or pair of tokens; what is missing from a pair is 0.
  WHET_INLINE_MEMBER void zip(int64_t unit, int64_t columns, float* to) const {
    const T* first = from + unit * UnitOf<T>::n * width;
    if constexpr (std::is_same<T, float>::value) {
      std::memcpy(to, first, static_cast<size_t>(columns) * sizeof(float));
    } else if constexpr (!kPaired<T>) {
      for_vectors(columns, [&](int64_t c, int lanes) { put(to + c, get(first + c, lanes), lanes); });
    } else {
      const bool both = 2 * unit + 1 < n;
      for_vectors(columns, [&](int64_t c, int lanes) {
        const VU low = reinterpret_cast<VU>(get(first + c, lanes)) >> 16;
        const VU high = both ? reinterpret_cast<VU>(get(first + width + c, lanes)) : VU{};
        put(to + c, reinterpret_cast<VF>(low | high), lanes);
      });
    }
  }
  int64_t units() const { return whet::WHET_ISA::units<T>(n); }
};

// The units of n columns, `Lanes` next to each other for each unit of depth, zeros after the n-th.
template <int Lanes, class T>
void pack(Tokens<T> rows, int n, float* to) {
  for (int64_t u = 0; u < rows.units(); ++u, to += Lanes) {
    if (n == Lanes) {
      rows.zip(u, Lanes, to);
    } else {
      std::memset(to, 0, Lanes * sizeof(float));
      rows.zip(u, n, to);
    }
  }
}

struct Tile {
  float* data;
  int64_t ld;
  int rows, columns;
};

// Like pack, for up to kStrips neighbouring strips of kRows columns, stored one after the other.
template <class T>
void pack_strips(Tokens<T> rows, int64_t n, float* to) {
  const int64_t strips = (n + kRows - 1) / kRows;
  float row[kStrips * kRows] = {};
  for (int64_t u = 0; u < rows.units(); ++u) {
    rows.zip(u, n, row);
    for (int64_t s = 0; s < strips; ++s)
      std::memcpy(to + (s * kDepth + u) * kRows, row + s * kRows, kRows * sizeof(float));
  }
}

// c = (or +=) left' right over the units of a block; left has kRows of them side by side, right kWide.
template <class Unit>
void multiply(const float* left, const float* right, int64_t depth, Tile c, bool add) {
  VF sum[kRows][2] = {};
  if (add)
    for (int i = 0; i < c.rows; ++i) {
      __builtin_prefetch(c.data + i * c.ld, 1);
      __builtin_prefetch(c.data + i * c.ld + W, 1);
    }
  for (int64_t u = 0; u < depth; ++u, left += kRows, right += kWide) {
    const VF first = load(right), second = load(right + W);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const VF value = splat_unit(left + i);
      sum[i][0] = Unit::multiply_add(sum[i][0], value, first);
      sum[i][1] = Unit::multiply_add(sum[i][1], value, second);
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

// The sum of a unit's elements.
template <class Unit>
float sum_of_unit(const float* at) {
  if (Unit::n == 1) return *at;
  uint32_t bits;
  std::memcpy(&bits, at, sizeof bits);
  const uint32_t parts[2] = {bits << 16, bits & 0xFFFF0000u};
  float values[2];
  std::memcpy(values, parts, sizeof values);
  return values[0] + values[1];
}

template <class Unit>
void add_columns(const float* packed, int64_t depth, int n, bool add, float* sums) {
  float total[kRows] = {};
  for (int64_t u = 0; u < depth; ++u)
    for (int i = 0; i < kRows; ++i) total[i] += sum_of_unit<Unit>(packed + u * kRows + i);
  for (int i = 0; i < n; ++i) sums[i] = add ? sums[i] + total[i] : total[i];
}

// Rows [first_row, end_row) and columns [first, end) of dW.
struct Part {
  int64_t first_row, end_row, first, end;
};

template <class T>
void run(const WeightGradient& a, Part part) {
  constexpr int64_t kTokens = kDepth * UnitOf<T>::n;
  const T *const x = static_cast<const T*>(a.x), *const dy = static_cast<const T*>(a.dy);
  const int64_t panels = (part.end - part.first + kWide - 1) / kWide;
  float* const right = scratch(static_cast<size_t>(kDepth * (panels * kWide + kStrips * kRows)));
  float* const strips = right + kDepth * panels * kWide;
  for (int64_t t = 0; t < a.rows; t += kTokens) {
    const int64_t tokens = std::min(kTokens, a.rows - t), depth = units<T>(tokens);
    const bool add = a.add || t > 0;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t column = part.first + p * kWide;
      const int n = static_cast<int>(std::min<int64_t>(kWide, part.end - column));
      pack<kWide>(Tokens<T>{x + t * a.width + column, a.width, tokens}, n, right + p * kDepth * kWide);
    }
    for (int64_t row = part.first_row; row < part.end_row; row += kRows) {
      const int64_t strip = (row - part.first_row) / kRows % kStrips, ahead = part.end_row - row;
      const int n = static_cast<int>(std::min<int64_t>(kRows, ahead));
      if (strip == 0)
        pack_strips(Tokens<T>{dy + t * a.dy_stride + row, a.dy_stride, tokens},
                    std::min<int64_t>(kStrips * kRows, ahead), strips);
      const float* const left = strips + strip * kDepth * kRows;
      if (a.dbias && part.first == 0) add_columns<UnitOf<T>>(left, depth, n, add, a.dbias + row);
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t column = part.first + p * kWide;
        const int columns = static_cast<int>(std::min<int64_t>(kWide, part.end - column));
        const Tile c{a.dweight + row * a.width + column, a.width, n, columns};
        multiply<UnitOf<T>>(left, right + p * kDepth * kWide, depth, c, add);
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

WHET_OPERATOR(bf16_support, Bf16Support) { *a.pairs = kPaired<bf16>; }

WHET_OPERATOR(weight_gradient, WeightGradient) {
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
    const Part part{strips * group / groups * kRows, std::min(a.out, strips * (group + 1) / groups * kRows),
                    block * kColumns, std::min(a.width, (block + 1) * kColumns)};
    a.dtype == kBfloat16 ? run<bf16>(a, part) : run<float>(a, part);
  }
}

}  // namespace WHET_ISA
}  // namespace whet
