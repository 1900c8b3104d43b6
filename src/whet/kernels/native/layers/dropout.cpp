#include "operators.h"
#include "parallel.h"
#include "philox.h"

namespace whet {
namespace WHET_ISA {
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

void dropout(const Dropout& a) { a.dtype == kBfloat16 ? run<bf16>(a) : run<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
