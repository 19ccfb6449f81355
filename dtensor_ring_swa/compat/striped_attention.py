"""``stripe_flash_attn_*`` of ring-flash-attention: striped shards, token i on rank ``i % ranks``."""

from functools import partial

from dtensor_ring_swa.compat.common import attend
from dtensor_ring_swa.compat.family import make_family

__all__ = ["stripe_flash_attn_func", "stripe_flash_attn_kvpacked_func", "stripe_flash_attn_qkvpacked_func"]

stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = make_family(
    __name__,
    "stripe_flash_attn",
    "Attention over striped shards: token i lies on rank ``i % ranks``.",
    "causal=False works (there it asserts). window_size counts tokens of the sequence (there it\n"
    "    counted rows of a shard, ranks tokens apart). The length must be a multiple of the ranks.",
    partial(attend, layout="striped"),
)
