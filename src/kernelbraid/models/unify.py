"""A transformers model on unified operators, in place: the same parameters, the bits of the Decoder.

    found = unify(model)        # forward of every module, state dict as before
    found.complete              # whether nothing is left that computes in another way; found.left names it
    restore(model)

Families and versions: Llama, Qwen2, Qwen3 and Qwen3-MoE of transformers 5 (`coverage.TESTED_TRANSFORMERS`).
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from kernelbraid.models import coverage, forwards
from kernelbraid.models.certified import uncertified
from kernelbraid.models.config import ModelConfig, from_hugging_face
from kernelbraid.models.joined import lay_adjacent, lay_apart
from kernelbraid.models.layer import RopeTables
from kernelbraid.ops.rope.tables import rope_tables
from kernelbraid.ops.rows import MOST_POSITIONS


@dataclass(frozen=True, slots=True)
class Unification:
    """What of a model computes by unified operators, and what does not."""

    unified: tuple[str, ...]
    """Names of the modules whose forward is a unified one."""
    left: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Modules that compute in another way: name and reason. While there is one, nothing is claimed."""
    operators: tuple[str, ...] = ()
    """The operators that the model and its Decoder call."""

    @property
    def complete(self) -> bool:
        """Whether every module is unified, so that rollout and update have the same bits."""
        return bool(self.unified) and not self.left

    def require(self) -> None:
        """Raise ValueError, naming what is left, unless the model is unified as a whole."""
        if not self.unified:
            raise ValueError("the model is not unified: call unify(model) first")
        if self.left:
            named = [f"{name or 'the model'} ({reason})" for name, reason in self.left.items()]
            more = [f"{len(named) - 4} more"] if len(named) > 4 else []
            raise ValueError(f"not unified, so that bits may differ: {', '.join([*named[:4], *more])}")


def unify(model: Any, *, require_certificate: bool = False, positions: int | None = None) -> Unification:
    """Put a transformers model on unified operators, in place.

    Forward functions are replaced module by module: norms, rotary embedding, attention, feed-forward or
    router and experts, linear layers, embedding, head. Parameters stay the same objects with the same names
    and values; q, k and v, and gate and up, are laid one after the other in memory, so that each group is one
    matrix (called again, also those that were moved or replaced since). Hooks, gradient checkpointing,
    `generate`, saving and loading work as before. Logits are float32.

    Args:
        model: a causal language model: Llama, Qwen2, Qwen3 or Qwen3-MoE of transformers 5; float32 on the
            CPU, bfloat16 or float16 on a GPU, on one device.
        require_certificate: refuse unless this machine holds certificates of all operators in use. Without,
            missing ones are warned of.
        positions: tokens that a request may have; the model's own limit by default, at most 131072.

    Returns:
        What is unified and what is left. Modules that transformers does not have at that place, or whose
        forward somebody replaced, are left as they are and listed; then `complete` is False.

    Raises:
        ValueError: the model has what the contracts do not cover; the message names it and says what to do.
            Nothing is changed then.
        RuntimeError: a certificate is required and missing.

    Bits: those of `models.model.Decoder` with the same weights, in every regime, padded, packed or alone.
    """
    family = coverage.family_of(model)
    _check_version()
    sizes = coverage.refuse(model)
    limit = min(sizes.max_positions, MOST_POSITIONS) if positions is None else positions
    cos, sin = rope_tables(sizes.head_dim, limit, sizes.rope_theta, sizes.rope_scaling)
    device = next(model.parameters()).device
    _check_certificates(operators_of(sizes), device.type, require=require_certificate)
    known = coverage.places(family, sizes)
    left = coverage.left_of(model, known, sizes)
    present = dict(model.named_modules(remove_duplicate=False))
    for name in left.keys() & present.keys():
        _bring_back(present[name])  # what was unified before another part of it was replaced
    for name, place in known.items():
        if place.forward is not None and name not in left:
            module = present[name]
            if place.forward is forwards.rotary:
                module.__dict__[forwards.TABLES] = RopeTables(cos.to(device), sin.to(device))
            if not forwards.is_ours(module):
                module.forward = partial(place.forward, module)
    for _, parts in _joint(model, left):
        lay_adjacent(parts)
    return report(model)


