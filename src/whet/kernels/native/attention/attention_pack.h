// Layouts of the heads' vectors for the products of packed attention: rows, transposed panels, or zipped by token.
//
// fp32, and bf16 on processors without its dot product, are fp32 here. Elsewhere bf16 stays bf16, two to a unit.
#pragma once

#include "operator.h"
#include "product.h"

namespace whet {
namespace WHET_ISA {

constexpr int64_t kPanel = 64;  // keys per panel: one block of random words

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// `n` tokens of one head from `token` on.
struct Span {
  int64_t token, n, head;
};

template <class T>
static const T* row_of(const View& view, int64_t token, int64_t head) {
  return static_cast<const T*>(view.data) + token * view.token_stride + head * view.head_stride;
}

// rows (n, units rounded up to W) = the span, with zeros after `width`.
template <class T>
static void gather(const View& view, Span span, int64_t width, float* rows) {
  const int64_t ld = round_up(units<T>(width), W);
  for (int64_t i = 0; i < span.n; ++i, rows += ld) {
    const T* from = row_of<T>(view, span.token + i, span.head);
    if constexpr (!kPaired<T>) {
      for_vectors(width, [&](int64_t c, int lanes) { store(rows + c, get(from + c, lanes)); });
    } else if (width % (2 * W) == 0) {
      for (int64_t c = 0; c < width; c += 2 * W) store(rows + c / 2, load(reinterpret_cast<const float*>(from + c)));
    } else {
      std::memset(rows + ld - W, 0, W * sizeof(float));
      std::memcpy(static_cast<void*>(rows), from, static_cast<size_t>(width) * sizeof(T));
    }
  }
}

// rows (n, width rounded up to W) = the span in fp32, with zeros after `width`.
template <class T>
static void gather_wide(const View& view, Span span, int64_t width, float* rows) {
  const int64_t ld = round_up(width, W);
  for (int64_t i = 0; i < span.n; ++i, rows += ld) {
    const T* from = row_of<T>(view, span.token + i, span.head);
    for_vectors(width, [&](int64_t c, int lanes) { store(rows + c, get(from + c, lanes)); });
  }
}

// zipped (units of n, width rounded up to W) = the span, where a unit holds the elements of two neighbouring tokens.
template <class T>
static void zip(const View& view, Span span, int64_t width, float* zipped) {
  const int64_t ld = round_up(width, W);
  for (int64_t i = 0; i < span.n; i += 2, zipped += ld) {
    const T* first = row_of<T>(view, span.token + i, span.head);
    const T* second = first + view.token_stride;
    const bool both = i + 1 < span.n;
    for_vectors(width, [&](int64_t c, int lanes) {
      const VU low = reinterpret_cast<VU>(get(first + c, lanes)) >> 16;
      const VU high = both ? reinterpret_cast<VU>(get(second + c, lanes)) : VU{};
      store(zipped + c, reinterpret_cast<VF>(low | high));
    });
  }
}

// The span as the right side of a product whose depth is its tokens.
template <class T>
static void lay_by_token(const View& view, Span span, int64_t width, float* to) {
  if constexpr (kPaired<T>)
    zip<T>(view, span, width, to);
  else
    gather<T>(view, span, width, to);
}

// The span, of `width`, = rows (n, width rounded up to W) times scale.
template <class T>
static void spread(const float* rows, const View& view, Span span, int64_t width, float scale) {
  const int64_t padded = round_up(width, W);
  for (int64_t i = 0; i < span.n; ++i) {
    T* to = const_cast<T*>(row_of<T>(view, span.token + i, span.head));
    const float* from = rows + i * padded;
    for_vectors(width, [&](int64_t c, int lanes) { put(to + c, load(from + c) * splat(scale), lanes); });
  }
}

// 4 rows of 4 units, `stride` bytes apart.
WHET_INLINE void transpose4(const float* from, int64_t stride, float* to, int64_t ld_to) {
  const char* at = reinterpret_cast<const char*>(from);
  const auto row = [&](int i) { return *reinterpret_cast<const V4Mem*>(at + i * stride); };
  const V4 r0 = row(0), r1 = row(1), r2 = row(2), r3 = row(3);
  const V4 a = WHET_SHUFFLE(r0, r1, 0, 4, 1, 5), b = WHET_SHUFFLE(r2, r3, 0, 4, 1, 5);
  const V4 c = WHET_SHUFFLE(r0, r1, 2, 6, 3, 7), d = WHET_SHUFFLE(r2, r3, 2, 6, 3, 7);
  *reinterpret_cast<V4Mem*>(to) = WHET_SHUFFLE(a, b, 0, 1, 4, 5);
  *reinterpret_cast<V4Mem*>(to + ld_to) = WHET_SHUFFLE(a, b, 2, 3, 6, 7);
  *reinterpret_cast<V4Mem*>(to + 2 * ld_to) = WHET_SHUFFLE(c, d, 0, 1, 4, 5);
  *reinterpret_cast<V4Mem*>(to + 3 * ld_to) = WHET_SHUFFLE(c, d, 2, 3, 6, 7);
}

#if defined(__AVX512F__)
WHET_INLINE __m512 every_fourth(const char* from, int64_t stride) {
  const auto row = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(from + i * stride)); };
  const __m512 low = _mm512_insertf32x4(_mm512_castps128_ps512(row(0)), row(4), 1);
  return _mm512_insertf32x4(_mm512_insertf32x4(low, row(8), 2), row(12), 3);
}

