"""Attention for models of other libraries; docs/integrations.md shows how to use it.

* ``hf``: Hugging Face transformers, ``attn_implementation="ring"``. Install the extra ``hf``.
* ``sdpa``: PyTorch's own ``F.scaled_dot_product_attention`` on DTensors, inside of ``ring_sdpa()``.
* ``torchtitan``: an inner attention for its decoders.
"""
