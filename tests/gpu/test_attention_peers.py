"""What benchmarks run beside ours computes the same function, and a graph can capture it."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.test_attention_bits import tensor

from kernelbraid import ops
from kernelbraid.audit.beside import importable
from kernelbraid.contract import Workload
from kernelbraid.ops.attention import gpu, peers_gpu
from kernelbraid.ops.attention.reference import reference, vendor
from kernelbraid.ops.problem import ProblemShape, View

OPERATOR = ops.get("attention", "cuda")
HEADS, KV, D = 32, 8, 128
CLOSE = 6e-3


def workload(phase, lengths):
    axes = {"batch": len(lengths), "length": lengths, "page_size": 16}
    heads = {"query_heads": HEADS, "kv_heads": KV, "head_dim": D}
    return Workload(phase, tuple((axes | heads).items()))


WORKLOADS = [
    workload(phase, lengths)
    for phase in ("prefill", "update", "decode", "backward")
    for lengths in ((1024,) * 3, (300, 1000, 17))
]


def arguments(each: Workload) -> dict[str, Any]:
    """Arguments of a peer's call."""
    program = OPERATOR.timed(each, np.random.default_rng(3), 1, 1 << 20, contiguous=True)
    buffers = {name: tensor(array) for name, array in program.inputs.items()}
    return {
        name: buffers[value.buffer][value.start : value.stop] if isinstance(value, View) else value
        for name, value in program.calls[0].arguments.items()
    }


def ours(phase: str, given: dict[str, Any]) -> list[torch.Tensor]:
    """The same results by our kernels; decode by plain products."""
    if phase == "decode":
        return [by_products(given)]
    if phase == "backward":
        gradients = [torch.empty_like(given[name]) for name in "qkv"]
        gpu.attention_backward(**given, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
        return gradients
    out = torch.empty_like(given["q"])
    gpu.attention(**given, out=out, lse=None)
    return [out]


def by_products(given: dict[str, Any]) -> torch.Tensor:
    rows = []
    for q, k, v, length in zip(given["q"], given["k"], given["v"], given["seqlens_k"].tolist(), strict=False):
        grouped = q.float().view(KV, HEADS // KV, D)
        scores = grouped @ k[:, :length].float().transpose(1, 2) * given["softmax_scale"]
        rows.append((scores.softmax(-1) @ v[:, :length].float()).view(HEADS, D))
    return torch.stack(rows)


def packed(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[T, H, D], from [B, H, S, D] or [B, S, H, D]."""
    if result.dim() == 4 and result.shape[1] == like.shape[1]:
        result = result.transpose(1, 2)
    return result.reshape(like.shape)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def cases():
    for each in WORKLOADS:
        ragged = len(set(each.shape["length"])) > 1
        for peer in OPERATOR.peers:
            if each.phase in peer.phases and not (peer.uniform and ragged):
                yield pytest.param(
                    each, peer, id=f"{each.phase}-{'ragged' if ragged else 'equal'}-{peer.name}"
                )


@pytest.mark.parametrize(("each", "peer"), list(cases()))
def test_peers_compute_attention_and_are_captured(each, peer):
    if peer.module and not importable(peer.module):
        pytest.skip(f"{peer.module} is not installed")
    function, given = getattr(peers_gpu, peer.entry_point), arguments(each)
    found = function(**given)
    found = list(found)[:3] if isinstance(found, tuple | list) else [found]
    expected = ours(each.phase, given)
    for one, other in zip(found, expected, strict=each.phase == "backward"):
        assert distance(packed(one, other), other) < CLOSE
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(**given)
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", OPERATOR.contract.dtypes)
def test_the_vendor_computes_what_the_reference_does(dtype):
    axes = (("query_heads", 9), ("kv_heads", 3), ("head_dim", 64))
    bound = {"bfloat16": 6e-3, "float16": 8e-4}[dtype]
    for rows in ((60, 17, 250), (16, 5, 3)):
        shape = ProblemShape(axes, (60, 17, 250), rows, "normal", dtype)
        problem = OPERATOR.draw(shape, np.random.default_rng(2))
        exact, theirs = reference(problem), vendor(problem)
        assert set(theirs) == set(exact)
        for key, right in exact.items():
            assert theirs[key].shape == right.shape
            assert np.linalg.norm(theirs[key] - right) <= bound * np.linalg.norm(right)
