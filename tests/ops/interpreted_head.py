"""The Triton kernels of log-probabilities and sampling in Triton's interpreter: `python interpreted_head.py`.

A process of its own, as interpreted.py, whose repairs it needs. Prints a JSON object: names of what must
hold, and whether it does.
"""

import json

import interpreted  # noqa: F401  repairs the interpreter, before kernels are defined
import numpy as np
import torch

from kernelbraid.ops import get
from kernelbraid.ops.logprob import gpu
from kernelbraid.ops.logprob.reference import logprob as exact_logprob
from kernelbraid.ops.problem import ProblemShape
from kernelbraid.ops.sample import gpu as sampling
from kernelbraid.ops.sample.reference import reference as exact_tokens

TEMPERATURE = 0.8


def nothing(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def forward(x, weight, targets):
    found = [nothing(len(x)) for _ in range(3)]
    gpu.logprob(x, weight, targets, TEMPERATURE, *found)
    return found


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def backward(x, weight, targets, given, found, parts, wanted=(True, True)):
    dx = nothing(*x.shape, dtype=x.dtype) if wanted[0] else None
    dweight = nothing(*weight.shape) if wanted[1] else None
    for i, part in enumerate(parts):
        gpu.logprob_backward(
            *(x[part], weight, targets[part], TEMPERATURE, given[0][part], given[1][part]),
            *(found[2][part], found[1][part], None if dx is None else dx[part], dweight, int(i > 0)),
        )
    return [each for each in (dx, dweight) if each is not None]


def head(dtype, tokens, width, vocabulary):
    """What must hold of log-probabilities of one shape."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=generator) * 2.5 / width**0.5).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator, dtype=torch.int32)
    targets[2] = -100
    found = forward(x, weight, targets)
    leaves = [each.double().requires_grad_() for each in (x, weight)]
    exact = exact_logprob(*leaves, targets, TEMPERATURE)
    logits, read = nothing(tokens, vocabulary), [nothing(tokens) for _ in range(3)]
    gpu.logits(x, weight, logits)
    gpu.logprob_of_logits(logits, targets, TEMPERATURE, *read)
    alone = [forward(x[t : t + 1], weight, targets[t : t + 1]) for t in range(0, tokens, 7)]
    given = torch.randn(2, tokens, generator=generator)
    whole = [slice(0, tokens)]
    gradients = backward(x, weight, targets, given, found, whole)
    wanted = torch.autograd.grad(exact[:2], leaves, list(given.double()))
    split = [slice(0, 64), slice(64, tokens)] if tokens > 64 else whole
    held = {
        "values": all((a - b).abs().max() < 1e-5 for a, b in zip(found, exact, strict=True)),
        "ignored": found[0][2].item() == 0,
        "alone": same([each[::7] for each in found], [torch.cat(e) for e in zip(*alone, strict=True)]),
        "of logits": same(found, read),
        "gradients": all((a - b).norm() < 4e-3 * b.norm() for a, b in zip(gradients, wanted, strict=True)),
        "accumulated": same(gradients[1:], backward(x, weight, targets, given, found, split, (False, True))),
    }
    gpu.PIECE_MIB = 0  # pieces of 128 tokens
    held["pieces"] = same(gradients, backward(x, weight, targets, given, found, whole))
    gpu.PIECE_MIB = 512
    return held


def tokens(vocabulary, kind):
    """Whether tokens are those of the rules, and those of other steps."""
    shape = ProblemShape((("vocabulary", vocabulary),), (4,), (4,), kind)
    problem = get("sample", "cuda").draw(shape, np.random.default_rng(vocabulary))
    given = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in problem.requests[0].items()}
    found = []
    for tile in (256, 64):
        sampling.TILE = tile
        out = torch.full((4,), -7, dtype=torch.int32)
        sampling.sample(**given, tokens=out)
        found.append(out)
    wanted = exact_tokens(problem)["tokens", 0]
    return np.array_equal(found[0].numpy(), wanted) and torch.equal(*found)


def main():
    gpu.SPAN = 64
    held = {}
    for dtype, shape in ((torch.float16, (21, 72, 300)), (torch.bfloat16, (150, 40, 421))):
        found = head(dtype, *shape)
        held |= {f"{dtype} {shape} {name}": bool(value) for name, value in found.items()}
    for vocabulary, kind in ((2, "normal"), (150, "normal"), (150, "non_finite")):
        held[f"tokens {vocabulary} {kind}"] = tokens(vocabulary, kind)
    print(json.dumps(held))


if __name__ == "__main__":
    main()
