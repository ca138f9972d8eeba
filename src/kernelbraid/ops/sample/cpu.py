"""Next tokens drawn from logits on the CPU: greedy, temperature, min-p, top-k, top-p.

    s[v] = l[v] * c + 0                           c = 1 / temperature; not positive or infinite: greedy
    q[v] = floor(2^40 * exp(s[v] - max s))                an integer
    token = first v in the vocabulary's order with q[0] + ... + q[v] > floor(r * sum q / 2^64)

r is the first 64 bits of Philox 4x32-10, whose key is the seed and whose counter is the position and the
number of the sample. What is cut off has q = 0: see README.md. All sums are sums of integers, which have no
order. A task is a row; threads take tasks from one counter.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int32, int64, njit, types, uint32, uint64
from numba.extending import intrinsic

THREAD_COST = 32768

KNOBS = {"THREAD_COST": ("schedule", (8192, 32768, 131072, 524288))}

EXP2 = "1p0 1.62e432p-1 1.ebfbe2p-3 1.c6ae72p-5 1.3b270ep-7 1.5f7276p-10 1.470b48p-13"
C0, C1, C2, C3, C4, C5, C6 = (np.float32(float.fromhex(c)) for c in EXP2.split())
LOG2E = np.float32(float.fromhex("1.715476p0"))
MAGIC, LOWEST = np.float32(12582912), np.float32(-125)
ZERO, ONE, INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)
UNIT = np.float32(2.0**40)
REMOVED = np.int32(-(2**31))  # below the key of every number
DENORMAL_PROBE = np.array([2.0**-100, 2.0**-40, 2.0**100], np.float32)  # their product passes a denormal

inner = njit(error_model="numpy")
entry = njit(error_model="numpy", nogil=True, cache=True)


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c rounded once."""
    return float32(float32, float32, float32), lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def bits_of(typing_context, x):
    """The bits of a float32 as int32."""
    return int32(float32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def float_of(typing_context, x):
    """The float32 of these bits."""
    return float32(int32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def fetch_add(typing_context, address):
    """Return the int64 at an address and add one to it, as one step."""
    return int64(int64), lambda context, builder, signature, args: builder.atomic_rmw(
        "add", builder.inttoptr(args[0], ir.IntType(64).as_pointer()), ir.IntType(64)(1), "seq_cst"
    )


# ---- Arithmetic.


@inner
def exp2(x):
    """2^x for x <= 0."""
    t = x + MAGIC
    f = x - (t - MAGIC)
    p = fma(fma(fma(fma(fma(fma(C6, f, C5), f, C4), f, C3), f, C2), f, C1), f, C0)
    power = float_of(np.int32(np.int32(bits_of(t) << 23) + np.int32(0x3F800000)))
    return ZERO if x < LOWEST else p * power


@inner
def key_of(x):
    """An integer that orders numbers as they are ordered."""
    bits = bits_of(x)
    return np.int32(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF)))


@inner
def philox(seed, position, sample):
    """The first 64 bits of Philox 4x32-10: key seed, counter (position, sample)."""
    low, shift = uint64(0xFFFFFFFF), uint64(32)
    k0, k1 = uint64(seed) & low, uint64(seed) >> shift
    c0, c1 = uint64(position) & low, uint64(position) >> shift
    c2, c3 = uint64(sample) & low, uint64(sample) >> shift
    for _ in range(10):
        p0, p1 = c0 * uint64(0xD2511F53), c2 * uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + uint64(0x9E3779B9)) & low, (k1 + uint64(0xBB67AE85)) & low
    return c0 | (c1 << shift)


@inner
def high_product(a, b):
    """The upper 64 bits of a * b."""
    low, shift = uint64(0xFFFFFFFF), uint64(32)
    a0, a1, b0, b1 = a & low, a >> shift, b & low, b >> shift
    middle = a1 * b0 + ((a0 * b0) >> shift)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> shift) + (other >> shift)


# ---- A row.


@inner
def greedy(logits):
    """The first of the largest logits; NaN is never chosen, and 0 where nothing is above -inf."""
    best, token = -INFINITY, 0
    for v in range(logits.size):
        if logits[v] > best:
            best, token = logits[v], v
    return token


@inner
def weigh(logits, scale, smallest, keys, weights):
    """Write keys and integer weights of what min-p keeps; return the sum of the weights."""
    top = -INFINITY
    for v in range(logits.size):
        s = logits[v] * scale + ZERO
        top = s if s > top else top
    total = 0
    if top == -INFINITY:
        return total
    for v in range(logits.size):
        s = logits[v] * scale + ZERO
        s = s if s == s else -INFINITY
        w = exp2((ZERO if s == top else s - top) * LOG2E)
        kept = w >= smallest
        keys[v] = key_of(s) if kept else REMOVED
        weights[v] = np.int64(w * UNIT) if kept else 0
        total += weights[v]
    return total


@inner
def kth_key(keys, k):
    """The k-th largest key, by bits from the highest down."""
    found = uint32(0)
    for bit in range(31, -1, -1):
        tried = found | uint32(1 << bit)
        signed, count = np.int32(tried ^ uint32(0x80000000)), 0
        for v in range(keys.size):
            count += keys[v] >= signed
        found = tried if count >= k else found
    return np.int32(found ^ uint32(0x80000000))


