"""`flash_attention` under the signature of a folder of cases collected from public bug reports."""

import jax.numpy as jnp
from reference import Unsupported  # pyright: ignore[reportMissingImports]  # the cases folder is on sys.path when it exists

from flash_jax import flash_attention


def attention(
    q,
    k,
    v,
    *,
    causal_alignment="top_left",
    softcap=None,
    softcap_order="cap_then_bias",
    dropout_rng=None,
    return_lse=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    **options,
):
    if softcap_order != "cap_then_bias":
        raise Unsupported("the soft cap bounds the scaled scores, before the bias")
    q_offset = 0
    if causal_alignment == "bottom_right":
        q_length = q.shape[1] if query_seq_lengths is None else query_seq_lengths
        kv_length = k.shape[1] if key_value_seq_lengths is None else key_value_seq_lengths
        q_offset = kv_length - q_length
        if not isinstance(q_offset, int):
            q_offset = jnp.broadcast_to(q_offset, q.shape[:1])
    return flash_attention(
        q,
        k,
        v,
        q_offset=q_offset,
        logits_soft_cap=softcap,
        dropout_key=dropout_rng,
        return_residual=return_lse,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        **options,
    )
