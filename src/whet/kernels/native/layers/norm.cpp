// Bias, dropout, residual addition and LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) in one pass.
#include "columns.h"
#include "operator.h"
#include "parallel.h"
#include "philox.h"
#include "statistics.h"

namespace whet {
namespace WHET_ISA {

// sum = residual + dropout(x + linear_bias); y = normalised(sum) * weight + bias.
WHET_ARGUMENTS(AddNorm,
  int64_t rows, width;
  int32_t dtype, rms;  // rms: no mean, no bias
  float eps;
  Mask mask;
  const void* x;
  const void* residual;      // null: 0
  const float* linear_bias;  // null: 0
  const float* weight;
  const float* bias;  // null: 0
  void* sum;          // null: not written (then residual and linear_bias are null and there is no dropout)
  void* y;
  float* mean;  // (rows,); unwritten under rms
  float* rstd;  // (rows,)
)

WHET_ARGUMENTS(AddNormBackward,
  int64_t rows, width;
  int32_t dtype, rms;
  Mask mask;
  const void* dy;
  const void* dsum_in;  // gradient of the sum from other uses; null: 0
  const void* sum;
  const float* mean;
  const float* rstd;
  const float* weight;
  void* dsum;           // gradient of the residual (and of x + linear_bias without dropout)
  void* dx;             // null: not wanted
  float* dweight;       // null: not wanted
  float* dbias;         // null: not wanted
  float* dlinear_bias;  // null: not wanted
)

namespace {

template <class T>
struct Row {
  const AddNorm& a;
  const T *x, *residual;
  T *sum, *y;

  Row(const AddNorm& args, int64_t row) : a(args) {
    const int64_t at = row * a.width;
    x = static_cast<const T*>(a.x) + at;
    residual = a.residual ? static_cast<const T*>(a.residual) + at : nullptr;
    sum = a.sum ? static_cast<T*>(a.sum) + at : nullptr;
    y = static_cast<T*>(a.y) + at;
  }

  // Writes the sum, as stored, to `values` and returns its total; the statistics are those of the stored values.
  VF add(RowMask& mask, float* values) const {
    VF total = VF{};
    for_vectors(a.width, [&](int64_t c, int n) {
      VF v = get(x + c, n);
      if (a.linear_bias) v += get(a.linear_bias + c, n);
      v = mask.apply(v, c);
      if (residual) v += get(residual + c, n);
      v = rounded_to(v, x);
      if (sum) put(sum + c, v, n);
      store(values + c, v);
      total += v;
    });
    return total;
  }

  void scale(const float* values, float mean, float rstd) const {
    for_vectors(a.width, [&](int64_t c, int n) {
      VF v = (load(values + c) - splat(mean)) * splat(rstd) * get(a.weight + c, n);
      if (a.bias) v += get(a.bias + c, n);
      put(y + c, v, n);
    });
  }
};

template <class T>
void forward(const AddNorm& a) {
#pragma omp parallel if (is_large(a.rows * a.width))
  {
    float* values = scratch(static_cast<size_t>(a.width + W));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < a.rows; ++r) {
      const Row<T> row(a, r);
      RowMask mask(a.mask, r);
      const VF total = row.add(mask, values);
      const float mean = a.rms ? 0.0f : lane_sum(total) / static_cast<float>(a.width);
      const float rstd = inverse_deviation(values, a.width, mean, a.eps);
      if (!a.rms) a.mean[r] = mean;
      a.rstd[r] = rstd;
      row.scale(values, mean, rstd);
    }
  }
}

enum Kind { kWeight = 0, kBias = 1, kLinearBias = 2, kKinds = 3 };

template <class T>
struct RowBackward {
  const AddNormBackward& a;
  const T *dy, *sum, *dsum_in;
  T *dsum, *dx;
  float mean, rstd;

  RowBackward(const AddNormBackward& args, int64_t row) : a(args) {
    const int64_t at = row * a.width;
    dy = static_cast<const T*>(a.dy) + at;
    sum = static_cast<const T*>(a.sum) + at;
    dsum_in = a.dsum_in ? static_cast<const T*>(a.dsum_in) + at : nullptr;
    dsum = static_cast<T*>(a.dsum) + at;
    dx = a.dx ? static_cast<T*>(a.dx) + at : nullptr;
    mean = a.rms ? 0.0f : a.mean[row];
    rstd = a.rstd[row];
  }

  WHET_INLINE_MEMBER VF normalised(int64_t c, int n) const { return (get(sum + c, n) - splat(mean)) * splat(rstd); }

  // Adds this row to the sums of weight and bias; returns the means for the input's gradient.
  void reduce(float* dweight, float* dbias, float& mean_g, float& mean_gx) const {
    VF total_g = VF{}, total_gx = VF{};
    for_vectors(a.width, [&](int64_t c, int n) {
      const VF grad = get(dy + c, n), hat = normalised(c, n);
      const VF grad_hat = grad * hat;
      store(dweight + c, load(dweight + c) + grad_hat);
      store(dbias + c, load(dbias + c) + grad);
      const VF w = get(a.weight + c, n);
      total_g += grad * w;
      total_gx += grad_hat * w;
    });
    mean_g = a.rms ? 0.0f : lane_sum(total_g) / static_cast<float>(a.width);
    mean_gx = lane_sum(total_gx) / static_cast<float>(a.width);
  }

  void input_gradients(RowMask& mask, float* dlinear_bias, float mean_g, float mean_gx) const {
    for_vectors(a.width, [&](int64_t c, int n) {
      const VF g = get(dy + c, n) * get(a.weight + c, n);
      VF d = (g - splat(mean_g) - normalised(c, n) * splat(mean_gx)) * splat(rstd);
      if (dsum_in) d += get(dsum_in + c, n);
      put(dsum + c, d, n);
      if (!dx && !a.dlinear_bias) return;
      d = mask.apply(d, c);
      if (dx) put(dx + c, d, n);
      if (a.dlinear_bias) store(dlinear_bias + c, load(dlinear_bias + c) + d);
    });
  }
};

template <class T>
void backward(const AddNormBackward& a) {
  const Chunks chunks(a.rows);
  ColumnSums sums(chunks, a.width, kKinds);
#pragma omp parallel for schedule(static) if (is_large(a.rows * a.width))
  for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
    float* dweight = sums.start(chunk, kWeight);
    float* dbias = sums.start(chunk, kBias);
    float* dlinear_bias = sums.start(chunk, kLinearBias);
    for (int64_t r = chunks.begin(chunk); r < chunks.end(chunk); ++r) {
      const RowBackward<T> row(a, r);
      RowMask mask(a.mask, r);
      float mean_g, mean_gx;
      row.reduce(dweight, dbias, mean_g, mean_gx);
      row.input_gradients(mask, dlinear_bias, mean_g, mean_gx);
    }
  }
  sums.total(kWeight, a.dweight);
  sums.total(kBias, a.dbias);
  sums.total(kLinearBias, a.dlinear_bias);
}

}  // namespace

WHET_OPERATOR(add_norm, AddNorm) { a.dtype == kBfloat16 ? forward<bf16>(a) : forward<float>(a); }

WHET_OPERATOR(add_norm_backward, AddNormBackward) { a.dtype == kBfloat16 ? backward<bf16>(a) : backward<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
