// y = x w' in 8-bit integers: both factors have a scale for each block of a row (w: of a column of the product).
//
// The weight is packed once and used often: panels of kPanel columns, in each the depth in groups of four, in each group
// the columns' four bytes side by side, shifted by 128 to be unsigned. The rows of x are quantised where they are used: a
// thread quantises as many as its cache holds and multiplies them by all panels. Sums of a block are exact, so neither the
// number of threads nor the instruction set changes them.
#include <algorithm>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "int8.h"
#include "int8_dot.h"
#include "operator.h"
#include "scratch.h"

namespace whet {
namespace WHET_ISA {

// *vnni = whether the instruction set in use has the fast instruction of int8_product.
WHET_ARGUMENTS(Int8Support,
  int32_t* vnni;
)

// A weight in the layout of int8_product: each block of `block` along the depth (a multiple of 64) has a scale for each column.
// `down`: the weight is (depth, columns), not (columns, depth).
WHET_ARGUMENTS(Int8Pack,
  int64_t depth, columns, block;
  int32_t down;
  const float* weight;
  uint8_t* packed;  // (panels, depth padded to fours, 32), 32 columns a panel
  float* scales;    // (blocks, panels * 32)
)

// y (rows, columns) = x (rows, depth) times the packed weight, plus bias. x is quantised by rows and blocks, rounded to
// nearest, or stochastically if `stochastic`: with Philox at (key, row, element).
WHET_ARGUMENTS(Int8Product,
  int64_t rows, depth, columns, block;
  int32_t stochastic;
  uint64_t key;
  const float* x;
  const uint8_t* packed;
  const float* scales;
  const float* bias;  // null: 0
  float* y;
)

namespace {

constexpr int kPanel = 32;                                // columns
constexpr int kVectors = kPanel / W;                      // in a panel's row
constexpr int kRows = kRegisters == 32 && W == 16 ? 12 : kVectors <= 4 ? 3 : 1;  // of x, in registers
constexpr int64_t kHeld = 256 << 10;                      // bytes of quantised rows per thread

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Quantised rows of x, kRows by kRows; sums and scales by (tile, block, row in the tile).
struct Rows {
  int8_t* q;
  float* scales;
  int32_t* sums;
};

struct Shape {
  int64_t depth, padded, block, blocks;
  explicit Shape(int64_t d, int64_t b) : depth(d), padded(up(d, 4)), block(b), blocks((d + b - 1) / b) {}
  int64_t in_block(int64_t b) const { return std::min(block, depth - b * block); }
};

void quantise_rows(const Int8Product& a, const Shape& s, int64_t first, int64_t n, const Rows& to) {
  for (int64_t i = 0; i < up(n, kRows); ++i) {
    int8_t* q = to.q + i * s.padded;
    Dither dither(a.stochastic != 0, a.key, first + i);
    for (int64_t b = 0; b < s.blocks; ++b) {
      const int64_t at = (i / kRows * s.blocks + b) * kRows + i % kRows;
      to.scales[at] = 0.0f;
      to.sums[at] = 0;
      if (i < n) quantise(a.x + (first + i) * a.depth, b * s.block, s.in_block(b), dither, q, to.scales + at, to.sums + at);
    }
    if (i >= n) std::memset(q, 0, static_cast<size_t>(s.padded));
    for (int64_t c = s.depth; i < n && c < s.padded; ++c) q[c] = 0;
  }
}

// out (kRows, kPanel) = the tile's rows times a panel; `panel` and `scales` are those of the panel's columns.
#define WHET_TILE(Dot, TARGET)                                                                                       \
  TARGET void tile_##Dot(const Shape& s, const int8_t* rows, const float* row_scales, const int32_t* row_sums,       \
                         const uint8_t* panel, const float* scales, int64_t scale_stride, float* out) {              \
    for (int64_t b = 0; b < s.blocks; ++b, row_scales += kRows, row_sums += kRows, scales += scale_stride) {         \
      VI sum[kRows][kVectors];                                                                                       \
      _Pragma("GCC unroll 12") for (int r = 0; r < kRows; ++r)                                                       \
      _Pragma("GCC unroll 8") for (int v = 0; v < kVectors; ++v) sum[r][v] = splat_i(-128 * row_sums[r]);            \
      const int64_t end = std::min(s.padded, (b + 1) * s.block);                                                     \
      for (int64_t k = b * s.block; k < end; k += 4, panel += 4 * kPanel) {                                          \
        VI right[kVectors];                                                                                          \
        _Pragma("GCC unroll 8") for (int v = 0; v < kVectors; ++v)                                                   \
          right[v] = reinterpret_cast<VI>(load(reinterpret_cast<const uint32_t*>(panel + 4 * v * W)));               \
        _Pragma("GCC unroll 12") for (int r = 0; r < kRows; ++r) {                                                   \
          int32_t left;                                                                                              \
          std::memcpy(&left, rows + r * s.padded + k, 4);                                                            \
          _Pragma("GCC unroll 8") for (int v = 0; v < kVectors; ++v) sum[r][v] = Dot::dot(sum[r][v], right[v], left); \
        }                                                                                                            \
      }                                                                                                              \
      _Pragma("GCC unroll 12") for (int r = 0; r < kRows; ++r)                                                       \
      _Pragma("GCC unroll 8") for (int v = 0; v < kVectors; ++v) {                                                   \
        float* to = out + r * kPanel + v * W;                                                                        \
        const VF part = __builtin_convertvector(sum[r][v], VF) * (splat(row_scales[r]) * load(scales + v * W));      \
        store(to, b ? load(to) + part : part);                                                                       \
      }                                                                                                              \
    }                                                                                                                \
  }

WHET_TILE(Plain16, )
#if WHET_HAS_VNNI
WHET_TILE(Vnni, WHET_VNNI)
#endif

using Tile = decltype(&tile_Plain16);

Tile best_tile() {
#if WHET_HAS_VNNI
  if (processor_has_vnni()) return tile_Vnni;
#endif
  return tile_Plain16;
}

void put_tile(const Int8Product& a, const float* tile, int64_t row, int64_t rows, int64_t column) {
  const int64_t n = std::min<int64_t>(kPanel, a.columns - column);
  for (int64_t r = 0; r < rows; ++r)
    for_vectors(n, [&](int64_t c, int lanes) {
      const VF y = load(tile + r * kPanel + c);
      put(a.y + (row + r) * a.columns + column + c, a.bias ? y + get(a.bias + column + c, lanes) : y, lanes);
    });
}

// Rows [first, first + n) of y, n at most what a thread holds.
void run(const Int8Product& a, const Shape& s, Tile tile, int64_t first, int64_t n, const Rows& held) {
  quantise_rows(a, s, first, n, held);
  const int64_t panels = (a.columns + kPanel - 1) / kPanel;
  alignas(64) float out[kRows * kPanel];
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t i = 0; i < n; i += kRows) {
      const int64_t at = i * s.blocks;  // of the tile's first scale
      tile(s, held.q + i * s.padded, held.scales + at, held.sums + at, a.packed + p * kPanel * s.padded,
           a.scales + p * kPanel, panels * kPanel, out);
      put_tile(a, out, first + i, std::min<int64_t>(kRows, n - i), p * kPanel);
    }
}

Rows hold(const Shape& s, int64_t rows) {
  const int64_t bytes = up(rows * s.padded, 64) / 4;  // in floats
  float* const space = scratch(static_cast<size_t>(bytes + 2 * rows * s.blocks));
  return {reinterpret_cast<int8_t*>(space), space + bytes, reinterpret_cast<int32_t*>(space + bytes + rows * s.blocks)};
}

// Columns [first, first + kPanel) of a weight whose rows are the depth's: lanes are columns.
void pack_down(const Int8Pack& a, const Shape& s, int64_t first, uint8_t* to, float* scales, int64_t stride) {
  const int64_t n = std::min<int64_t>(kPanel, a.columns - first);
  for (int64_t v = 0; v < kVectors; ++v) {
    const int lanes = static_cast<int>(std::clamp<int64_t>(n - v * W, 0, W));
    const float* from = a.weight + first + v * W;
    const auto value = [&](int64_t k) { return k < s.depth ? get(from + k * a.columns, lanes) : VF{}; };
    for (int64_t b = 0; b < s.blocks; ++b) {
      VI most{};
      for (int64_t k = b * s.block; k < b * s.block + s.in_block(b); ++k) most = larger_bits(most, value(k));
      float inverse[W];
      for (int i = 0; i < W; ++i) {
        const Scale found = scale_of(reinterpret_cast<VF>(most)[i]);
        scales[b * stride + v * W + i] = found.value;
        inverse[i] = found.inverse;
      }
      const VF times = load(inverse);
      for (int64_t k = b * s.block; k < std::min(s.padded, (b + 1) * s.block); k += 4) {
        VI word{};
        // The zero stands for quantise's dither: without it the product would be fused into nearest's sum, unrounded.
        for (int i = 3; i >= 0; --i) word = word << 8 | ((nearest(value(k + i) * times + VF{}) + 128) & 0xFF);
        store(reinterpret_cast<uint32_t*>(to + k * kPanel + 4 * v * W), reinterpret_cast<VU>(word));
      }
    }
  }
}

// The same of a weight whose rows are the columns.
void pack_across(const Int8Pack& a, const Shape& s, int64_t first, uint8_t* to, float* scales, int64_t stride) {
  int8_t* const q = reinterpret_cast<int8_t*>(scratch(static_cast<size_t>(s.padded / 4)));
  for (int64_t column = 0; column < kPanel; ++column) {
    std::memset(q, 0, static_cast<size_t>(s.padded));
    Dither none(false, 0, 0);
    for (int64_t b = 0; b < s.blocks; ++b) {
      float& scale = scales[b * stride + column] = 0.0f;
      int32_t sum;
      if (first + column < a.columns)
        quantise(a.weight + (first + column) * a.depth, b * s.block, s.in_block(b), none, q, &scale, &sum);
    }
    for (int64_t k = 0; k < s.padded; k += 4) {
      uint32_t word;
      std::memcpy(&word, q + k, 4);
      word ^= 0x80808080u;
      std::memcpy(to + k * kPanel + 4 * column, &word, 4);
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

WHET_OPERATOR(int8_support, Int8Support) { *a.vnni = processor_has_vnni(); }

WHET_OPERATOR(int8_pack, Int8Pack) {
  const Shape s(a.depth, a.block);
  const int64_t panels = (a.columns + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels; ++p) {
    uint8_t* const to = a.packed + p * kPanel * s.padded;
    (a.down ? pack_down : pack_across)(a, s, p * kPanel, to, a.scales + p * kPanel, panels * kPanel);
  }
}

WHET_OPERATOR(int8_product, Int8Product) {
  const Shape s(a.depth, a.block);
  const Tile tile = best_tile();
  const int64_t tiles = (a.rows + kRows - 1) / kRows, most = std::max<int64_t>(1, kHeld / (kRows * s.padded));
  const int64_t wanted = up((tiles + most - 1) / most, threads());  // as many parts for each thread
  const int64_t parts = std::max<int64_t>(1, std::min(tiles, wanted));
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = tiles * part / parts * kRows;
    const int64_t n = std::min(a.rows, tiles * (part + 1) / parts * kRows) - first;
    if (n > 0) run(a, s, tile, first, n, hold(s, up(n, kRows)));
  }
}

}  // namespace WHET_ISA
}  // namespace whet
