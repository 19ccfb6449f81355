"""The functions of ring-flash-attention: batches on contiguous, zigzag and striped shards, and packed documents."""

from functools import partial

from dtensor_ring_swa.compat.common import attend
from dtensor_ring_swa.compat.family import make_family
from dtensor_ring_swa.compat.llama3 import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from dtensor_ring_swa.compat.shares import BETWEEN, attend_shares
from dtensor_ring_swa.compat.striped_attention import (
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
)

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = make_family(
    __name__,
    "ring_flash_attn",
    "Attention over contiguous shards, of ``torch.chunk``'s sizes.",
    "window_size counts tokens of the sequence (there it was applied to each pair of shards as if\n"
    "    they began at the same position). Shards may be uneven. Nothing is re-dealt; ``ring_attention`` with\n"
    '    ``load_balance="auto"`` balances causal calls on the same shards.',
    partial(attend, layout="contiguous", load_balance="none"),
)

zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = make_family(
    __name__,
    "zigzag_ring_flash_attn",
    "Attention over zigzag shards: of ``2 * ranks`` slices, rank r holds r and ``2 * ranks - 1 - r``.",
    "causal=False works (there it asserts). window_size counts tokens of the sequence (there it\n"
    "    was applied to each pair of shards as if they began at the same position). The length must be a\n"
    "    multiple of ``2 * ranks``.",
    partial(attend, layout="zigzag"),
)

_SHARES = (
    "window_size counts tokens of the document (there it was applied to each pair of shares as if\n"
    "    they began at the same position). There is a call for each length that documents have; ``ring_attention``\n"
    "    with ``cu_seqlens`` needs one, where documents are packed into a sequence and then sharded. {more}"
)

ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = make_family(
    __name__,
    "ring_flash_attn_varlen",
    "Attention within documents of which rank r holds slice r of ``ranks`` equal slices, one after another.",
    _SHARES.format(more="Gradients\n    have the inputs' dtype (there dq was bfloat16)."),
    partial(attend_shares, layout="contiguous"),
    BETWEEN,
)

(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = make_family(
    __name__,
    "zigzag_ring_flash_attn_varlen",
    "Attention within documents of which rank r holds slices r and ``2 * ranks - 1 - r`` of ``2 * ranks`` equal ones.",
    _SHARES.format(more="causal=False\n    works (there it asserts)."),
    partial(attend_shares, layout="zigzag"),
    BETWEEN,
)
