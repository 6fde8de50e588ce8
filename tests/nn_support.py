"""What the tests of both Flax APIs share: inputs, the comparison with gradients, and a dense attention layer written out."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from helpers import normal
from tolerance import assert_as_exact_as_unfused

BATCH, LENGTH, FEATURES = 2, 12, 16


def assert_close(actual, unfused, reference) -> None:
    """The tolerance, leaf by leaf of alike pytrees."""
    for (path, x), y, ref in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(unfused), jax.tree.leaves(reference), strict=True):
        assert x.dtype == y.dtype
        assert_as_exact_as_unfused(jax.tree_util.keystr(path), x, y, ref, x.dtype)


def cast(tree, dtype) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def value_and_gradients(function, weights, params, *inputs):
    """Output (jitted), and the gradients of a weighted sum of it in parameters and inputs."""

    def loss(params, *inputs):
        out = function(params, *inputs)
        return jnp.sum(out * weights.astype(out.dtype), dtype=jnp.promote_types(out.dtype, jnp.float32)), out

    gradients, out = jax.jit(jax.grad(loss, argnums=tuple(range(1 + len(inputs))), has_aux=True))(params, *inputs)
    return out, gradients


def check(function, unfused, params, *inputs, dtype=jnp.float32):
    """`function` against `unfused` in its dtype and in float64: output and every gradient.

    Not for projections with a bias: the gradient of the keys' bias is 0 but for rounding, so it has no scale to judge an error by.
    """
    weights = normal(9, BATCH, LENGTH, FEATURES)
    actual, plain = (value_and_gradients(f, weights, *cast((params, *inputs), dtype)) for f in (function, unfused))
    with jax.enable_x64(True):
        reference = value_and_gradients(unfused, weights, *cast((params, *inputs), jnp.float64))
        assert_close(actual, plain, reference)


HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
EVERYTHING: dict[str, Any] = dict(
    **HEADS, is_causal=True, local_window_size=(5, None), rope_theta=100.0, use_sinks=True, logits_soft_cap=2.0
)
EVERYTHING |= {"use_bias": False, "sinks_init": jax.nn.initializers.normal(1.0)}
SEGMENTS = jnp.array([[0] * 4 + [1] * 8, [0] * 7 + [1] * 5])


def dense_module(params, x, segments):
    """What `EVERYTHING` says, written out, in the dtype of the parameters."""
    p = params["params"]
    q, k, v = (jnp.einsum("blf,fhd->blhd", x, p[name]["kernel"]) for name in ("query", "key", "value"))
    rotate = lambda x: jax.vmap(nnx.RoPE(theta=100.0), in_axes=-2, out_axes=-2)(x).astype(x.dtype)
    q, k, v = rotate(q), jnp.repeat(rotate(k), 2, axis=2), jnp.repeat(v, 2, axis=2)
    s = 2.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5 / 2.0)
    i = jnp.arange(x.shape[1])
    seen = (i[:, None] >= i) & (i[:, None] - i <= 5) & (segments[:, None, :, None] == segments[:, None, None, :])
    s = jnp.where(seen, s, -jnp.inf)
    sinks = jnp.broadcast_to(p["sinks"][:, None, None], (*s.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([s, sinks], -1))[..., :-1]
    return jnp.einsum("bqhd,hdf->bqf", jnp.einsum("bhqk,bkhd->bqhd", weights, v), p["out"]["kernel"])
