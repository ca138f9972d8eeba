"""Kernels with the same bits in rollout and policy update, and the search that finds them.

Names are resolved at first use: importing the package loads neither torch nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelbraid.ops.attention.api import attention, check_metadata, paged_attention, write_kv_cache
    from kernelbraid.ops.logprob.api import head_logits, logprob, logprob_of_logits, next_token_logprobs
    from kernelbraid.ops.rms_norm.api import rms_norm
    from kernelbraid.ops.sample.api import sample
    from kernelbraid.search.study import Study

__version__ = "0.1.0"

__all__ = [
    "Study",
    "__version__",
    "attention",
    "check_metadata",
    "head_logits",
    "logprob",
    "logprob_of_logits",
    "next_token_logprobs",
    "paged_attention",
    "rms_norm",
    "sample",
    "write_kv_cache",
]

_HOMES = {
    "Study": "kernelbraid.search.study",
    "attention": "kernelbraid.ops.attention.api",
    "check_metadata": "kernelbraid.ops.attention.api",
    "head_logits": "kernelbraid.ops.logprob.api",
    "logprob": "kernelbraid.ops.logprob.api",
    "logprob_of_logits": "kernelbraid.ops.logprob.api",
    "next_token_logprobs": "kernelbraid.ops.logprob.api",
    "paged_attention": "kernelbraid.ops.attention.api",
    "rms_norm": "kernelbraid.ops.rms_norm.api",
    "sample": "kernelbraid.ops.sample.api",
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
