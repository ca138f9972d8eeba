"""Kernels with the same bits in rollout and policy update, and the search that finds them.

Names are resolved at first use: importing the package loads neither torch nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelbraid.ops.attention.api import attention, check_metadata, paged_attention, write_kv_cache
    from kernelbraid.ops.moe_experts.api import moe_experts
    from kernelbraid.ops.moe_router.api import moe_router
    from kernelbraid.ops.rms_norm.api import rms_norm
    from kernelbraid.search.study import Study

__version__ = "0.1.0"

__all__ = [
    "Study",
    "__version__",
    "attention",
    "check_metadata",
    "moe_experts",
    "moe_router",
    "paged_attention",
    "rms_norm",
    "write_kv_cache",
]

_HOMES = {
    "Study": "kernelbraid.search.study",
    "attention": "kernelbraid.ops.attention.api",
    "check_metadata": "kernelbraid.ops.attention.api",
    "moe_experts": "kernelbraid.ops.moe_experts.api",
    "moe_router": "kernelbraid.ops.moe_router.api",
    "paged_attention": "kernelbraid.ops.attention.api",
    "rms_norm": "kernelbraid.ops.rms_norm.api",
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
