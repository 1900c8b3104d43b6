// AdamW with 8-bit moments over all tensors in one call, in one pass over memory.
#include <cfloat>
#include <cstring>

#include "adamw.h"
#include "dynamic_map.h"
#include "operator.h"

namespace whet {
namespace WHET_ISA {

// The same with 8-bit moments: codes of the dynamic map (Dettmers et al. 2022) times a scale for each 256 elements of
// a tensor, the last block shorter. Parameters are of dtypes[i], as in AdamW.
WHET_ARGUMENTS(AdamW8bit,
  int64_t n_tensors;
  const int64_t* sizes;
  void* const* params;
  const int32_t* dtypes;
  const void* const* grads;
  uint8_t* const* first;         // codes of m, signed map
  uint8_t* const* second;        // codes of v, unsigned map
  float* const* first_scales;    // (blocks,)
  float* const* second_scales;   // (blocks,)
  float* const* masters;
  const float* learning_rates;
  const float* weight_decays;
  float eps, grad_scale;
  double beta1, beta2, correction1, correction2;
)

namespace {

constexpr int kBlock = 256;  // elements that share a scale; kernels/adamw.py has the same number
static_assert(kChunk % kBlock == 0, "a block lies in one piece");

// The decoded moments of a block.
struct Unpacked {
  alignas(64) float m[kBlock], v[kBlock];
  float largest_m, largest_v;
};

template <class T>
struct Block {
  T* param;
  const T* grad;
  float* master;
  uint8_t *m, *v;
  float *m_scale, *v_scale;
  int n;
};

WHET_INLINE VI get_codes(const uint8_t* p, int n) {
  if (n == W) return load_codes(p);
  uint8_t lanes[W] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n));
  return load_codes(lanes);
}

WHET_INLINE void put_codes(uint8_t* p, VI codes, int n) {
  if (n == W) return store_codes(p, codes);
  uint8_t lanes[W];
  store_codes(lanes, codes);
  std::memcpy(p, lanes, static_cast<size_t>(n));
}

WHET_INLINE VF magnitude(VF x) { return reinterpret_cast<VF>(reinterpret_cast<VI>(x) & 0x7FFFFFFF); }

// Takes the step with decoded moments; writes them, and the largest of each, to `to`.
template <class T>
WHET_INLINE void step_block(const Block<T>& b, const Rates& rates, Unpacked& to) {
  const VF m_scale = splat(*b.m_scale), v_scale = splat(*b.v_scale);
  VF largest_m = VF{}, largest_v = VF{};
  for_vectors(b.n, [&](int64_t c, int n) {
    Moments state{decode_signed(get_codes(b.m + c, n)) * m_scale, decode_unsigned(get_codes(b.v + c, n)) * v_scale};
    const VF old = b.master ? get(b.master + c, n) : get(b.param + c, n);
    const VF next = adamw_step(old, get(b.grad + c, n), state, rates);
    store(to.m + c, state.m);
    store(to.v + c, state.v);
    largest_m = larger(magnitude(state.m), largest_m);
    largest_v = larger(state.v, largest_v);
    if (b.master) put(b.master + c, next, n);
    put(b.param + c, next, n);
  });
  to.largest_m = lane_max(largest_m);
  to.largest_v = lane_max(largest_v);
}

// The block's scale and its inverse: a block of denormal numbers counts as zero.
struct Scale {
  float value, inverse;
};

WHET_INLINE Scale scale_of(float largest) {
  return largest >= FLT_MIN ? Scale{largest, 1.0f / largest} : Scale{0.0f, 0.0f};
}

template <class T>
WHET_INLINE void pack_block(const Block<T>& b, const Unpacked& from) {
  const Scale m = scale_of(from.largest_m), v = scale_of(from.largest_v);
  *b.m_scale = m.value;
  *b.v_scale = v.value;
  for_vectors(b.n, [&](int64_t c, int n) {
    put_codes(b.m + c, encode_signed(load(from.m + c) * splat(m.inverse)), n);
    put_codes(b.v + c, encode_unsigned(load(from.v + c) * splat(v.inverse)), n);
  });
}

template <class T>
void update(const AdamW8bit& a, T* param, const Pieces::Piece& piece, const Rates& rates) {
  const int64_t i = piece.tensor, end = piece.begin + piece.n;
  Unpacked moments;
  for (int64_t c = piece.begin; c < end; c += kBlock) {
    const Block<T> block{param + c,
                         static_cast<const T*>(a.grads[i]) + c,
                         a.masters && a.masters[i] ? a.masters[i] + c : nullptr,
                         a.first[i] + c,
                         a.second[i] + c,
                         a.first_scales[i] + c / kBlock,
                         a.second_scales[i] + c / kBlock,
                         static_cast<int>(end - c < kBlock ? end - c : kBlock)};
    step_block(block, rates, moments);
    pack_block(block, moments);
  }
}

}  // namespace

WHET_OPERATOR(adamw_8bit, AdamW8bit) {
  for_params(a, [&](auto* param, const Pieces::Piece& piece, const Rates& rates) { update(a, param, piece, rates); });
}

}  // namespace WHET_ISA
}  // namespace whet
