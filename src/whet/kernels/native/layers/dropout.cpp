#include "operator.h"
#include "parallel.h"
#include "philox.h"

namespace whet {
namespace WHET_ISA {

WHET_ARGUMENTS(Dropout,
  int64_t rows, width;
  int32_t dtype;
  Mask mask;
  const void* x;
  void* y;
)

namespace {

template <class T>
void run(const Dropout& a) {
#pragma omp parallel for schedule(static) if (is_large(a.rows * a.width))
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    T* y = static_cast<T*>(a.y) + row * a.width;
    RowMask mask(a.mask, row);
    for_vectors(a.width, [&](int64_t c, int n) { put(y + c, mask.apply(get(x + c, n), c), n); });
  }
}

}  // namespace

WHET_OPERATOR(dropout, Dropout) { a.dtype == kBfloat16 ? run<bf16>(a) : run<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
