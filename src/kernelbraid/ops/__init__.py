"""Operators: mathematical functions with a numerical contract, one folder each."""

from importlib.resources import files

from kernelbraid.contract import Source
from kernelbraid.ops.add_rms_norm.spec import ADD_RMS_NORM, ADD_RMS_NORM_CUDA
from kernelbraid.ops.attention.spec import ATTENTION, ATTENTION_CUDA
from kernelbraid.ops.embedding.spec import EMBEDDING, EMBEDDING_CUDA
from kernelbraid.ops.linear.spec import LINEAR, LINEAR_CUDA
from kernelbraid.ops.logprob.spec import LOGPROB, LOGPROB_CUDA
from kernelbraid.ops.moe_experts.spec import MOE_EXPERTS, MOE_EXPERTS_CUDA
from kernelbraid.ops.moe_router.spec import MOE_ROUTER, MOE_ROUTER_CUDA
from kernelbraid.ops.problem import Operator
from kernelbraid.ops.qk_norm.spec import QK_NORM, QK_NORM_CUDA
from kernelbraid.ops.qk_norm_rope_cache.spec import QK_NORM_ROPE_CACHE, QK_NORM_ROPE_CACHE_CUDA
from kernelbraid.ops.rms_norm.spec import RMS_NORM, RMS_NORM_CUDA
from kernelbraid.ops.rope.spec import ROPE, ROPE_CUDA
from kernelbraid.ops.sample.spec import SAMPLE, SAMPLE_CUDA
from kernelbraid.ops.swiglu.spec import SWIGLU, SWIGLU_CUDA

OPERATORS: tuple[Operator, ...] = (
    *(ATTENTION, ATTENTION_CUDA),
    *(LINEAR, LINEAR_CUDA),
    *(RMS_NORM, RMS_NORM_CUDA),
    *(ADD_RMS_NORM, ADD_RMS_NORM_CUDA),
    *(QK_NORM, QK_NORM_CUDA),
    *(ROPE, ROPE_CUDA),
    *(QK_NORM_ROPE_CACHE, QK_NORM_ROPE_CACHE_CUDA),
    *(SWIGLU, SWIGLU_CUDA),
    *(EMBEDDING, EMBEDDING_CUDA),
    *(MOE_ROUTER, MOE_ROUTER_CUDA),
    *(MOE_EXPERTS, MOE_EXPERTS_CUDA),
    *(LOGPROB, LOGPROB_CUDA),
    *(SAMPLE, SAMPLE_CUDA),
)
"""One entry an operator and backend."""


def get(name: str, backend: str = "cpu") -> Operator:
    """Return the operator called `name` on a backend, `cpu` or `cuda`.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    backends = [operator.backend for operator in OPERATORS if operator.name == name]
    if not backends:
        known = ", ".join(dict.fromkeys(operator.name for operator in OPERATORS))
        raise ValueError(f"unknown operator {name!r}; operators are {known}")
    for operator in OPERATORS:
        if (operator.name, operator.backend) == (name, backend):
            return operator
    raise ValueError(f"{name} has no backend {backend!r}; it has {', '.join(backends)}")


def source(operator: Operator, file: str | None = None) -> Source:
    """Return a shipped source of `operator`: by default its first implementation.

    Args:
        operator: the operator.
        file: name of another source in the operator's folder, such as its peers.

    Raises:
        ValueError: no such file.
    """
    known = (*operator.files, operator.peer_file)
    name = operator.files[0] if file is None else file
    if name not in known:
        raise ValueError(
            f"{operator.name} ships no {name!r} for {operator.backend}; it ships {', '.join(known)}"
        )
    text = (files("kernelbraid.ops") / operator.name / name).read_text(encoding="utf-8")
    return Source(text, label=f"{operator.name}/{name}")
