"""Attention for models of other libraries; docs/integrations.md shows how to use it.

* ``hf``: Hugging Face transformers, ``attn_implementation="ring"``. Install the extra ``hf``.
"""
