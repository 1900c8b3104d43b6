// Rotary position embeddings: channel c of a head is turned against channel c + angles / 2 (Su et al. 2021, equation 34).
#include "operator.h"
#include "parallel.h"
#include "vec.h"

namespace whet {
namespace WHET_ISA {

// y = x with the first `angles` channels of the first `rotated` heads turned by halves: (a, b) becomes
// (a cos - b sin, b cos + a sin), or with `back` what the transposed matrix gives. All else is copied. y is contiguous.
WHET_ARGUMENTS(Rotate,
  int64_t rows, heads, rotated, width, angles;
  int32_t dtype, back;
  View x;
  const float* cos;  // (rows, angles)
  const float* sin;  // (rows, angles)
  void* y;
)

namespace {

// What turns one token: cosines and sines of the first and of the second half.
struct Angles {
  const float *cos, *sin;
  int64_t half;
  bool back;

  template <class T>
  WHET_INLINE_MEMBER void turn(const T* x, T* y) const {
    for_vectors(half, [&](int64_t c, int n) {
      const VF a = get(x + c, n), b = get(x + half + c, n);
      const VF low = get(sin + c, n), high = get(sin + half + c, n);
      const VF to_a = back ? high : VF{} - low, to_b = back ? VF{} - low : high;
      put(y + c, a * get(cos + c, n) + b * to_a, n);
      put(y + half + c, b * get(cos + half + c, n) + a * to_b, n);
    });
  }
};

template <class T>
void run(const Rotate& r) {
#pragma omp parallel for schedule(static) if (is_large(r.rows * r.heads * r.width))
  for (int64_t t = 0; t < r.rows; ++t) {
    const Angles angles{r.cos + t * r.angles, r.sin + t * r.angles, r.angles / 2, r.back != 0};
    const T* x = static_cast<const T*>(r.x.data) + t * r.x.token_stride;
    T* y = static_cast<T*>(r.y) + t * r.heads * r.width;
    for (int64_t head = 0; head < r.heads; ++head, x += r.x.head_stride, y += r.width) {
      const int64_t turned = head < r.rotated ? r.angles : 0;
      if (turned) angles.turn(x, y);
      std::memcpy(y + turned, x + turned, static_cast<size_t>(r.width - turned) * sizeof(T));
    }
  }
}

}  // namespace

WHET_OPERATOR(rotate, Rotate) { a.dtype == kBfloat16 ? run<bf16>(a) : run<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
