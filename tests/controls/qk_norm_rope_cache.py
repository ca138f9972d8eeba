"""Mistakes in the rollout's fused step."""

from tests.controls.rows import Control

AXES = {"query_heads": 3, "kv_heads": 1, "head_dim": 64, "norm": 1}

HOST = (
    "    share(prepare_tokens, operands, tokens, max(1, min(len(os.sched_getaffinity(0)), tokens, wanted)))\n"
)
OF_K = "            prepare(k[t, h], k_weight, eps, p, cos, sin, k_cache[page, slot, h], head, lanes)\n"
OF_Q = "            prepare(q[t, h], q_weight, eps, p, cos, sin, q_out[t, h], head, lanes)\n"
COST = "THREAD_COST = 32768\n"


def other_order(condition: str) -> tuple[tuple[str, str], ...]:
    """Queries lose their last bit where a condition holds."""
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
    Control("queries follow the process", "fresh_process/prefill", (FILES, *other_order("TURN"))),
    Control("queries follow the token's place", "batch/prefill", other_order("t % 2 == 1")),
    Control(
        "later requests have one slot a page",
        "batch/decode",
        ((OF_K, OF_K.replace("slot, h]", "slot if b < 3 else 0, h]")),),
    ),
    Control(
        "rows behind the last request take part",
        "padding/prefill",
        ((OF_Q, OF_Q + "            q_out[t, h, 0] += ZERO * q[q.shape[0] - 1, h, 0]\n"),),
    ),
    Control(
        "large calls take another path and say so",
        "chunked_prefill/chunked_prefill",
        other_order("q.shape[0] > 40"),
        tokens=(40,),
    ),
    Control(
        "values land one slot later where a chunk begins",
        "chunked_prefill/chunked_prefill",
        (
            (
                "            row = v_cache[page, slot, h]\n",
                "            row = v_cache[page, (slot + (t == start and t > 0)) % size, h]\n",
            ),
        ),
    ),
    Control(
        "small pages are filled from their end",
        "paging/decode",
        (
            (
                "page, slot = table[b, place // size], place % size",
                "page, slot = table[b, place // size], place % size if size > 4 else size - 1 - place % size",
            ),
        ),
    ),
    Control(
        "single tokens take another path", "decode_equals_prefill/decode", other_order("q.shape[0] == 1")
    ),
    Control("another order under the same bits id", "implementations_agree/prefill", other_order("True")),
    Control(
        "keys are not normalized",
        "accuracy_k/prefill",
        ((OF_K, OF_K.replace("k_weight", "k_weight[:0]")),),
    ),
    Control(
        "queries take the angles of their place in the cache",
        "accuracy_q/prefill",
        ((OF_Q, OF_Q.replace("eps, p,", "eps, t - start,")),),
    ),
)
