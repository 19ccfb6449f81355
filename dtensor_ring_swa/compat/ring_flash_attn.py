"""The batch functions of ring-flash-attention: contiguous, zigzag and striped shards.

Its varlen and llama3 functions are not here: packed documents are not supported yet.
"""

from dtensor_ring_swa.compat.family import make_family
from dtensor_ring_swa.compat.striped_attention import (
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
)

__all__ = [
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
]

ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = make_family(
    __name__,
    "ring_flash_attn",
    "Attention over contiguous shards, of ``torch.chunk``'s sizes.",
    "window_size counts tokens of the sequence (there it was applied to each pair of shards as if\n"
    "    they began at the same position). Shards may be uneven. Nothing is re-dealt; ``ring_attention`` with\n"
    '    ``load_balance="auto"`` balances causal calls on the same shards.',
    layout="contiguous",
    load_balance="none",
)

zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = make_family(
    __name__,
    "zigzag_ring_flash_attn",
    "Attention over zigzag shards: of ``2 * ranks`` slices, rank r holds r and ``2 * ranks - 1 - r``.",
    "causal=False works (there it asserts). window_size counts tokens of the sequence (there it\n"
    "    was applied to each pair of shards as if they began at the same position). The length must be a\n"
    "    multiple of ``2 * ranks``.",
    layout="zigzag",
)