// 16 rows of 4 units, `stride` bytes apart.
WHET_INLINE void transpose16(const char* from, int64_t stride, float* to, int64_t ld_to) {
  const __m512 r0 = every_fourth(from, stride), r1 = every_fourth(from + stride, stride);
  const __m512 r2 = every_fourth(from + 2 * stride, stride), r3 = every_fourth(from + 3 * stride, stride);
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1)), b = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3));
  const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1)), d = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
  store(to, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)));
  store(to + ld_to, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  store(to + 2 * ld_to, _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)));
  store(to + 3 * ld_to, _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}
#endif

// Rows of units, `stride` bytes apart.
struct Rows {
  const char* first;
  int64_t n, stride;
  const float* at(int64_t i) const { return reinterpret_cast<const float*>(first + i * stride); }
};

// panel (depth, kPanel): at most kPanel rows of `depth` units transposed; missing keys are 0. The rows are readable,
// and the panel is writable, up to a multiple of 4 units of depth.
static void transpose(Rows rows, int64_t depth, float* panel) {
  if (rows.n < kPanel) std::memset(panel, 0, static_cast<size_t>(depth * kPanel) * sizeof(float));
  int64_t j = 0;
#if defined(__AVX512F__)
  for (; j + 16 <= rows.n; j += 16)
    for (int64_t c = 0; c < depth; c += 4)
      transpose16(reinterpret_cast<const char*>(rows.at(j) + c), rows.stride, panel + c * kPanel + j, kPanel);
#endif
  for (; j + 4 <= rows.n; j += 4)
    for (int64_t c = 0; c < depth; c += 4) transpose4(rows.at(j) + c, rows.stride, panel + c * kPanel + j, kPanel);
  for (; j < rows.n; ++j)
    for (int64_t c = 0; c < depth; ++c) std::memcpy(panel + c * kPanel + j, rows.at(j) + c, sizeof(float));
}

// panels (n / kPanel, units rounded up to W, kPanel) = the span's vectors transposed. staging: kPanel vectors.
template <class T>
static void lay_in_panels(const View& view, Span span, int64_t width, float* staging, float* panels) {
  constexpr bool kAsStored = std::is_same<T, float>::value || kPaired<T>;
  const int64_t depth = units<T>(width), ld = round_up(depth, W);
  for (int64_t j = 0; j < span.n; j += kPanel, panels += ld * kPanel) {
    const Span part{span.token + j, smaller(kPanel, span.n - j), span.head};
    Rows rows{reinterpret_cast<const char*>(row_of<T>(view, part.token, part.head)), part.n,
              view.token_stride * static_cast<int64_t>(sizeof(T))};
    if (!kAsStored || width % (4 * UnitOf<T>::n)) {
      gather<T>(view, part, width, staging);
      rows = {reinterpret_cast<const char*>(staging), part.n, ld * 4};
    }
    transpose(rows, depth, panels);
  }
}

}  // namespace WHET_ISA
}  // namespace whet
