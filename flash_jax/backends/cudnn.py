"""NVIDIA GPUs that have no kernel of ours yet: hands a call to `jax.nn`'s cuDNN, only where the result keeps every promise.

Promises that cuDNN does not keep, each declined: rows without a visible key give 0; NaN in hidden keys reaches nothing; lse is
float32 and differentiable; a bias of -inf hides a key; a window without an upper bound attends to no later key.
"""

import jax

from flash_jax.backends.base import Backend, Device, by_one_rule
from flash_jax.problem import Operands, Problem

Array = jax.Array


def why_not(problem: Problem, device: Device) -> str | None:
    """What cuDNN through `jax.nn` cannot do, or does otherwise than documented."""
    if device.platform != "gpu" or "AMD" in device.kind:
        return f"cuDNN needs an NVIDIA GPU, got {device.kind} ({device.platform})."
    if problem.dtype.name not in ("bfloat16", "float16"):
        return f"cuDNN takes bfloat16 and float16, got {problem.dtype.name}."
    if problem.head_dim != problem.v_head_dim or problem.head_dim % 8 or problem.head_dim > 128:
        return f"cuDNN takes one head_dim, a multiple of 8 up to 128, got {problem.head_dim} and {problem.v_head_dim}."
    if problem.q_len % 2 or problem.kv_len % 2:
        return f"`jax.nn` takes even lengths only where it may be differentiated, got {problem.q_len} rows and {problem.kv_len} keys."
    declined = {
        "return_residual and sinks, since its lse is rounded and has no gradient": problem.wants_lse,
        "bias, since one of -inf would give NaN": problem.bias_shape is not None,
        "logits_soft_cap": problem.logits_soft_cap is not None,
        "dropout_rate": problem.dropout_rate > 0,
        "a scale that is an array": problem.scale is None,
        "a scale that is not positive, of which its gradient is NaN": problem.scale is not None and problem.scale <= 0,
        "deterministic_backward": problem.deterministic_backward,
        "block_sizes": problem.block_sizes is not None,
        "masks that depend on data or are no interval, since a row might see no key": not problem.mask.is_interval
        or problem.mask.rule is None,
    }
    for what, present in declined.items():
        if present:
            return f"cuDNN does not serve {what}."
    rule = problem.mask.rule
    assert rule is not None
    if rule.is_trivial:
        return None
    if rule.right != 0 or rule.offset != 0 or rule.prefix is not None or rule.chunk is not None:
        return "cuDNN serves masks that end at the row's own position, with q_offset=0, without prefix and chunks."
    if problem.q_len < problem.kv_len:
        return f"cuDNN serves no mask with more keys than rows, where NaN in a key that no row sees might leak, got {problem.q_len} rows."
    if rule.left is not None and problem.q_len > problem.kv_len:
        return f"cuDNN serves no window with more rows than keys, where a row might see no key, got {problem.q_len} and {problem.kv_len}."
    return None


def attend(problem: Problem, operands: Operands) -> Array:
    """out, differentiable by cuDNN's own backward."""
    rule = problem.mask.rule
    assert rule is not None
    window = None if rule.left is None else (rule.left, 0)
    return jax.nn.dot_product_attention(
        operands.query,
        operands.key,
        operands.value,
        scale=problem.scale,
        is_causal=not rule.is_trivial,
        local_window_size=window,
        implementation="cudnn",
    )


BACKEND = Backend("cudnn", why_not, by_one_rule(lambda problem, device: None), whole=attend)
