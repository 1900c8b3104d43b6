"""The argument structures of the native operators: the mirror of native/args.h, field by field."""

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

FLOAT32, BFLOAT16 = 0, 1
GELU_ERF, GELU_TANH, SILU = 0, 1, 2


def _fields(*groups: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return ctypes fields from ("names with blanks", type) pairs."""
    return tuple((name, kind) for names, kind in groups for name in names.split())


class Mask(ctypes.Structure):
    """Which elements of a hidden state dropout keeps; all zero: all of them."""

    _fields_ = _fields(("key", c_uint64), ("threshold", c_uint32), ("scale", c_float), ("slot position", c_void_p))


class View(ctypes.Structure):
    """A (tokens, heads, head width) tensor; strides in elements."""

    _fields_ = _fields(("data", c_void_p), ("token_stride head_stride", c_int64))


class Dropout(ctypes.Structure):
    """Arguments of `whet_dropout`."""

    _fields_ = _fields(("rows width", c_int64), ("dtype reserved", c_int32), ("mask", Mask), ("x y", c_void_p))


class WeightGradient(ctypes.Structure):
    """Arguments of `whet_weight_gradient`."""

    _fields_ = _fields(("rows width out dy_stride", c_int64), ("dtype add", c_int32), ("dy x dweight dbias", c_void_p))


class Bf16Support(ctypes.Structure):
    """Arguments of `whet_bf16_support`."""

    _fields_ = _fields(("pairs", c_void_p))


class Rotate(ctypes.Structure):
    """Arguments of `whet_rotate`."""

    _fields_ = _fields(
        ("rows heads rotated width angles", c_int64), ("dtype back", c_int32), ("x", View), ("cos sin y", c_void_p)
    )


class Int8Support(ctypes.Structure):
    """Arguments of `whet_int8_support`."""

    _fields_ = _fields(("vnni", c_void_p))


class Int8Pack(ctypes.Structure):
    """Arguments of `whet_int8_pack`."""

    _fields_ = _fields(("depth columns block", c_int64), ("down reserved", c_int32), ("weight packed scales", c_void_p))


class Int8Product(ctypes.Structure):
    """Arguments of `whet_int8_product`."""

    _fields_ = _fields(
        ("rows depth columns block", c_int64),
        ("stochastic reserved", c_int32),
        ("key", c_uint64),
        ("x packed scales bias y", c_void_p),
    )


class AddNorm(ctypes.Structure):
    """Arguments of `whet_add_norm`."""

    _fields_ = _fields(
        ("rows width", c_int64),
        ("dtype rms", c_int32),
        ("eps", c_float),
        ("reserved", c_int32),
        ("mask", Mask),
        ("x residual linear_bias weight bias sum y mean rstd", c_void_p),
    )


class AddNormBackward(ctypes.Structure):
    """Arguments of `whet_add_norm_backward`."""

    _fields_ = _fields(
        ("rows width", c_int64),
        ("dtype rms", c_int32),
        ("mask", Mask),
        ("dy dsum_in sum mean rstd weight dsum dx dweight dbias dlinear_bias", c_void_p),
    )


class BiasAct(ctypes.Structure):
    """Arguments of `whet_bias_act` and its backward."""

    _fields_ = _fields(("rows width", c_int64), ("dtype kind", c_int32), ("x bias y dy dx dbias", c_void_p))


class GatedAct(ctypes.Structure):
    """Arguments of `whet_gated_act` and its backward."""

    _fields_ = _fields(
        ("rows width", c_int64),
        ("dtype kind", c_int32),
        ("gate up", c_void_p),
        ("in_stride", c_int64),
        ("y dy dgate dup", c_void_p),
        ("grad_stride", c_int64),
    )


class Attention(ctypes.Structure):
    """Arguments of `whet_attention` and its backward."""

    _fields_ = _fields(
        ("n_rows heads key_heads head_width", c_int64),
        ("dtype causal", c_int32),
        ("scale", c_float),
        ("threshold", c_uint32),
        ("key", c_uint64),
        ("keep_scale", c_float),
        ("window", c_int32),
        ("cu_seqlens row_slots key_counts", c_void_p),
        ("q k v out", View),
        ("lse", c_void_p),
        ("dout dq dk dv", View),
        ("bias", c_void_p),
        ("reach", c_int64),
        ("dbias dbias_rows places", c_void_p),
        ("n_places", c_int64),
        ("relative_keys relative_queries drelative_keys drelative_queries", View),
    )


class GradNorm(ctypes.Structure):
    """Arguments of `whet_grad_norm`."""

    _fields_ = _fields(
        ("n_tensors", c_int64),
        ("grads sizes dtypes rows_in_use widths", c_void_p),
        ("result", POINTER(c_double)),
    )


class AdamW(ctypes.Structure):
    """Arguments of `whet_adamw`."""

    _fields_ = _fields(
        ("n_tensors", c_int64),
        ("sizes params dtypes grads first second masters learning_rates weight_decays", c_void_p),
        ("rows_in_use widths", c_void_p),
        ("eps grad_scale", c_float),
        ("beta1 beta2 correction1 correction2", c_double),
    )


class AdamW8bit(ctypes.Structure):
    """Arguments of `whet_adamw_8bit`."""

    _fields_ = _fields(
        ("n_tensors", c_int64),
        ("sizes params dtypes grads first second first_scales second_scales masters", c_void_p),
        ("learning_rates weight_decays", c_void_p),
        ("eps grad_scale", c_float),
        ("beta1 beta2 correction1 correction2", c_double),
    )


class Embed(ctypes.Structure):
    """Arguments of `whet_embed`."""

    _fields_ = _fields(
        ("rows width", c_int64),
        ("dtype", c_int32),
        ("eps", c_float),
        ("mask", Mask),
        ("ids tables", c_void_p * 3),
        ("weight bias y mean rstd", c_void_p),
    )


class EmbedBackward(ctypes.Structure):
    """Arguments of `whet_embed_backward`."""

    _fields_ = _fields(
        ("rows width", c_int64),
        ("dtype reserved", c_int32),
        ("mask", Mask),
        ("ids tables", c_void_p * 3),
        ("weight mean rstd dy dsum dweight dbias", c_void_p),
    )


class Scatter(ctypes.Structure):
    """Arguments of `whet_scatter`."""

    _fields_ = _fields(
        ("rows width padding_id", c_int64), ("ids values table_grad order clear", c_void_p), ("n_clear", c_int64)
    )


class CrossEntropy(ctypes.Structure):
    """Arguments of `whet_cross_entropy`."""

    _fields_ = _fields(
        ("rows width stride", c_int64), ("dtype differentiate", c_int32), ("logits labels losses", c_void_p)
    )


class RowCrossEntropy(ctypes.Structure):
    """Arguments of `whet_row_cross_entropy`."""

    _fields_ = _fields(
        ("n_rows", c_int64), ("dtype differentiate", c_int32), ("cu_seqlens logits labels losses", c_void_p)
    )


OPERATORS: dict[str, type[ctypes.Structure]] = {
    "dropout": Dropout,
    "weight_gradient": WeightGradient,
    "bf16_support": Bf16Support,
    "rotate": Rotate,
    "int8_support": Int8Support,
    "int8_pack": Int8Pack,
    "int8_product": Int8Product,
    "add_norm": AddNorm,
    "add_norm_backward": AddNormBackward,
    "bias_act": BiasAct,
    "bias_act_backward": BiasAct,
    "gated_act": GatedAct,
    "gated_act_backward": GatedAct,
    "attention": Attention,
    "attention_backward": Attention,
    "grad_norm": GradNorm,
    "adamw": AdamW,
    "adamw_8bit": AdamW8bit,
    "embed": Embed,
    "embed_backward": EmbedBackward,
    "scatter": Scatter,
    "cross_entropy": CrossEntropy,
    "row_cross_entropy": RowCrossEntropy,
}
