"""Kernels with the same bits in rollout and policy update, and the search that finds them.

Names are resolved at first use: importing the package loads neither torch nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelbraid.ops.add_rms_norm.api import add_rms_norm
    from kernelbraid.ops.attention.api import attention, check_metadata, paged_attention, write_kv_cache
    from kernelbraid.ops.qk_norm.api import qk_norm
    from kernelbraid.ops.qk_norm_rope_cache.api import qk_norm_rope_cache
    from kernelbraid.ops.rms_norm.api import rms_norm
    from kernelbraid.ops.rope.api import Llama3Scaling, rope, rope_tables
    from kernelbraid.search.study import Study

__version__ = "0.1.0"

__all__ = [
    "Llama3Scaling",
    "Study",
    "__version__",
    "add_rms_norm",
    "attention",
    "check_metadata",
    "paged_attention",
    "qk_norm",
    "qk_norm_rope_cache",
    "rms_norm",
    "rope",
    "rope_tables",
    "write_kv_cache",
]

_HOMES = {
    "Llama3Scaling": "kernelbraid.ops.rope.api",
    "Study": "kernelbraid.search.study",
    "add_rms_norm": "kernelbraid.ops.add_rms_norm.api",
    "attention": "kernelbraid.ops.attention.api",
    "check_metadata": "kernelbraid.ops.attention.api",
    "paged_attention": "kernelbraid.ops.attention.api",
    "qk_norm": "kernelbraid.ops.qk_norm.api",
    "qk_norm_rope_cache": "kernelbraid.ops.qk_norm_rope_cache.api",
    "rms_norm": "kernelbraid.ops.rms_norm.api",
    "rope": "kernelbraid.ops.rope.api",
    "rope_tables": "kernelbraid.ops.rope.api",
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
