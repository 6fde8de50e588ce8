"""The list of cases: one row a feature or combination, met by the reference, `xla` and every kernel."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import Mask, segment_ids


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Sizes and, as a function of a random generator and the shape, the other arguments of `flash_attention`."""

    name: str
    options: Callable[["Case", np.random.Generator], dict] = lambda case, random: {}
    batch: tuple[int, ...] = (2,)
    q_len: int = 70
    kv_len: int = 70
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    dtype: str = "float32"
    std: float = 1.0

    def build(self):
        """`(arguments, dout, dlse)`; the same for every call."""
        random = np.random.default_rng(sum(map(ord, self.name)))
        normal = lambda *shape: jnp.asarray(self.std * random.standard_normal(shape, np.float32)).astype(self.dtype)
        v_head_dim = self.v_head_dim or self.head_dim
        arguments = {
            "query": normal(*self.batch, self.q_len, self.num_heads, self.head_dim),
            "key": normal(*self.batch, self.kv_len, self.num_kv_heads, self.head_dim),
            "value": normal(*self.batch, self.kv_len, self.num_kv_heads, v_head_dim),
        }
        arguments |= self.options(self, random)
        dout = normal(*self.batch, self.q_len, self.num_heads, v_head_dim)
        dlse = jnp.asarray(random.standard_normal((*self.batch, self.q_len, self.num_heads), np.float32))
        return arguments, dout, dlse


def _case(name, options=None, **sizes):
    if isinstance(options, dict):
        fixed = options
        options = lambda case, random: dict(fixed)
    return Case(name, options, **sizes) if options else Case(name, **sizes)


def _bias(*shape, hide=0.0):
    def options(case, random):
        bias = random.standard_normal(shape, np.float32)
        return {"bias": jnp.asarray(np.where(random.random(shape) < hide, -np.inf, bias))}

    return options


def _bias_of_padding(case, random):
    """Finite, but of rows and keys so low that log(l) is lost in their lse: what is alike there is weighed alike."""
    bias = random.standard_normal((2, 1, case.q_len, case.kv_len), np.float32)
    bias[0, :, 5:12], bias[1, :, :, :20] = -1e30, -1e30
    return {"bias": jnp.asarray(bias).astype(case.dtype)}


def _dense(*shape, visible=0.6):
    return lambda case, random: {"mask": jnp.asarray(random.random(shape) < visible)}


def _key(seed=0):
    return jax.random.key(seed)


def _packed(case, random):
    ids = jnp.stack([segment_ids(jnp.array([0, 20, 21, 50, 64]), case.q_len), segment_ids(jnp.array([0, 64]), case.q_len)])
    return {"q_segment_ids": ids, "kv_segment_ids": ids, "is_causal": True}


def _scattered_labels(case, random):
    ids = lambda length: jnp.asarray(random.integers(0, 4, (2, length)))
    return {"q_segment_ids": ids(case.q_len), "kv_segment_ids": ids(case.kv_len)}


def _two_segmentations(case, random):
    ids = lambda length: jnp.sort(jnp.asarray(random.integers(0, 3, (2, length))), -1)
    return {"mask": Mask.segments(ids(case.q_len), ids(case.kv_len)) & Mask.segments(ids(case.q_len), ids(case.kv_len))}


def _document_function(case, random):
    ids = jnp.sort(jnp.asarray(random.integers(0, 3, (2, case.kv_len))), -1)
    return {"mask": Mask.from_function(lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k - 3))}


def _function_with_operands(case, random):
    rows = jnp.asarray(random.integers(0, 60, (2, case.q_len)))
    columns = jnp.asarray(random.integers(0, 9, (case.kv_len,)))
    heads, shift = jnp.array([1, 5]), jnp.array([0, 7])
    visible = lambda b, h, q, k, row, column, head, shift: k + shift <= row + column + head
    mask = Mask.from_function(visible, rows, columns, heads, shift, per=("query", "key", "head", "scalar"))
    return {"mask": mask}


