"""Flax layers: `flash_jax.nn.linen` and `flash_jax.nn.nnx`, each with an `attention_fn` for Flax's own modules and a module of ours."""
