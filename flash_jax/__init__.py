"""FlashAttention for JAX: exact attention in linear memory on any machine, forward and backward."""

from flash_jax.api import dropout_mask as dropout_mask
from flash_jax.api import explain as explain
from flash_jax.api import flash_attention as flash_attention
from flash_jax.mask import Mask as Mask
from flash_jax.mask import segment_ids as segment_ids

__all__ = ["Mask", "dropout_mask", "explain", "flash_attention", "segment_ids"]

__version__ = "0.1.0"
