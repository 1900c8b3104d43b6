// AdamW (Loshchilov and Hutter 2019) on a vector, for any storage of the moments.
#pragma once

#include "operator.h"
#include "pieces.h"
#include "vec.h"

namespace whet {
namespace WHET_ISA {

struct Rates {
  float take1, keep2, take2, eps, grad_scale, decay, step, root_scale;
};

struct Moments {
  VF m, v;
};

WHET_INLINE VF adamw_step(VF p, VF g, Moments& state, const Rates& r) {
  g = g * splat(r.grad_scale);
  state.m = state.m + (g - state.m) * splat(r.take1);
  state.v = state.v * splat(r.keep2) + g * g * splat(r.take2);
  const VF root = square_root(state.v) * splat(r.root_scale) + splat(r.eps);
  return p * splat(r.decay) - splat(r.step) * state.m / root;
}

template <class Args>
Rates rates_of(const Args& a, int64_t tensor) {
  const double lr = a.learning_rates[tensor];
  return {static_cast<float>(1.0 - a.beta1),
          static_cast<float>(a.beta2),
          static_cast<float>(1.0 - a.beta2),
          a.eps,
          a.grad_scale,
          static_cast<float>(1.0 - lr * a.weight_decays[tensor]),
          static_cast<float>(lr / a.correction1),
          static_cast<float>(1.0 / __builtin_sqrt(a.correction2))};
}

// Calls update(param, piece, rates) for every piece of every tensor; `param` is the tensor's, fp32 or bf16.
template <class Args, class Update>
void for_params(const Args& a, Update&& update) {
  const Pieces pieces(a.sizes, a.n_tensors);
  const int64_t count = pieces.count();
#pragma omp parallel for schedule(static, 1)  // round robin: a table with few rows in use would leave one thread idle
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    const Pieces::Piece piece = pieces[chunk];
    const Rates rates = rates_of(a, piece.tensor);
    void* param = a.params[piece.tensor];
    if (a.dtypes[piece.tensor] == kBfloat16)
      update(static_cast<bf16*>(param), piece, rates);
    else
      update(static_cast<float*>(param), piece, rates);
  }
}

}  // namespace WHET_ISA
}  // namespace whet
