"""Bad input to every parameter: the type of the error, and that its text names the argument, what came and what was expected."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_jax import Mask, dispatch, dropout_mask, explain, flash_attention, segment_ids

B, Q_LEN, KV_LEN, HEADS, KV_HEADS, D = 2, 6, 7, 4, 2, 8


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def good():
    return {"query": zeros(B, Q_LEN, HEADS, D), "key": zeros(B, KV_LEN, KV_HEADS, D), "value": zeros(B, KV_LEN, KV_HEADS, D)}


def all_of(dtype):
    return {name: x.astype(dtype) for name, x in good().items()}


Q_IDS, KV_IDS = zeros(B, Q_LEN, dtype="int32"), zeros(B, KV_LEN, dtype="int32")
KEY = jax.random.key(0)
SHAPE = r"\[2, 4, 6, 7\]"

BAD = {
    # query, key, value
    "query rank": ({"query": zeros(Q_LEN, D)}, ValueError, r"query must have shape \[\*batch, len, heads, head_dim\].*got \[6, 8\]"),
    "key rank": ({"key": zeros(KV_LEN, D)}, ValueError, r"key must have shape .*got \[7, 8\]"),
    "value rank": ({"value": zeros(8)}, ValueError, r"value must have shape .*got \[8\]"),
    "ranks differ": ({"query": zeros(Q_LEN, HEADS, D)}, ValueError, "query, key and value must have one rank, got 3, 4, 4"),
    "query integer": (all_of("int32"), TypeError, "query must be float32, bfloat16, float16 or float64, got dtype int32"),
    "query boolean": (all_of("bool"), TypeError, "query must be float32.*got dtype bool"),
    "query complex": (all_of("complex64"), TypeError, "query must be float32.*got dtype complex64"),
    "query float8": (all_of("float8_e4m3fn"), TypeError, "query must be float32.*got dtype float8_e4m3fn"),
    "key integer": ({"key": zeros(B, KV_LEN, KV_HEADS, D, dtype="int8")}, TypeError, "key must be float32.*got dtype int8"),
    "value integer": ({"value": zeros(B, KV_LEN, KV_HEADS, D, dtype="int8")}, TypeError, "value must be float32.*got dtype int8"),
    "dtypes differ": (
        {"key": zeros(B, KV_LEN, KV_HEADS, D, dtype="bfloat16")},
        TypeError,
        "query, key and value must have one dtype, got float32, bfloat16, float32",
    ),
    "query None": ({"query": None}, TypeError, "query must be an array, got NoneType"),
    "key text": ({"key": "key"}, TypeError, "key must be an array, got str"),
    "value ragged": ({"value": [[1.0], [1.0, 2.0]]}, TypeError, "value must be an array, got list"),
    "batches differ": (
        {"query": zeros(3, Q_LEN, HEADS, D)},
        ValueError,
        r"query and key must have the same batch axes, got \[3, 6, 4, 8\] and",
    ),
    "key and value lengths": (
        {"value": zeros(B, 5, KV_HEADS, D)},
        ValueError,
        r"key and value must agree in all but the last axis, got \[2, 7, 2, 8\] and \[2, 5, 2, 8\]",
    ),
    "key and value heads": ({"value": zeros(B, KV_LEN, 1, D)}, ValueError, "key and value must agree in all but the last axis"),
    "head_dim differs": ({"key": zeros(B, KV_LEN, KV_HEADS, 9)}, ValueError, "query and key must have the same head_dim, got 8 and 9"),
    "head_dim 0": ({n: zeros(B, 6, 2, 0) for n in good()}, ValueError, "query: head_dim must be from 1 to 512, got 0"),
    "head_dim 513": ({n: zeros(B, 6, 2, 513) for n in good()}, ValueError, "query: head_dim must be from 1 to 512, got 513"),
    "v_head_dim 513": ({"value": zeros(B, KV_LEN, KV_HEADS, 513)}, ValueError, "value: head_dim must be from 1 to 512, got 513"),
    "heads": (
        {"query": zeros(B, Q_LEN, 3, D)},
        ValueError,
        "query heads must be a positive multiple of the key and value heads, got 3 and 2",
    ),
    "query transposed": (
        {"query": zeros(B, HEADS, 5, D)},
        ValueError,
        r"multiple of .* heads, got 5 and 2: query \[2, 4, 5, 8\], key \[2, 7, 2, 8\], whose axes are \[\*batch, len, heads, head_dim\]",
    ),
    "no heads": ({n: zeros(B, 6, 0, 8) for n in good()}, ValueError, "heads must be a positive multiple .*got 0 and 0"),
    # bias and mask
    "bias shape": ({"bias": zeros(2, 3, Q_LEN, KV_LEN)}, ValueError, rf"bias must broadcast to {SHAPE}, got \[2, 3, 6, 7\]"),
    "bias rank": ({"bias": zeros(1, 2, 4, Q_LEN, KV_LEN)}, ValueError, rf"bias must broadcast to {SHAPE}, got \[1, 2, 4, 6, 7\]"),
    "bias boolean": (
        {"bias": zeros(Q_LEN, KV_LEN, dtype=bool)},
        TypeError,
        "bias must have a float dtype, got bool. Boolean masks go to mask",
    ),
    "bias integer": ({"bias": zeros(Q_LEN, KV_LEN, dtype="int32")}, TypeError, "bias must have a float dtype, got int32"),
    "bias text": ({"bias": "alibi"}, TypeError, "bias must be an array, got str"),
    "mask integer": ({"mask": zeros(Q_LEN, KV_LEN, dtype="int32")}, TypeError, r"mask must be boolean \(True = visible\), got int32"),
    "mask float": ({"mask": zeros(Q_LEN, KV_LEN)}, TypeError, "mask must be boolean .*got float32. Additive masks go to bias"),
    "mask without heads": ({"mask": zeros(B, Q_LEN, KV_LEN, dtype=bool)}, ValueError, rf"mask must broadcast to {SHAPE}, .*x\[:, None\]"),
    "mask shape": ({"mask": zeros(B, 1, KV_LEN, Q_LEN, dtype=bool)}, ValueError, rf"mask must broadcast to {SHAPE}, got \[2, 1, 7, 6\]"),
    "bias a mask": ({"bias": Mask.causal()}, TypeError, "bias must be an array of floats, got a Mask. It goes to mask="),
    "mask a function": (
        {"mask": lambda b, h, i, j: i >= j},
        TypeError,
        r"mask must be a boolean array or a Mask, got <function .*Mask.from_function\(function\)",
    ),
    "mask not called": (
        {"mask": Mask.causal},
        TypeError,
        r"mask must be a boolean .*got <function Mask.causal .*called, as in Mask.causal\(\)",
    ),
    "mask text": ({"mask": "causal"}, TypeError, "mask must be an array, got str"),
    # numbers
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale must be finite in float32, got nan"),
    "scale inf": ({"scale": np.float64("-inf")}, ValueError, "scale must be finite in float32, got -inf"),
    "scale past float32": ({"scale": 10**400}, ValueError, "scale must be finite in float32, got 1000"),
    "scale boolean": ({"scale": True}, TypeError, r"scale must be a real number or a scalar array, got bool\[\]"),
    "scale complex": ({"scale": 1j}, TypeError, r"scale must be a real number or a scalar array, got complex64\[\]"),
    "scale shape": ({"scale": zeros(1)}, TypeError, r"scale must be a real number or a scalar array, got float32\[1\]"),
    "scale text": ({"scale": "auto"}, TypeError, "scale must be an array, got str"),
    "cap 0": ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must be positive and finite in float32, got 0.0. Use None for no cap"),
    "cap negative": ({"logits_soft_cap": -3}, ValueError, "logits_soft_cap must be positive .*got -3.0"),
    "cap NaN": ({"logits_soft_cap": np.float32("nan")}, ValueError, "logits_soft_cap must be positive .*got nan"),
    "cap 0 in float32": ({"logits_soft_cap": 1e-60}, ValueError, "logits_soft_cap must be positive and finite in float32, got 1e-60"),
    "cap too large": ({"logits_soft_cap": 1e38}, ValueError, "logits_soft_cap must be at most 1e\\+30, got 1e\\+38. Use None for no cap"),
    "cap of many digits": ({"logits_soft_cap": 10**400}, ValueError, "logits_soft_cap must be finite, got an integer of 1329 bits"),
    "cap boolean": ({"logits_soft_cap": True}, TypeError, "logits_soft_cap must be a number, got bool"),
    "cap complex": ({"logits_soft_cap": np.complex64(1)}, TypeError, "logits_soft_cap must be a number, got complex64"),
    "cap array": ({"logits_soft_cap": np.ones(2)}, TypeError, "logits_soft_cap must be a number, got ndarray"),
    "rate 1.5": ({"dropout_rate": 1.5, "dropout_key": KEY}, ValueError, r"dropout_rate must be in \[0, 1\), got 1.5"),
    "rate 1": ({"dropout_rate": 1, "dropout_key": KEY}, ValueError, r"dropout_rate must be in \[0, 1\), got 1.0"),
    "rate negative": ({"dropout_rate": -0.1, "dropout_key": KEY}, ValueError, r"dropout_rate must be in \[0, 1\), got -0.1"),
    "rate of many digits": ({"dropout_rate": 10**400}, ValueError, "dropout_rate must be finite, got an integer of 1329 bits"),
    "rate NaN": ({"dropout_rate": np.nan, "dropout_key": KEY}, ValueError, r"dropout_rate must be in \[0, 1\), got nan"),
    "rate None": ({"dropout_rate": None}, TypeError, "dropout_rate must be a number, got NoneType"),
    "no key": ({"dropout_rate": 0.1}, ValueError, "dropout_key is required when dropout_rate is not 0, got None"),
    "keys": (
        {"dropout_rate": 0.1, "dropout_key": jax.random.split(KEY)},
        ValueError,
        r"dropout_key must be one PRNG key.*got key<fry>\[2\]",
    ),
    "raw keys": (
        {"dropout_rate": 0.1, "dropout_key": zeros(2, 2, dtype="uint32")},
        ValueError,
        r"dropout_key must be one.*got uint32\[2, 2\]",
    ),
    "a seed": ({"dropout_rate": 0.1, "dropout_key": 0}, ValueError, r"dropout_key must be one PRNG key.*got int32\[\]"),
    "bad key, rate 0": ({"dropout_key": zeros(3)}, ValueError, r"dropout_key must be one PRNG key.*got float32\[3\]"),
    # who sees whom
    "window negative": ({"local_window_size": -1}, ValueError, "local_window_size: left must be non-negative, got -1"),
    "window right negative": ({"local_window_size": (1, -2)}, ValueError, "local_window_size: right must be non-negative, got -2"),
    "window float": ({"local_window_size": 4.0}, TypeError, r"local_window_size: left must be a Python or NumPy integer .*got float"),
    "window of 3": (
        {"local_window_size": (1, 2, 3)},
        ValueError,
        r"local_window_size must be one integer or \(left, right\), got \(1, 2, 3\)",
    ),
    "window boolean": (
        {"local_window_size": (3, True)},
        TypeError,
        r"local_window_size: right must be a Python or NumPy integer .*got bool",
    ),
    "window array": ({"local_window_size": np.array([3, 2])}, TypeError, r"local_window_size: left must be .*got ndarray"),
    "only q ids": ({"q_segment_ids": Q_IDS}, ValueError, "q_segment_ids and kv_segment_ids must be given together, got only one"),
    "only kv ids": ({"kv_segment_ids": KV_IDS}, ValueError, "q_segment_ids and kv_segment_ids must be given together, got only one"),
    "q ids shape": (
        {"q_segment_ids": KV_IDS, "kv_segment_ids": KV_IDS},
        ValueError,
        r"q_segment_ids must have shape \[2, 6\], got \[2, 7\]",
    ),
    "kv ids batch": (
        {"q_segment_ids": Q_IDS, "kv_segment_ids": zeros(3, KV_LEN, dtype="int32")},
        ValueError,
        r"kv_segment_ids must have shape \[2, 7\], got \[3, 7\]",
    ),
    "q ids float": (
        {"q_segment_ids": zeros(B, Q_LEN), "kv_segment_ids": KV_IDS},
        TypeError,
        "q_segment_ids must hold integers, got float32",
    ),
    "kv ids boolean": (
        {"q_segment_ids": Q_IDS, "kv_segment_ids": zeros(B, KV_LEN, dtype=bool)},
        TypeError,
        "kv_segment_ids must hold integers, got bool",
    ),
    "kv lengths shape": ({"key_value_seq_lengths": jnp.arange(3)}, ValueError, r"key_value_seq_lengths must have shape \[2\], got \[3\]"),
    "kv lengths rank": ({"key_value_seq_lengths": [[1, 2]]}, ValueError, r"key_value_seq_lengths must have shape \[2\], got \[1, 2\]"),
    "kv lengths float": ({"key_value_seq_lengths": zeros(B)}, TypeError, "key_value_seq_lengths must hold integers, got float32"),
    "q lengths shape": ({"query_seq_lengths": jnp.arange(3)}, ValueError, r"query_seq_lengths must have shape \[2\], got \[3\]"),
    "q lengths float": ({"query_seq_lengths": [1.0, 2.0]}, TypeError, "query_seq_lengths must hold integers, got float32"),
    "q lengths boolean": ({"query_seq_lengths": np.array([True, False])}, TypeError, "query_seq_lengths must hold integers, got bool"),
    "offset float": ({"q_offset": 1.0}, TypeError, "q_offset must hold integers, got float32"),
    "offset None": ({"q_offset": None}, TypeError, "q_offset must be an array, got NoneType"),
    "offset boolean": ({"q_offset": True}, TypeError, "q_offset must hold integers, got bool"),
    "offset shape": ({"q_offset": jnp.arange(3)}, ValueError, r"q_offset must have shape \[2\], got \[3\]"),
    "offset far": ({"q_offset": 2**40}, ValueError, r"q_offset must lie within \+-2\*\*29, got 1099511627776"),
    # flags, sinks, tiles
    "causal integer": ({"is_causal": 1}, TypeError, "is_causal must be True or False, known before tracing, got int"),
    "causal None": ({"is_causal": None}, TypeError, "is_causal must be True or False, known before tracing, got NoneType"),
    "broadcast_dropout": ({"broadcast_dropout": "no"}, TypeError, "broadcast_dropout must be True or False, known before tracing, got str"),
    "deterministic": ({"deterministic_backward": 0}, TypeError, "deterministic_backward must be True or False.*got int"),
    "return_residual": ({"return_residual": 1}, TypeError, "return_residual must be True or False.*got int"),
    "sinks shape": ({"sinks": zeros(KV_HEADS)}, ValueError, r"sinks must have shape \[4\], one logit a query head, got \[2\]"),
    "sinks rank": ({"sinks": zeros(1, HEADS)}, ValueError, r"sinks must have shape \[4\].*got \[1, 4\]"),
    "sinks integer": ({"sinks": zeros(HEADS, dtype="int32")}, TypeError, "sinks must have a float dtype, got int32"),
    "tiles one": ({"block_sizes": 64}, TypeError, r"block_sizes must be None or two integers \(block_q, block_kv\), got 64"),
    "tiles three": ({"block_sizes": (64, 64, 64)}, TypeError, r"block_sizes must be None or two integers .*got \(64, 64, 64\)"),
    "tiles in no order": ({"block_sizes": {16, 32}}, TypeError, r"block_sizes must be None or two integers .*got \{.*\}"),
    "tiles float": ({"block_sizes": (64.0, 64)}, TypeError, r"block_sizes must be None or two integers .*got \(64.0, 64\)"),
    "tiles boolean": ({"block_sizes": (True, 64)}, TypeError, r"block_sizes must be None or two integers .*got \(True, 64\)"),
    "tiles 0": ({"block_sizes": (64, 0)}, ValueError, r"block_sizes must be at least 1, got \(64, 0\)"),
    "implementation": ({"implementation": "flash"}, ValueError, r"implementation must be None, one of \('.*'xla'.*got 'flash'"),
    "implementation in a list": ({"implementation": ["xla", "flash"]}, ValueError, "implementation must be None, one of .*got 'flash'"),
    "implementation integer": ({"implementation": 3}, ValueError, "implementation must be None, one of .*got 3"),
    "no implementation": ({"implementation": ()}, ValueError, "implementation must name at least one of .*got an empty sequence"),
    # Mask
    "prefix and causal": ({"mask": Mask.prefix(3), "is_causal": True}, ValueError, "mask: prefix already contains the causal rule"),
    "prefix shape": ({"mask": Mask.prefix(jnp.arange(3))}, ValueError, r"Mask.prefix: length must have shape \[2\], got \[3\]"),
    "blocks shape": (
        {"mask": Mask.from_blocks(zeros(1, 3, dtype=bool), 3, 4)},
        ValueError,
        r"Mask.from_blocks: blocks must broadcast to \[2, 4, 2, 2\], got \[1, 3\]",
    ),
    "segments shape": (
        {"mask": Mask.segments(Q_IDS, Q_IDS)},
        ValueError,
        r"Mask.segments: key must have shape \[2, 7\], got \[2, 6\]",
    ),
    "lengths dtype": ({"mask": Mask.lengths(zeros(B))}, TypeError, "Mask.lengths: query must hold integers, got float32"),
    "function with and": (
        {"mask": Mask.from_function(lambda b, h, q, k: q >= k and k > 2)},
        TypeError,
        r"Mask.from_function: the function must be arithmetic .*got Python's and.*Use &, \|, ~",
    ),
    "function result": (
        {"mask": Mask.from_function(lambda b, h, q, k: q - k)},
        TypeError,
        r"Mask.from_function: the function must return one boolean scalar for scalar indices, got \[.*int32",
    ),
    "function operand": (
        {"mask": Mask.from_function(lambda b, h, q, k, x: q > x, jnp.arange(5), per=("query",))},
        ValueError,
        r"Mask.from_function operand 0 \(per query\) must have shape \[2, 6\], got \[5\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("call", [flash_attention, explain], ids=["flash_attention", "explain"])
def test_bad_input(call, name):
    bad, error, text = BAD[name]
    with pytest.raises(error, match=f"(?s){text}"):
        call(**good() | bad)


def test_every_parameter_has_a_case():
    assert set(inspect.signature(flash_attention).parameters) == {argument for bad, *_ in BAD.values() for argument in bad}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("is_causal", True, "is_causal must be True or False, known before tracing, got .*Tracer"),
        ("broadcast_dropout", True, "broadcast_dropout must be True or False, known before tracing, got .*Tracer"),
        ("deterministic_backward", True, "deterministic_backward must be True or False, known before tracing, got .*Tracer"),
        ("return_residual", True, "return_residual must be True or False, known before tracing, got .*Tracer"),
        ("local_window_size", 3, r"local_window_size: left must be a Python or NumPy integer known before tracing, got .*Tracer"),
        (
            "local_window_size",
            (3, None),
            r"local_window_size: left must be a Python or NumPy integer known before tracing, got .*Tracer",
        ),
        ("logits_soft_cap", 3.0, "logits_soft_cap must be a number known before tracing, got a tracer. Close over it or mark it static"),
        ("dropout_rate", 0.1, "dropout_rate must be a number known before tracing, got a tracer. Close over it or mark it static"),
        ("block_sizes", (8, 8), r"block_sizes must be None or two integers \(block_q, block_kv\), got \(.*Tracer.*Tracer"),
    ],
)
def test_a_tracer_where_a_static_value_belongs(name, value, text):
    with pytest.raises(TypeError, match=f"(?s){text}"):
        jax.jit(lambda x: flash_attention(**good(), **{name: x}))(value)


def test_a_declined_implementation_says_why(monkeypatch):
    picky = dataclasses.replace(dispatch.BACKENDS[-1], name="picky", why_not=lambda problem, device: f"head_dim {problem.head_dim} is odd.")
    monkeypatch.setattr(dispatch, "BACKENDS", (picky, *dispatch.BACKENDS))
    monkeypatch.setattr(dispatch, "NAMES", ("picky", *dispatch.NAMES))
    for call in (flash_attention, explain):
        with pytest.raises(NotImplementedError, match=r"implementation='picky' cannot serve this call. picky: head_dim 8 is odd.*'xla'"):
            call(**good(), implementation="picky")
    explanation = explain(**good(), implementation=("picky", "xla"))
    assert explanation.implementation == "xla"
    assert explanation.why_not["picky"] == "head_dim 8 is odd."
    assert "picky: head_dim 8 is odd." in str(explanation)


def test_a_length_past_every_integer_means_all():
    out = flash_attention(**good(), key_value_seq_lengths=np.array([2**63, 3], np.uint64), return_residual=True)[1]
    np.testing.assert_allclose(out, np.log(np.array([KV_LEN, 3.0]))[:, None, None] * np.ones(out.shape), rtol=1e-6)


def test_a_symbolic_length():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("2, t, 4, 8"), jnp.float32)
    with pytest.raises(ValueError, match=r"query: len must be a number, got t\. Only batch axes may be symbolic"):
        jax.export.export(jax.jit(flash_attention))(x, x, x)


def test_only_xla_takes_a_symbolic_batch(monkeypatch):
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: dispatch.Device("gpu", "NVIDIA H200"))
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 6, 4, 64"), jnp.bfloat16)
    explanation = explain(x, x, x)
    assert explanation.implementation == "xla"
    assert explanation.why_not["hopper"] == "the batch must be a number, got b."


def test_explain_names_an_unknown_argument():
    with pytest.raises(TypeError, match="unexpected keyword argument 'wndow'"):
        explain(**good(), wndow=3)


def test_explain_takes_what_flash_attention_takes():
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in good().items()}
    static = {
        "local_window_size": np.array(3),
        "logits_soft_cap": jnp.array(3.0),
        "dropout_rate": np.float32(0.1),
        "block_sizes": np.array([4, 4]),
    }
    assert flash_attention(**good(), **static, dropout_key=KEY).shape == (B, Q_LEN, HEADS, D)
    assert explain(**abstract, **static, dropout_key=KEY, implementation="xla").implementation == "xla"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Mask.sliding_window(-1, 0), ValueError, "Mask.sliding_window: left must be non-negative, got -1"),
        (lambda: Mask.sliding_window(None, 2.0), TypeError, "Mask.sliding_window: right must be a Python or NumPy integer .*got float"),
        (lambda: Mask.prefix(-1), ValueError, r"Mask.prefix: length must be non-negative, got -1. .*Mask.causal\(\)"),
        (lambda: Mask.prefix(2.5), TypeError, "Mask.prefix: length must hold integers, got float32"),
        (lambda: Mask.prefix([True]), TypeError, "Mask.prefix: length must hold integers, got bool"),
        (lambda: Mask.from_blocks(zeros(2, 2), 3, 4), TypeError, "Mask.from_blocks: blocks must be boolean .*got float32"),
        (lambda: Mask.from_blocks([[1, 0]], 3, 4), TypeError, "Mask.from_blocks: blocks must be boolean .*got int32"),
        (
            lambda: Mask.from_function(lambda q, k: q >= k),
            TypeError,
            r"function must take batch, head, q_index, kv_index and each operand, 4 arguments, got \(q, k\)",
        ),
        (
            lambda: Mask.from_function(lambda b, h, q, k: q >= k, zeros(2), per=("key",)),
            TypeError,
            r"each operand, 5 arguments, got \(b, h, q, k\)",
        ),
        (lambda: segment_ids([0, 5, 3], 8), ValueError, r"cu_seqlens must rise from 0 to at most length, got \[0 5 3\] and 8"),
        (lambda: segment_ids(jnp.array([1, 5]), 8), ValueError, r"cu_seqlens must rise from 0 .*got \[1 5\] and 8"),
        (lambda: segment_ids([0, 5, 900], 8), ValueError, r"cu_seqlens must rise from 0 .*got \[  0   5 900\] and 8"),
        (lambda: Mask.chunked(0), ValueError, "Mask.chunked: size must be at least 1, got 0"),
        (lambda: Mask.chunked(2.0), TypeError, "Mask.chunked: size must be a Python or NumPy integer known before tracing, got float"),
        (lambda: Mask.chunked(True), TypeError, "Mask.chunked: size must be .*got bool"),
        (lambda: Mask.from_blocks(zeros(1, 1, dtype=bool), 0, 4), ValueError, "block_q and block_kv must be at least 1, got 0 and 4"),
        (
            lambda: Mask.from_blocks(zeros(1, 1, dtype=bool), 4, 4.0),
            TypeError,
            "Mask.from_blocks: block_kv must be a Python or NumPy integer.*got float",
        ),
        (
            lambda: Mask.from_function(lambda *_: True, zeros(2)),
            ValueError,
            r"per must name one layout for each of the 1 operands, got \(\)",
        ),
        (lambda: Mask.from_function(lambda *_: True, zeros(2), per=("row",)), ValueError, "per entries must be among .*'query'.*got 'row'"),
        (lambda: segment_ids(jnp.array([0.0, 2.0]), 4), ValueError, r"cu_seqlens must be a vector of integers .*got float32\[2\]"),
        (lambda: segment_ids(jnp.array([[0, 2]]), 4), ValueError, r"cu_seqlens must be a vector of integers .*got int32\[1, 2\]"),
        (
            lambda: segment_ids([0, 4], 4.0),
            TypeError,
            "segment_ids: length must be a Python or NumPy integer known before tracing, got float",
        ),
        (lambda: dropout_mask(KEY, 1.5, (1, 2, 2)), ValueError, r"rate must be in \[0, 1\), got 1.5"),
        (lambda: dropout_mask(0, 0.5, (1, 2, 2)), ValueError, r"key must be one PRNG key.*got int32\[\]"),
        (lambda: dropout_mask(KEY, 0.5, (2, 2)), ValueError, r"shape must be \(\*batch, num_heads, q_len, kv_len\), .* got \(2, 2\)"),
        (lambda: dropout_mask(KEY, 0.5, (4, 1, 2, 2), q_offset=jnp.arange(3)), ValueError, r"q_offset must have shape \[4\], got \[3\]"),
        (lambda: dropout_mask(KEY, 0.5, (1, 2, 2), q_offset=1.5), TypeError, "q_offset must hold integers, got float32"),
        (lambda: dropout_mask(KEY, 0.5, 5), ValueError, r"shape must be \(\*batch, num_heads, q_len, kv_len\), .* got 5"),
        (lambda: dropout_mask(KEY, 0.5, (2, 3, -4)), ValueError, r"shape must be .*got \(2, 3, -4\)"),
        (lambda: dropout_mask(KEY, 0.5, (1, 2, 10**400)), ValueError, r"shape must be .*each from 0 to 2\*\*29, got \(1, 2, 1000"),
        (lambda: dropout_mask(KEY, 0.5, (2, 3, 4), broadcast_dropout=1), TypeError, "broadcast_dropout must be True or False.*got int"),
        (lambda: segment_ids([0, 3], -1), ValueError, r"segment_ids: length must be from 0 to 2\*\*29, got -1"),
        (lambda: segment_ids([0, 3], 10**400), ValueError, r"segment_ids: length must be from 0 to 2\*\*29, got 1000"),
        (lambda: Mask.from_function(3), TypeError, "Mask.from_function: function must be callable, got int"),
        (lambda: Mask.from_function(lambda *_: True, zeros(2), per=3), TypeError, "Mask.from_function: per must be a sequence.*got 3"),
    ],
)
def test_bad_input_to_the_helpers(make, error, text):
    with pytest.raises(error, match=text):
        make()


NOTHING = [(0, 6, 7), (2, 0, 7), (2, 6, 0), (2, 0, 0)]


@pytest.mark.parametrize("sizes", NOTHING, ids=str)
def test_empty_axes_are_no_error(sizes):
    batch, q_len, kv_len = sizes
    arguments = {
        "query": jnp.ones((batch, q_len, 2, D)),
        "key": jnp.ones((batch, kv_len, 2, D)),
        "value": jnp.ones((batch, kv_len, 2, D)),
        "bias": jnp.ones((batch, 2, q_len, kv_len)),
    }
    ids = lambda length: jnp.zeros((batch, length), int)
    mask = Mask.from_blocks(jnp.ones((batch, 2, -(-q_len // 4), -(-kv_len // 4)), bool), 4, 4)
    mask &= Mask.from_function(lambda b, h, q, k, row: row <= k, ids(q_len), per=("query",))
    fixed = {
        "mask": mask,
        "is_causal": True,
        "key_value_seq_lengths": jnp.zeros(batch, int),
        "q_segment_ids": ids(q_len),
        "kv_segment_ids": ids(kv_len),
        "q_offset": jnp.zeros(batch, int),
        "dropout_rate": 0.5,
        "dropout_key": KEY,
    }
    out, lse = flash_attention(**arguments, **fixed, return_residual=True)
    np.testing.assert_array_equal(out, np.zeros((batch, q_len, 2, D)))
    np.testing.assert_array_equal(lse, np.full((batch, q_len, 2), -np.inf))
    gradients = jax.grad(lambda arguments: flash_attention(**arguments, **fixed).sum())(arguments)
    for name, x in arguments.items():
        np.testing.assert_array_equal(gradients[name], np.zeros_like(x))


def test_numpy_and_lists_are_arrays():
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(x.shape, np.float32) for name, x in good().items()}
    words = {"mask": random.random((Q_LEN, KV_LEN)) < 0.8, "key_value_seq_lengths": np.array([5, 7]), "q_offset": np.array([1, 2])}
    sinks = random.standard_normal(HEADS, np.float32)
    expected = flash_attention(**jax.tree.map(jnp.asarray, arrays | words), sinks=jnp.asarray(sinks))
    for convert in (lambda x: x, np.ndarray.tolist):
        got = flash_attention(**{name: convert(x) for name, x in (arrays | words).items()}, sinks=convert(sinks))
        np.testing.assert_array_equal(got, expected)
