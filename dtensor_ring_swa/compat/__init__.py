"""Call signatures of other systems, over ``ring_attention``: change one import, keep the calls.

* ``ring_flash_attn``: the package ring-flash-attention; contiguous, zigzag and striped shards, packed documents.
* ``striped_attention``: its ``stripe_flash_attn_*`` family alone.
* ``nanotron``: the attention function ``"ring"`` of the training framework nanotron.
* ``ring_swa``: the package ring_swa (ring-sliding-window-attention).

They convert arguments and refuse what ``ring_attention`` cannot do, and nothing else. They take plain
shards; with DTensors call ``ring_attention``. docs/migrating.md says what differs from the originals.
"""