def _blocks(*lead, block_q=16, block_kv=24, density=0.5):
    def options(case, random):
        shape = (*lead, -(-case.q_len // block_q), -(-case.kv_len // block_kv))
        return {"mask": Mask.from_blocks(jnp.asarray(random.random(shape) < density), block_q, block_kv)}

    return options


def _everything(case, random):
    ids = jnp.asarray(np.sort(random.integers(0, 2, (2, 70))))
    return {
        "bias": jnp.asarray(random.standard_normal((1, 4, 70, 70), np.float32)),
        "mask": jnp.asarray(random.random((2, 1, 1, 70)) < 0.9),
        "scale": jnp.float32(0.3),
        "is_causal": True,
        "query_seq_lengths": jnp.array([70, 41]),
        "key_value_seq_lengths": jnp.array([70, 66]),
        "local_window_size": (40, 3),
        "q_segment_ids": ids,
        "kv_segment_ids": ids,
        "logits_soft_cap": 3.0,
        "sinks": jnp.array([0.5, -1.0, 0.0, 2.0]),
        "dropout_rate": 0.2,
        "dropout_key": _key(3),
    }


CASES = (
    # who sees whom, as intervals
    _case("full"),
    _case("causal", {"is_causal": True}),
    _case("causal_fewer_rows", {"is_causal": True}, q_len=33),
    _case("causal_more_rows", {"is_causal": True}, q_len=101, kv_len=40),
    _case("bottom_right", {"is_causal": True, "q_offset": 37}, q_len=33),
    _case("bottom_right_empty_rows", {"is_causal": True, "q_offset": -30}, q_len=100),
    _case("offset_by_batch", {"is_causal": True, "q_offset": jnp.array([5, -8])}, q_len=40),
    _case("window", {"local_window_size": 9}),
    _case("window_left", {"local_window_size": (9, 0), "is_causal": True}),
    _case("window_right", {"local_window_size": (None, 6)}, q_len=50),
    _case("window_past_the_keys", {"local_window_size": (3, 2)}, q_len=120, kv_len=40),
    _case("kv_lengths", {"key_value_seq_lengths": jnp.array([13, 0])}),
    _case(
        "both_lengths_causal", {"is_causal": True, "query_seq_lengths": jnp.array([9, 70]), "key_value_seq_lengths": jnp.array([70, 21])}
    ),
    _case("prefix", {"mask": Mask.prefix(25)}),
    _case("prefix_by_batch", {"mask": Mask.prefix(jnp.array([3, 50]))}),
    _case("chunked_causal", {"mask": Mask.chunked(24) & Mask.causal(), "q_offset": 5}),
    # who sees whom, by predicates
    _case("packed", _packed),
    _case("scattered_labels", _scattered_labels, kv_len=60),
    _case("two_segmentations", _two_segmentations),
    _case("dense_full", _dense(2, 2, 70, 70)),
    _case("dense_keys", _dense(2, 1, 1, 70)),
    _case("dense_rank_2_hidden_rows", _dense(70, 1, visible=0.7)),
    _case("dense_heads", _dense(2, 70, 70), num_heads=2),
    _case("dense_sparse_causal", lambda c, r: _dense(1, 1, 70, 70, visible=0.05)(c, r) | {"is_causal": True}),
    _case("function_over_captured", _document_function),
    _case("function_with_operands", _function_with_operands),
    _case("function_of_positions", {"mask": Mask.from_function(lambda b, h, q, k: (q - k) % 3 == 0) & Mask.causal()}),
    _case("blocks", _blocks()),
    _case("blocks_by_head", _blocks(2, 4, block_q=20, block_kv=7, density=0.3), num_heads=4),
    # on the logits
    _case("bias_full", _bias(2, 2, 70, 70)),
    _case("bias_shared_batch_hides", lambda c, r: _bias(1, 2, 70, 70, hide=0.3)(c, r) | {"is_causal": True}),
    _case("bias_of_padding", _bias_of_padding),
    _case("bias_keys", _bias(2, 1, 1, 70)),
    _case("bias_heads", _bias(2, 1, 1), num_heads=2),
    _case("bias_rows_gqa", _bias(1, 4, 70, 1), num_heads=4),
    _case("soft_cap", {"logits_soft_cap": 2.0, "is_causal": True}, std=2.0),
    _case("soft_cap_above", {"logits_soft_cap": 30.0, "is_causal": True}),
    _case("soft_cap_bias", lambda c, r: _bias(1, 1, 70, 70)(c, r) | {"logits_soft_cap": 1.5}, std=2.0),
    _case("scale_zero", {"scale": 0.0, "is_causal": True}),
    _case("scale_negative", {"scale": -0.7}),
    _case("scale_array", {"scale": jnp.float32(0.4), "is_causal": True}),
    _case("sinks", {"sinks": jnp.array([0.3, 4.0]), "is_causal": True}),
    _case("sinks_empty_rows", {"sinks": jnp.array([0.3, -2.0]), "key_value_seq_lengths": jnp.array([0, 9])}),
    _case("dropout", lambda c, r: {"dropout_rate": 0.3, "dropout_key": _key(), "is_causal": True}),
    _case("dropout_shared", lambda c, r: {"dropout_rate": 0.5, "dropout_key": _key(7), "broadcast_dropout": True}),
    _case("large_logits", {"is_causal": True}, std=4.0),
    # shapes and dtypes
    _case("gqa", {"is_causal": True}, num_heads=6, num_kv_heads=2),
    _case("mqa", {"local_window_size": (30, 0)}, num_heads=3, num_kv_heads=1),
    _case("one_row", {"is_causal": True, "q_offset": 69}, q_len=1, num_heads=4),
    _case("one_key", kv_len=1),
    _case("v_head_dim", {"is_causal": True}, head_dim=40, v_head_dim=24),
    _case("head_dim_1", head_dim=1),
    _case("head_dim_72", {"is_causal": True}, head_dim=72),
    _case("latent_head_dims", {"is_causal": True}, head_dim=192, v_head_dim=128, num_heads=1, num_kv_heads=1),
    _case("no_batch_axis", {"is_causal": True}, batch=()),
    _case("two_batch_axes", {"is_causal": True, "key_value_seq_lengths": jnp.array([[70, 3, 0], [9, 66, 40]])}, batch=(2, 3), q_len=20),
    _case("longer_than_a_tile", {"is_causal": True}, batch=(1,), q_len=300, kv_len=310),
    _case("bfloat16", {"is_causal": True}, dtype="bfloat16", head_dim=64),
    _case("bfloat16_bias", lambda c, r: _bias(1, 2, 70, 70)(c, r) | {"is_causal": True}, dtype="bfloat16"),
    _case("float16", {"is_causal": True}, dtype="float16", head_dim=32),
    _case("everything", _everything, num_heads=4),
    _case("everything_bfloat16", _everything, num_heads=4, dtype="bfloat16"),
)

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)
