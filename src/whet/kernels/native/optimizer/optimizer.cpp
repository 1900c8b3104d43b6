// The gradient norm and AdamW over all tensors of a model in one call each.
#include <cstdlib>

#include "adamw.h"
#include "operator.h"
#include "pieces.h"
#include "scratch.h"

namespace whet {
namespace WHET_ISA {

// One entry per tensor. The sum of squares of all entries is written to *result.
WHET_ARGUMENTS(GradNorm,
  int64_t n_tensors;
  const void* const* grads;
  const int64_t* sizes;
  const int32_t* dtypes;
  const uint8_t* const* rows_in_use;  // null entry: all; else a byte per row of widths[i], 0 if the gradient is 0
  const int64_t* widths;
  double* result;
)

// AdamW (Loshchilov and Hutter 2019) over all tensors; grads are multiplied by grad_scale first.
WHET_ARGUMENTS(AdamW,
  int64_t n_tensors;
  const int64_t* sizes;
  void* const* params;          // of dtypes[i]
  const int32_t* dtypes;        // of params and grads
  const void* const* grads;     // of dtypes[i]
  float* const* first;          // m
  float* const* second;         // v
  float* const* masters;        // fp32 copy of a bf16 parameter; null array or null entry: params are the master
  const float* learning_rates;  // (n_tensors,)
  const float* weight_decays;   // (n_tensors,)
  const uint8_t* const* rows_in_use;  // null entry: all; else a byte per row of widths[i], 0 if grads, m and v are 0
  const int64_t* widths;
  float eps, grad_scale;
  double beta1, beta2;
  double correction1, correction2;  // 1 - beta ** step
)

namespace {

template <class T>
double squares(const T* x, int64_t n) {
  constexpr int64_t kShort = 2048;  // fp32 sums stay short; the long sum is in double
  double total = 0.0;
  for (int64_t first = 0; first < n; first += kShort) {
    const int64_t part = n - first < kShort ? n - first : kShort;
    VF sum[4] = {VF{}, VF{}, VF{}, VF{}};
    int64_t c = 0;
    for (; c + 4 * W <= part; c += 4 * W)
      for (int i = 0; i < 4; ++i) {
        const VF v = load(x + first + c + i * W);
        sum[i] += v * v;
      }
    for_vectors(part - c, [&](int64_t j, int lanes) {
      const VF v = get(x + first + c + j, lanes);
      sum[0] += v * v;
    });
    total += static_cast<double>(lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3])));
  }
  return total;
}

template <class T>
void update(const AdamW& a, T* param, const Pieces::Piece& piece, const Rates& rates) {
  const int64_t i = piece.tensor;
  param += piece.begin;
  const T* grad = static_cast<const T*>(a.grads[i]) + piece.begin;
  float *m = a.first[i] + piece.begin, *v = a.second[i] + piece.begin;
  float* master = a.masters && a.masters[i] ? a.masters[i] + piece.begin : nullptr;
  for_vectors(piece.n, [&](int64_t c, int n) {
    Moments state{get(m + c, n), get(v + c, n)};
    const VF old = master ? get(master + c, n) : get(param + c, n);
    const VF next = adamw_step(old, get(grad + c, n), state, rates);
    put(m + c, state.m, n);
    put(v + c, state.v, n);
    if (master) put(master + c, next, n);
    put(param + c, next, n);
  });
}

}  // namespace

WHET_OPERATOR(grad_norm, GradNorm) {
  const Pieces pieces(a.sizes, a.n_tensors);
  const int64_t count = pieces.count();
  double* partial = static_cast<double*>(claim(static_cast<size_t>(count + 1) * sizeof(double)));
#pragma omp parallel for schedule(static, 1)  // round robin: a table with few rows in use would leave one thread idle
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    const Pieces::Piece piece = pieces[chunk];
    const void* grad = a.grads[piece.tensor];
    const bool narrow = a.dtypes[piece.tensor] == kBfloat16;
    double sum = 0.0;
    for_rows_in_use(piece, a.rows_in_use[piece.tensor], a.widths[piece.tensor], [&](int64_t begin, int64_t n) {
      sum += narrow ? squares(static_cast<const bf16*>(grad) + begin, n)
                    : squares(static_cast<const float*>(grad) + begin, n);
    });
    partial[chunk] = sum;
  }
  double total = 0.0;
  for (int64_t chunk = 0; chunk < count; ++chunk) total += partial[chunk];
  std::free(partial);
  *a.result = total;
}

WHET_OPERATOR(adamw, AdamW) {
  for_params(a, [&](auto* param, const Pieces::Piece& piece, const Rates& rates) {
    const int64_t i = piece.tensor;
    for_rows_in_use(piece, a.rows_in_use[i], a.widths[i], [&](int64_t begin, int64_t n) {
      update(a, param, {i, begin, n}, rates);
    });
  });
}

}  // namespace WHET_ISA
}  // namespace whet
