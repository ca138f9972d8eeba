"""The rate of fused multiply-adds that this machine's cores reach: independent chains in vector registers."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

CHAINS = 12
"""Independent sums: more than a core has in flight, fewer than it has registers."""
ROUNDS = 2_000_000
"""Multiply-adds of each chain in a try: milliseconds, so that starting threads costs nothing beside it."""


@cache
def _burst() -> tuple[Any, int]:
    """A compiled function that makes a number of rounds, and the operations of one round."""
    from llvmlite import binding, ir
    from numba import njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    lanes = 16 if binding.get_host_cpu_features().get("avx512f", False) else 8
    vector = ir.VectorType(ir.FloatType(), lanes)

    @intrinsic
    def burst(_: Any, rounds: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(vector, [vector] * 3)
            fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{lanes}f32")
            start = builder.sitofp(arguments[0], ir.FloatType())
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), start, ir.IntType(32)(0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
            factor = builder.shuffle_vector(one, one, zeros)
            sums = [cgutils.alloca_once_value(builder, factor) for _ in range(CHAINS)]
            with cgutils.for_range(builder, arguments[0]):
                for place in sums:
                    builder.store(builder.call(fma, [builder.load(place), factor, factor]), place)
            total = builder.load(sums[0])
            for place in sums[1:]:
                total = builder.fadd(total, builder.load(place))
            return builder.extract_element(total, ir.IntType(32)(0))

        return types.float32(types.int64), generate

    @njit(nogil=True)
    def run(rounds: int) -> float:
        return burst(rounds)  # type: ignore[call-arg]

    run(1)
    return run, 2 * lanes * CHAINS


def fma_rate(seconds: float) -> float:
    """Operations a second of all cores in float32, a multiply-add being two: the best try in that time."""
    run, operations = _burst()
    cores = len(os.sched_getaffinity(0))
    best = 0.0
    end = time.perf_counter() + seconds
    with ThreadPoolExecutor(cores) as threads:
        while not best or time.perf_counter() < end:
            start = time.perf_counter()
            list(threads.map(run, [ROUNDS] * cores))
            best = max(best, operations * ROUNDS * cores / (time.perf_counter() - start))
    return best
