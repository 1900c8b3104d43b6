// The arguments of every operator, as plain C structures; structs.py mirrors them for Python.
//
// Activations are fp32 or bf16 (`dtype`), contiguous, rows of `width`; parameters, their gradients and statistics are
// fp32. A null pointer means "not wanted" where the comment says so. All gradients are written, none accumulated.
#pragma once

#include <cstdint>

namespace whet {

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1 };

// Keep an element iff its random word >= threshold, times scale. threshold 0: no dropout, slot and position unread.
struct Mask {
  uint64_t key;
  uint32_t threshold;
  float scale;
  const int32_t* slot;      // (rows,)
  const int32_t* position;  // (rows,)
};

// dweight = dy' x, dbias = the sum of dy's rows, both fp32; rows tokens of `out`, dy_stride apart, and of `width`. With
// `add` both are added to what is there.
struct WeightGradient {
  int64_t rows, width, out, dy_stride;
  int32_t dtype, add;
  const void* dy;
  const void* x;
  float* dweight;
  float* dbias;  // null: not wanted
};

// Whether this processor multiplies bf16 in pairs, without widening it first.
struct Bf16Support {
  int32_t* pairs;
};

struct Dropout {
  int64_t rows, width;
  int32_t dtype, reserved;
  Mask mask;
  const void* x;
  void* y;
};

// sum = residual + dropout(x + linear_bias); y = normalised(sum) * weight + bias.
struct AddNorm {
  int64_t rows, width;
  int32_t dtype, rms;  // rms: no mean, no bias
  float eps;
  int32_t reserved;
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
};

struct AddNormBackward {
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
};

enum Activation : int32_t { kGeluErf = 0, kGeluTanh = 1, kSilu = 2 };

// y = act(x + bias)
struct BiasAct {
  int64_t rows, width;
  int32_t dtype, kind;
  const void* x;
  const float* bias;  // null: 0
  void* y;            // forward
  const void* dy;     // backward
  void* dx;
  float* dbias;  // null: not wanted
};

// y = act(gate) * up; each operand has its own row stride (in elements), so both may be halves of one product.
struct GatedAct {
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
};

// A (tokens, heads, head_width) view; strides in elements, the last dimension contiguous.
struct View {
  void* data;
  int64_t token_stride, head_stride;
};

// y = x with the first `angles` channels of the first `rotated` heads turned by halves: (a, b) becomes
// (a cos - b sin, b cos + a sin), or with `back` what the transposed matrix gives. All else is copied. y is contiguous.
struct Rotate {
  int64_t rows, heads, rotated, width, angles;
  int32_t dtype, back;
  View x;
  const float* cos;  // (rows, angles)
  const float* sin;  // (rows, angles)
  void* y;
};

struct Attention {
  int64_t n_rows, heads, key_heads, head_width;
  int32_t dtype, causal;
  float scale;
  uint32_t threshold;  // 0: no dropout on the weights
  uint64_t key;
  float keep_scale;
  int32_t window;  // a query sees keys up to this distance before and after it; negative: all
  const int32_t* cu_seqlens;  // (n_rows + 1,)
  const int32_t* row_slots;   // (n_rows,), unread without dropout
  const int32_t* key_counts;  // (n_rows,): keys at the start of a row, later tokens only query; null: all
  View q, k, v, out;
  float* lse;  // (tokens, heads): log of the sum of exp of a query's scores
  View dout, dq, dk, dv;  // backward
  const float* bias;      // (heads, 2 reach + 1): added to the scaled score of key j and query i at j - i + reach; null: 0
  int64_t reach;          // at least the longest row - 1
  float* dbias;           // backward, the gradient of `bias`; null: not wanted
  float* dbias_rows;      // (2 tokens, heads): working memory for it
  // Scores also get scale (q_i . relative_keys[p] + k_j . relative_queries[p]) with p = places[j - i + reach].
  const int32_t* places;  // (2 reach + 1,): rows of the tables; null: no such terms
  int64_t n_places;       // rows of each table
  View relative_keys, relative_queries;    // (n_places, heads, head_width); null data: without this term
  View drelative_keys, drelative_queries;  // backward
};

// One entry per tensor. The sum of squares of all entries is written to *result.
struct GradNorm {
  int64_t n_tensors;
  const void* const* grads;
  const int64_t* sizes;
  const int32_t* dtypes;
  const uint8_t* const* rows_in_use;  // null entry: all; else a byte per row of widths[i], 0 if the gradient is 0
  const int64_t* widths;
  double* result;
};

// AdamW (Loshchilov and Hutter 2019) over all tensors; grads are multiplied by grad_scale first.
struct AdamW {
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
};

