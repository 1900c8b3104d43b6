// Bias and activation in one pass, plain (BERT, GPT-2) and gated (Llama: SwiGLU), forward and backward.
#include "columns.h"
#include "mathfn.h"
#include "operator.h"
#include "parallel.h"

namespace whet {
namespace WHET_ISA {

enum Activation : int32_t { kGeluErf = 0, kGeluTanh = 1, kSilu = 2 };

// y = act(x + bias)
WHET_ARGUMENTS(BiasAct,
  int64_t rows, width;
  int32_t dtype, kind;
  const void* x;
  const float* bias;  // null: 0
  void* y;            // forward
  const void* dy;     // backward
  void* dx;
  float* dbias;  // null: not wanted
)

// y = act(gate) * up; each operand has its own row stride (in elements), so both may be halves of one product.
WHET_ARGUMENTS(GatedAct,
  int64_t rows, width;
  int32_t dtype, kind;
  const void* gate;
  const void* up;
  int64_t in_stride;
  void* y;         // forward, contiguous
  const void* dy;  // backward, contiguous
  void* dgate;
  void* dup;
  int64_t grad_stride;
)

namespace {

struct ValueAndSlope {
  VF value, slope;
};

// x P(X <= x) (Hendrycks and Gimpel 2016)
struct GeluErf {
  static WHET_INLINE_MEMBER VF value(VF x) { return x * normal(x).cdf; }
  static WHET_INLINE_MEMBER ValueAndSlope both(VF x) {
    const Normal at = normal(x);
    return {x * at.cdf, at.cdf + x * at.density};
  }
};

// 0.5 x (1 + tanh u) = x logistic(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct GeluTanh {
  static WHET_INLINE_MEMBER VF twice_u(VF x) {
    return x * (x * x * splat(0.0713548162726f) + splat(1.59576912161f));
  }
  static WHET_INLINE_MEMBER VF value(VF x) { return x * logistic(twice_u(x)); }
  static WHET_INLINE_MEMBER ValueAndSlope both(VF x) {
    const VF s = logistic(twice_u(x));
    const VF du = x * x * splat(0.214064448818f) + splat(1.59576912161f);
    return {x * s, s + x * s * (splat(1.0f) - s) * du};
  }
};

// x logistic(x) (Elfwing et al. 2017)
struct Silu {
  static WHET_INLINE_MEMBER VF value(VF x) { return x * logistic(x); }
  static WHET_INLINE_MEMBER ValueAndSlope both(VF x) {
    const VF s = logistic(x);
    return {x * s, s + x * s * (splat(1.0f) - s)};
  }
};


template <class T, class Act>
struct Plain {
  static WHET_INLINE_MEMBER VF input(const BiasAct& a, const T* x, int64_t c, int n) {
    const VF v = get(x + c, n);
    return a.bias ? v + get(a.bias + c, n) : v;
  }

  static void forward(const BiasAct& a) {
#pragma omp parallel for schedule(static) if (is_large(a.rows * a.width))
    for (int64_t r = 0; r < a.rows; ++r) {
      const T* x = static_cast<const T*>(a.x) + r * a.width;
      T* y = static_cast<T*>(a.y) + r * a.width;
      for_vectors(a.width, [&](int64_t c, int n) { put(y + c, Act::value(input(a, x, c, n)), n); });
    }
  }

  static void backward(const BiasAct& a) {
    const Chunks chunks(a.rows);
    ColumnSums sums(chunks, a.width, 1);
#pragma omp parallel for schedule(static) if (is_large(a.rows * a.width))
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      float* dbias = sums.start(chunk, 0);
      for (int64_t r = chunks.begin(chunk); r < chunks.end(chunk); ++r) backward_row(a, r, dbias);
    }
    sums.total(0, a.dbias);
  }

  static void backward_row(const BiasAct& a, int64_t r, float* dbias) {
    const T* x = static_cast<const T*>(a.x) + r * a.width;
    const T* dy = static_cast<const T*>(a.dy) + r * a.width;
    T* dx = static_cast<T*>(a.dx) + r * a.width;
    for_vectors(a.width, [&](int64_t c, int n) {
      const VF d = get(dy + c, n) * Act::both(input(a, x, c, n)).slope;
      put(dx + c, d, n);
      store(dbias + c, load(dbias + c) + d);
    });
  }
};

template <class T, class Act>
struct Gated {
  static void forward(const GatedAct& a) {
#pragma omp parallel for schedule(static) if (is_large(a.rows * a.width))
    for (int64_t r = 0; r < a.rows; ++r) {
      const T* gate = static_cast<const T*>(a.gate) + r * a.in_stride;
      const T* up = static_cast<const T*>(a.up) + r * a.in_stride;
      T* y = static_cast<T*>(a.y) + r * a.width;
      for_vectors(a.width, [&](int64_t c, int n) { put(y + c, Act::value(get(gate + c, n)) * get(up + c, n), n); });
    }
  }

  static void backward(const GatedAct& a) {
#pragma omp parallel for schedule(static) if (is_large(a.rows * a.width))
    for (int64_t r = 0; r < a.rows; ++r) {
      const T* gate = static_cast<const T*>(a.gate) + r * a.in_stride;
      const T* up = static_cast<const T*>(a.up) + r * a.in_stride;
      const T* dy = static_cast<const T*>(a.dy) + r * a.width;
      T* dgate = static_cast<T*>(a.dgate) + r * a.grad_stride;
      T* dup = static_cast<T*>(a.dup) + r * a.grad_stride;
      for_vectors(a.width, [&](int64_t c, int n) {
        const ValueAndSlope act = Act::both(get(gate + c, n));
        const VF grad = get(dy + c, n);
        put(dgate + c, grad * get(up + c, n) * act.slope, n);
        put(dup + c, grad * act.value, n);
      });
    }
  }
};

// Calls Op<storage, activation>::{forward, backward} for the types of the arguments.
template <template <class, class> class Op, class T, class Args>
void with_kind(const Args& a, bool forward) {
  if (a.kind == kGeluErf) forward ? Op<T, GeluErf>::forward(a) : Op<T, GeluErf>::backward(a);
  if (a.kind == kGeluTanh) forward ? Op<T, GeluTanh>::forward(a) : Op<T, GeluTanh>::backward(a);
  if (a.kind == kSilu) forward ? Op<T, Silu>::forward(a) : Op<T, Silu>::backward(a);
}

template <template <class, class> class Op, class Args>
void with_types(const Args& a, bool forward) {
  a.dtype == kBfloat16 ? with_kind<Op, bf16>(a, forward) : with_kind<Op, float>(a, forward);
}

}  // namespace

WHET_OPERATOR(bias_act, BiasAct) { with_types<Plain>(a, true); }
WHET_OPERATOR(bias_act_backward, BiasAct) { with_types<Plain>(a, false); }
WHET_OPERATOR(gated_act, GatedAct) { with_types<Gated>(a, true); }
WHET_OPERATOR(gated_act_backward, GatedAct) { with_types<Gated>(a, false); }

}  // namespace WHET_ISA
}  // namespace whet