@inner
def crossing_key(keys, weights, mass):
    """The largest key down to which weights add up to `mass`."""
    found = uint32(0)
    for bit in range(31, -1, -1):
        tried = found | uint32(1 << bit)
        signed, total = np.int32(tried ^ uint32(0x80000000)), 0
        for v in range(keys.size):
            total += weights[v] if keys[v] >= signed else 0
        found = tried if total >= mass else found
    return np.int32(found ^ uint32(0x80000000))


@inner
def keep(keys, weights, key, ties):
    """Remove what lies below a key, and of those that have it all but the first `ties`; return the sum."""
    total = 0
    for v in range(keys.size):
        if keys[v] == key:
            ties -= 1
        if keys[v] < key or (keys[v] == key and ties < 0):
            keys[v], weights[v] = REMOVED, 0
        total += weights[v]
    return total


@inner
def choose(logits, scale, top_k, top_p, min_p, seed, sample, position, keys, weights):
    """The token of a row."""
    if not ZERO < scale < INFINITY:
        return greedy(logits)
    smallest = min(min_p, ONE) if min_p > ZERO else ZERO
    total = weigh(logits, scale, smallest, keys, weights)
    if total == 0:
        return 0
    if 0 < top_k < logits.size:
        key, above = kth_key(keys, top_k), 0
        for v in range(keys.size):
            above += keys[v] > key
        total = keep(keys, weights, key, top_k - above)
    if top_p < ONE:
        mass = max(1, np.int64(np.float64(max(top_p, ZERO)) * np.float64(total)))
        key, above, own = crossing_key(keys, weights, mass), 0, 1
        for v in range(keys.size):
            above += weights[v] if keys[v] > key else 0
            own = weights[v] if keys[v] == key else own
        total = keep(keys, weights, key, (mass - above + own - 1) // own)
    wanted = np.int64(high_product(philox(seed, position, sample), uint64(total)))
    for v in range(weights.size):
        wanted -= weights[v]
        if wanted < 0:
            return v
    return 0


@entry
def sample_rows(
    logits, scales, top_k, top_p, min_p, seeds, samples, positions, tokens, counters, scratch, probe
):
    """Tokens of rows until none is left; False if this thread drops denormal numbers."""
    if probe[0] * probe[1] * probe[2] != probe[1]:
        return False
    address = np.int64(counters.ctypes.data)
    own = fetch_add(address + 8)
    keys, weights = np.empty(logits.shape[1], np.int32), scratch[own]
    while True:
        t = fetch_add(address)
        if t >= tokens.size:
            return True
        given = (scales[t], top_k[t], top_p[t], min_p[t], seeds[t], samples[t], positions[t])
        tokens[t] = choose(logits[t], *given, keys, weights)
        fetch_add(address + 16)


# ---- Host.
LOGITS = types.Array(float32, 2, "A", readonly=True)
NUMBERS = types.Array(float32, 1, "A", readonly=True)
INTEGERS, LONG = types.Array(int32, 1, "A", readonly=True), types.Array(int64, 1, "A", readonly=True)
UNCOMPILED = {
    sample_rows: boolean(
        LOGITS, NUMBERS, INTEGERS, NUMBERS, NUMBERS, LONG, INTEGERS, INTEGERS,
        types.Array(int32, 1, "A"), int64[::1], int64[:, ::1], float32[::1],
    ),
}  # fmt: skip
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def compiled(kernel):
    """Compile a kernel at its first use, for arrays of any strides."""
    with _lock:
        if kernel in UNCOMPILED:
            kernel.compile(UNCOMPILED.pop(kernel))
            kernel.disable_compile()
    return kernel


def sample(logits, inverse_temperature, top_k, top_p, min_p, seeds, samples, positions, tokens):
    """Write a token a row of logits [T, V]; everything else is [T]."""
    rows, vocabulary = logits.shape
    plan = schedule({"tokens": rows, "vocabulary": vocabulary}, {"THREAD_COST": THREAD_COST})
    threads = max(1, min(len(os.sched_getaffinity(0)), plan["parts"]))
    counters = np.zeros(3, np.int64)  # rows taken, scratches taken, rows done
    given = (logits, inverse_temperature, top_k, top_p, min_p, seeds, samples, positions, tokens)
    operands = (*given, counters, np.empty((threads, vocabulary), np.int64), DENORMAL_PROBE)
    with _lock:
        if threads > 1 and os.getpid() not in _pools:  # a forked child makes its own pool
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    kernel = compiled(sample_rows)
    helping = [_pools[os.getpid()].submit(kernel, *operands) for _ in range(1, threads)]
    # A helper that comes too late finds nothing to do and need not be waited for.
    if not kernel(*operands) or (counters[2] < rows and not all([each.result() for each in helping])):
        raise RuntimeError("a thread flushes denormal numbers, which changes bits: turn that mode off")


def numerics(constant_axes):
    return {}


def schedule(axes, knobs):
    """Choose among how many threads the rows of a call are divided at most."""
    parts = axes["tokens"] * axes["vocabulary"] // knobs["THREAD_COST"]
    return {"parts": min(16, axes["tokens"], max(1, parts))}
