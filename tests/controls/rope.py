"""Mistakes in the rotary embedding."""

from tests.controls.rows import Control

AXES = {"query_heads": 3, "kv_heads": 1, "head_dim": 24}

HEAD = "                rotate(a, c, s, sign, y)\n"
HOST = (
    "    share(rotate_tokens, (q, k, positions, cos, sin, np.float32(1), q_out, k_out), len(q), "
    "threads_of(q, k))\n"
)
FIRST = "        out[i] = canonical(fma(-b, s, a * cos[i]))\n"
SECOND = "        out[half + i] = canonical(fma(a, s, b * cos[i]))\n"
BACK = "    share(rotate_tokens, operands, len(dq_out), threads_of(dq_out, dk_out))\n"
COST = "THREAD_COST = 32768\n"


def other_order(condition: str) -> tuple[tuple[str, str], ...]:
    """The other product is rounded where a condition holds."""
    return (
        ("def rotate(x, cos, sin, sign, out):", "def rotate(x, cos, sin, sign, out, other=False):"),
        (
            FIRST,
            FIRST.replace(
                "fma(-b, s, a * cos[i])", "fma(a, cos[i], -b * s) if other else fma(-b, s, a * cos[i])"
            ),
        ),
        (HEAD, HEAD.replace("y)", f"y, {condition})")),
    )


CALLS = (COST, COST + "CALLS = [0]\n")
FILES = (COST, COST + "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2 == 1\n")

CONTROLS = (
    Control(
        "the first call rounds otherwise",
        "rerun/update",
        (
            CALLS,
            (
                HOST,
                "    CALLS[0] += 1\n"
                + HOST
                + "    if CALLS[0] == 1:\n        np.nextafter(k_out, np.float32(0), out=k_out)\n",
            ),
        ),
    ),
    Control("the order of steps follows the process", "fresh_process/update", (FILES, *other_order("TURN"))),
    Control("the order of steps follows the token's place", "batch/prefill", other_order("t % 2 == 1")),
    Control(
        "the last token takes part in all others",
        "padding/update",
        ((HEAD, HEAD + "                y[0] += ZERO * x[stop - 1, h, 0]\n"),),
    ),
    Control("large calls take another path", "packing/update", other_order("x.shape[0] > 100")),
    Control(
        "large calls take another path and say so",
        "chunked_prefill/chunked_prefill",
        other_order("x.shape[0] > 40"),
        tokens=(40,),
    ),
    Control(
        "single tokens take another path", "decode_equals_prefill/decode", other_order("x.shape[0] == 1")
    ),
    Control("small calls take another path", "update_equals_rollout/update", other_order("x.shape[0] <= 16")),
    Control(
        "gradients follow their token's place",
        "gradient_packing/backward",
        other_order("sign < ZERO and t % 2 == 1"),
    ),
    Control(
        "the first gradient is another",
        "gradient_rerun/backward",
        (
            CALLS,
            (
                BACK,
                "    CALLS[0] += 1\n" + BACK + "    if CALLS[0] == 1:\n"
                "        np.nextafter(dq, np.float32(0), out=dq)\n",
            ),
        ),
    ),
    Control("another order under the same bits id", "implementations_agree/update", other_order("True")),
    Control(
        "keys are not turned",
        "accuracy_k_out/update",
        (
            (
                "    rotate_heads(k, positions, cos, sin, sign, k_out, start, stop)\n",
                "    k_out[start:stop] = k[start:stop]\n",
            ),
        ),
    ),
    Control(
        "the second half turns the other way",
        "accuracy_q_out/update",
        ((SECOND, SECOND.replace("fma(a, s,", "fma(-a, s,")),),
    ),
    Control(
        "neighbours are turned instead of halves",
        "accuracy_q_out/prefill",
        (
            ("a, b = sign * sin[i], x[i], x[half + i]", "a, b = sign * sin[i], x[2 * i], x[2 * i + 1]"),
            (FIRST, FIRST.replace("out[i]", "out[2 * i]")),
            (SECOND, SECOND.replace("out[half + i]", "out[2 * i + 1]")),
        ),
    ),
    *(
        Control(
            f"the gradient {name} turns forth",
            f"accuracy_{name}/backward",
            (("cos, sin, np.float32(-1), dq, dk)", "cos, sin, np.float32(1), dq, dk)"),),
        )
        for name in ("dq", "dk")
    ),
)
