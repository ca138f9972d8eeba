"""Kernels with the same bits in rollout and policy update, and the search that finds them.

Names are resolved at first use: importing the package loads neither torch nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelbraid.models.certified import certified
    from kernelbraid.models.shared import decoder_of, packed_logprobs, refresh
    from kernelbraid.models.unify import restore, unify
    from kernelbraid.ops.add_rms_norm.api import add_rms_norm
    from kernelbraid.ops.attention.api import attention, check_metadata, paged_attention, write_kv_cache
    from kernelbraid.ops.embedding.api import embedding
    from kernelbraid.ops.linear.api import linear
    from kernelbraid.ops.logprob.api import head_logits, logprob, logprob_of_logits, next_token_logprobs
    from kernelbraid.ops.moe_experts.api import moe_experts
    from kernelbraid.ops.moe_router.api import moe_router
    from kernelbraid.ops.qk_norm.api import qk_norm
    from kernelbraid.ops.qk_norm_rope_cache.api import qk_norm_rope_cache
    from kernelbraid.ops.rms_norm.api import rms_norm
    from kernelbraid.ops.rope.api import Llama3Scaling, rope, rope_tables
    from kernelbraid.ops.sample.api import sample
    from kernelbraid.ops.swiglu.api import swiglu
    from kernelbraid.search.study import Study

__version__ = "0.1.0"

__all__ = [
    "Llama3Scaling",
    "Study",
    "__version__",
    "add_rms_norm",
    "attention",
    "certified",
    "check_metadata",
    "decoder_of",
    "embedding",
    "head_logits",
    "linear",
    "logprob",
    "logprob_of_logits",
    "moe_experts",
    "moe_router",
    "next_token_logprobs",
    "packed_logprobs",
    "paged_attention",
    "qk_norm",
    "qk_norm_rope_cache",
    "refresh",
    "restore",
    "rms_norm",
    "rope",
    "rope_tables",
    "sample",
    "swiglu",
    "unify",
    "write_kv_cache",
]

_HOMES = {
    "Llama3Scaling": "kernelbraid.ops.rope.api",
    "Study": "kernelbraid.search.study",
    "add_rms_norm": "kernelbraid.ops.add_rms_norm.api",
    "attention": "kernelbraid.ops.attention.api",
    "certified": "kernelbraid.models.certified",
    "check_metadata": "kernelbraid.ops.attention.api",
    "decoder_of": "kernelbraid.models.shared",
    "embedding": "kernelbraid.ops.embedding.api",
    "head_logits": "kernelbraid.ops.logprob.api",
    "linear": "kernelbraid.ops.linear.api",
    "logprob": "kernelbraid.ops.logprob.api",
    "logprob_of_logits": "kernelbraid.ops.logprob.api",
    "moe_experts": "kernelbraid.ops.moe_experts.api",
    "moe_router": "kernelbraid.ops.moe_router.api",
    "next_token_logprobs": "kernelbraid.ops.logprob.api",
    "packed_logprobs": "kernelbraid.models.shared",
    "paged_attention": "kernelbraid.ops.attention.api",
    "qk_norm": "kernelbraid.ops.qk_norm.api",
    "qk_norm_rope_cache": "kernelbraid.ops.qk_norm_rope_cache.api",
    "refresh": "kernelbraid.models.shared",
    "restore": "kernelbraid.models.unify",
    "rms_norm": "kernelbraid.ops.rms_norm.api",
    "rope": "kernelbraid.ops.rope.api",
    "rope_tables": "kernelbraid.ops.rope.api",
    "sample": "kernelbraid.ops.sample.api",
    "swiglu": "kernelbraid.ops.swiglu.api",
    "unify": "kernelbraid.models.unify",
    "write_kv_cache": "kernelbraid.ops.attention.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernelbraid' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
