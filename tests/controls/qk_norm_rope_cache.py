"""Mistakes in the rollout's fused step."""

from tests.controls.rows import Control

AXES = {"query_heads": 2, "kv_heads": 1, "head_dim": 64, "norm": 1}

HOST = (
    "    share(prepare_tokens, operands, tokens, max(1, min(len(os.sched_getaffinity(0)), tokens, wanted)))\n"
)
OF_K = "            prepare(place, width, of_k, eps, known, c, s, k_slot + h * k_cache.strides[2], head)\n"
OF_Q = "            prepare(place, width, of_q, eps, known, c, s, target, head)\n"
PLACE = "        page, slot = np.int64(table[b, n // size]), n % size\n"
COST = "THREAD_COST = 32768\n"


def other_bits(condition: str) -> tuple[tuple[str, str], ...]:
    """Queries lose a last bit where a condition holds."""
    changed = (
        f"            if {condition}:\n                q_out[t, h, 0] = np.nextafter(q_out[t, h, 0], ZERO)\n"
    )
    return ((OF_Q, OF_Q + changed),)


CALLS = (COST, COST + "CALLS = [0]\n")
FILES = (
    COST,
    COST + "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2 == 1\n",
)

CONTROLS = (
    Control(
        "the first call rounds otherwise",
        "rerun/prefill",
        (
            CALLS,
            (
                HOST,
                "    CALLS[0] += 1\n"
                + HOST
                + "    if CALLS[0] == 1:\n        np.nextafter(k_cache, np.float32(0), out=k_cache)\n",
            ),
        ),
    ),
    Control("queries follow the process", "fresh_process/prefill", (FILES, *other_bits("TURN"))),
    Control("queries follow the token's place", "batch/prefill", other_bits("t % 2 == 1")),
    Control(
        "later requests have one slot a page",
        "batch/decode",
        ((OF_K, OF_K.replace("k_slot", "(k_slot if b < 3 else k_slot - slot * k_cache.strides[1])")),),
    ),
    Control(
        "rows behind the last request take part",
        "padding/prefill",
        ((OF_Q, OF_Q + "            q_out[t, h, 0] += ZERO * q[q.shape[0] - 1, h, 0]\n"),),
    ),
    Control(
        "large calls take another path and say so",
        "chunked_prefill/chunked_prefill",
        other_bits("q.shape[0] > 40"),
        tokens=(40,),
    ),
    Control(
        "values land one slot later where a part of a call begins",
        "chunked_prefill/chunked_prefill",
        (
            (
                "slot * v_cache.strides[1]",
                "(slot + (t == start and n > 0)) % size * v_cache.strides[1]",
            ),
        ),
    ),
    Control(
        "small pages but the first are filled from their second slot",
        "paging/decode",
        ((PLACE, PLACE.replace("n % size", "n % size if size > 4 or n < size else (n + 1) % size")),),
    ),
    Control("single tokens take another path", "decode_equals_prefill/decode", other_bits("q.shape[0] == 1")),
    Control("other bits under the same bits id", "implementations_agree/prefill", other_bits("True")),
    Control("keys are not normalized", "accuracy_k/prefill", ((OF_K, OF_K.replace("of_k", "0")),)),
    Control(
        "queries and keys take the angles of their row in the call",
        "accuracy_q/prefill",
        (("        at = p if known else 0\n", "        at = t\n"),),
    ),
)