// The same with 8-bit moments: codes of the dynamic map (Dettmers et al. 2022) times a scale for each 256 elements of
// a tensor, the last block shorter. Parameters are of dtypes[i], as in AdamW.
struct AdamW8bit {
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
};

// y = dropout(LayerNorm(word[ids] + position[position_ids] + type[type_ids])), tables fp32.
struct Embed {
  int64_t rows, width;
  int32_t dtype;
  float eps;
  Mask mask;
  const int64_t* ids[3];  // null: that table is not used
  const float* tables[3];
  const float* weight;
  const float* bias;
  void* y;
  float* mean;
  float* rstd;
};

struct EmbedBackward {
  int64_t rows, width;
  int32_t dtype, reserved;
  Mask mask;
  const int64_t* ids[3];
  const float* tables[3];
  const float* weight;
  const float* mean;
  const float* rstd;
  const void* dy;
  float* dsum;      // (rows, width): gradient of the sum, to be scattered
  float* dweight;
  float* dbias;
};

// table_grad[id] = the sum of the values of that id, added in the order of the rows for any number of threads.
struct Scatter {
  int64_t rows, width;
  int64_t padding_id;  // rows of this id are skipped; -1: none
  const int64_t* ids;
  const float* values;
  float* table_grad;      // (entries, width)
  const int64_t* order;   // (rows,): a stable sort of the rows by id
  const int64_t* clear;   // (n_clear,): entries to zero first
  int64_t n_clear;
};

// losses[i] = log of the sum of exp(logits[i]) - logits[i][labels[i]]; rows with a negative label have a loss of 0.
// With `differentiate`, the logits are overwritten by their gradient, softmax - one-hot (0 for such rows).
struct CrossEntropy {
  int64_t rows, width, stride;  // stride between rows, in elements
  int32_t dtype, differentiate;
  void* logits;
  const int64_t* labels;
  float* losses;
};

// Cross entropy over rows of different lengths, (cu_seqlens[r], cu_seqlens[r + 1]) of the logits, which are overwritten
// by their gradient. Labels count from the row's start.
struct RowCrossEntropy {
  int64_t n_rows;
  int32_t dtype, differentiate;
  const int32_t* cu_seqlens;  // (n_rows + 1,)
  void* logits;
  const int64_t* labels;
  float* losses;
};

// *vnni = whether the instruction set in use has the fast instruction of int8_product.
struct Int8Support {
  int32_t* vnni;
};

// A weight in the layout of int8_product: each block of `block` along the depth (a multiple of 64) has a scale for each column.
// `down`: the weight is (depth, columns), not (columns, depth).
struct Int8Pack {
  int64_t depth, columns, block;
  int32_t down, reserved;
  const float* weight;
  uint8_t* packed;  // (panels, depth padded to fours, 32), 32 columns a panel
  float* scales;    // (blocks, panels * 32)
};

// y (rows, columns) = x (rows, depth) times the packed weight, plus bias. x is quantised by rows and blocks, rounded to
// nearest, or stochastically if `stochastic`: with Philox at (key, row, element).
struct Int8Product {
  int64_t rows, depth, columns, block;
  int32_t stochastic, reserved;
  uint64_t key;
  const float* x;
  const uint8_t* packed;
  const float* scales;
  const float* bias;  // null: 0
  float* y;
};

#define WHET_OPERATORS(X)                      \
  X(dropout, Dropout)                          \
  X(weight_gradient, WeightGradient)           \
  X(bf16_support, Bf16Support)                 \
  X(rotate, Rotate)                            \
  X(int8_support, Int8Support)                 \
  X(int8_pack, Int8Pack)                       \
  X(int8_product, Int8Product)                 \
  X(add_norm, AddNorm)                         \
  X(add_norm_backward, AddNormBackward)        \
  X(bias_act, BiasAct)                         \
  X(bias_act_backward, BiasAct)                \
  X(gated_act, GatedAct)                       \
  X(gated_act_backward, GatedAct)              \
  X(attention, Attention)                      \
  X(attention_backward, Attention)             \
  X(grad_norm, GradNorm)                       \
  X(adamw, AdamW)                              \
  X(adamw_8bit, AdamW8bit)                     \
  X(embed, Embed)                              \
  X(embed_backward, EmbedBackward)             \
  X(scatter, Scatter)                          \
  X(cross_entropy, CrossEntropy)               \
  X(row_cross_entropy, RowCrossEntropy)

// The operators of one instruction set.
struct Table {
#define WHET_MEMBER(name, Args) void (*name)(const Args&);
  WHET_OPERATORS(WHET_MEMBER)
#undef WHET_MEMBER
};

}  // namespace whet