def restore(model: Any) -> None:
    """Bring back transformers' own forward functions, and each parameter into memory of its own.

    A Decoder that shared that memory (`decoder_of`) keeps it, and no longer follows the model.

    Raises:
        ValueError: the model is not unified.
    """
    ours = [module for module in model.modules() if forwards.is_ours(module)]
    if not ours:
        raise ValueError("the model is not unified")
    for module in ours:
        _bring_back(module)
    for _, parts in _joint(model, {}):
        lay_apart(parts)


def _bring_back(module: Any) -> None:
    """Give a module its class's forward again, if it has a unified one."""
    if forwards.is_ours(module):
        del module.forward
        module.__dict__.pop(forwards.TABLES, None)


def report(model: Any) -> Unification:
    """Look again at what of a model is unified, as it is now.

    Raises:
        ValueError: it is of a family that is not covered.
    """
    family = coverage.family_of(model)
    sizes = from_hugging_face(model.config)
    known = coverage.places(family, sizes)
    left = coverage.left_of(model, known, sizes)
    present = dict(model.named_modules(remove_duplicate=False))
    unified = []
    for name, place in known.items():
        if place.forward is not None and name in present:
            if _computes(present[name], place):
                unified.append(name)
            else:
                left.setdefault(name, "its forward is transformers' own: call unify(model)")
    return Unification(tuple(unified), MappingProxyType(left), operators_of(sizes))


def _computes(module: Any, place: coverage.Place) -> bool:
    """Whether a module's forward is the unified one of its place."""
    return forwards.is_ours(module) and module.__dict__["forward"].func is place.forward


def operators_of(sizes: ModelConfig) -> tuple[str, ...]:
    """The operators that a model of these sizes calls, in rollout and update."""
    dense = ("swiglu",) if sizes.experts is None else ("moe_router", "moe_experts")
    heads = ("qk_norm",) if sizes.qk_norm else ()
    always = ("embedding", "rms_norm", "add_rms_norm", "linear", "rope", "qk_norm_rope_cache", "attention")
    return (*always, *heads, *dense, "logprob")


def _joint(model: Any, left: Mapping[str, str]) -> Any:
    """Groups of parameters of those modules that are not left."""
    try:
        groups = list(coverage.joint(model))
    except AttributeError:  # a layer of another make, which is left and listed
        return []
    skipped = {name.removeprefix("model.") for name in left}
    parts = {"qkv": "self_attn", "qkv_bias": "self_attn", "gate_up": "mlp"}
    kept = []
    for name, group in groups:
        layer, _, part = name.rpartition(".")
        if not any(each.startswith(f"{layer}.{parts[part]}") for each in skipped):
            kept.append((name, group))
    return kept


def _check_version() -> None:
    import transformers

    version = transformers.__version__
    if version.split(".")[0] != "5":
        raise ValueError(f"transformers {version} is not covered: install transformers 5")
    if version not in coverage.TESTED_TRANSFORMERS:
        tested = ", ".join(coverage.TESTED_TRANSFORMERS)
        warnings.warn(f"unify was tested with transformers {tested}, not with {version}", stacklevel=3)


def _check_certificates(operators: tuple[str, ...], backend: str, *, require: bool) -> None:
    missing = uncertified(operators, backend)
    if not missing:
        return
    device = "" if backend == "cpu" else f" --device {backend}"
    message = (
        f"this machine has no certificate of {', '.join(missing)}: run `kernelbraid verify --local{device}`, "
        "which proves their bits here"
    )
    if require:
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=3)
