// Cross entropy of rows of logits, which are overwritten by their gradient.
#include "glibc.h"
#include "mathfn.h"
#include "operator.h"
#include "parallel.h"

namespace whet {
namespace WHET_ISA {

// losses[i] = log of the sum of exp(logits[i]) - logits[i][labels[i]]; rows with a negative label have a loss of 0.
// With `differentiate`, the logits are overwritten by their gradient, softmax - one-hot (0 for such rows).
WHET_ARGUMENTS(CrossEntropy,
  int64_t rows, width, stride;  // stride between rows, in elements
  int32_t dtype, differentiate;
  void* logits;
  const int64_t* labels;
  float* losses;
)

// Cross entropy over rows of different lengths, (cu_seqlens[r], cu_seqlens[r + 1]) of the logits, which are overwritten
// by their gradient. Labels count from the row's start.
WHET_ARGUMENTS(RowCrossEntropy,
  int64_t n_rows;
  int32_t dtype, differentiate;
  const int32_t* cu_seqlens;  // (n_rows + 1,)
  void* logits;
  const int64_t* labels;
  float* losses;
)

namespace {

template <class T>
float top_of(const T* x, int64_t width) {
  VF most = splat(-kInfinity);
  for_vectors(width, [&](int64_t c, int n) {
    const VF v = get(x + c, n);
    most = larger(most, n == W ? v : select(lane_numbers() < splat_i(n), v, splat(-kInfinity)));
  });
  return lane_max(most);
}

template <class T>
double exp_sum(const T* x, int64_t width, float top) {
  constexpr int64_t kShort = 4096;  // fp32 sums stay short; the long sum is in double
  double total = 0.0;
  for (int64_t first = 0; first < width; first += kShort) {
    VF sum = VF{};
    for_vectors(width - first < kShort ? width - first : kShort, [&](int64_t c, int n) {
      const VF e = exponential(get(x + first + c, n) - splat(top));
      sum += n == W ? e : select(lane_numbers() < splat_i(n), e, VF{});
    });
    total += static_cast<double>(lane_sum(sum));
  }
  return total;
}

float value_of(const float* x) { return *x; }
float value_of(const bf16* x) { return load_some(x, 1)[0]; }

template <class T>
float row_loss(T* x, int64_t width, int64_t label, bool differentiate) {
  if (label < 0) {
    if (differentiate) std::memset(x, 0, static_cast<size_t>(width) * sizeof(T));
    return 0.0f;
  }
  const float top = top_of(x, width);
  const double total = exp_sum(x, width, top);
  const float loss = static_cast<float>(__builtin_log(total) + (static_cast<double>(top) - value_of(x + label)));
  if (!differentiate) return loss;
  const float inverse = static_cast<float>(1.0 / total);
  const float at_label = exponential(splat(value_of(x + label) - top))[0] * inverse - 1.0f;
  for_vectors(width, [&](int64_t c, int n) { put(x + c, exponential(get(x + c, n) - splat(top)) * splat(inverse), n); });
  store_some(x + label, splat(at_label), 1);
  return loss;
}

template <class T>
void run(const CrossEntropy& a) {
#pragma omp parallel for schedule(static) if (is_large(a.rows * a.width))
  for (int64_t r = 0; r < a.rows; ++r)
    a.losses[r] = row_loss(static_cast<T*>(a.logits) + r * a.stride, a.width, a.labels[r], a.differentiate != 0);
}

template <class T>
void run(const RowCrossEntropy& a) {
#pragma omp parallel for schedule(static) if (is_large(a.cu_seqlens[a.n_rows]))
  for (int64_t r = 0; r < a.n_rows; ++r) {
    const int64_t first = a.cu_seqlens[r], end = a.cu_seqlens[r + 1];
    a.losses[r] = row_loss(static_cast<T*>(a.logits) + first, end - first, a.labels[r], a.differentiate != 0);
  }
}

}  // namespace

WHET_OPERATOR(row_cross_entropy, RowCrossEntropy) { a.dtype == kBfloat16 ? run<bf16>(a) : run<float>(a); }

WHET_OPERATOR(cross_entropy, CrossEntropy) { a.dtype == kBfloat16 ? run<bf16>(a) : run<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
