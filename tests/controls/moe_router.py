"""Mistakes in a mixture's router."""

from tests.controls.rows import Control

AXES = {"experts": 20, "top_k": 3, "sigmoid": 0, "renormalize": 0}

TOTAL = "                share = total(x, largest, powers, lanes)\n"
HOST = "    share_rows(route, operands, len(logits), threads_of(logits, experts))\n"
GRADIENT = "    share_rows(differentiate, operands, len(logits), threads_of(logits, experts))\n"
WEIGHT = "            weights[t, s] = canonical(values[s] / share)\n"
CHOSEN = "canonical((w[s] if renormalize else powers[j]) * (d[s] - projected))"
CALLS = ("LANES = 16\n", "LANES = 16\nCALLS = [0]\n")
FILES = "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2\n"


def other_order(condition: str) -> tuple[str, str]:
    """The sum over experts from left to right where a condition holds."""
    walk = "for j in range(1, powers.size):\n                        share += powers[j]\n"
    return TOTAL, (
        f"{TOTAL}                if {condition}:\n                    share = powers[0]\n"
        f"                    {walk}"
    )


def first_call(host: str, result: str) -> tuple[str, str]:
    """Another result of the first call."""
    changed = f"np.nextafter({result}, np.float32(0), out={result})"
    return host, f"{host}    CALLS[0] += 1\n    if CALLS[0] == 1:\n        {changed}\n"


CONTROLS = (
    Control("the first call differs", "rerun/update", (CALLS, first_call(HOST, "weights"))),
    Control(
        "the order of the sum follows the process",
        "fresh_process/update",
        (("LANES = 16\n", "LANES = 16\n" + FILES), other_order("TURN")),
    ),
    Control("the order of the sum follows the row's place", "batch/prefill", (other_order("t % 2"),)),
    Control(
        "the last row takes part in all others",
        "padding/update",
        ((WEIGHT, WEIGHT.replace("values[s] / share", "values[s] / share + ZERO * logits[stop - 1, 0]")),),
    ),
    Control("large calls take another path", "packing/update", (other_order("logits.shape[0] > 100"),)),
    Control(
        "large calls take another path and say so",
        "chunked_prefill/chunked_prefill",
        (other_order("logits.shape[0] > 40"),),
        tokens=(40,),
    ),
    Control(
        "single tokens take another path",
        "decode_equals_prefill/decode",
        (other_order("logits.shape[0] == 1"),),
    ),
    Control(
        "small calls take another path",
        "update_equals_rollout/update",
        (other_order("logits.shape[0] <= 16"),),
    ),
    Control(
        "the first gradient is another", "gradient_rerun/backward", (CALLS, first_call(GRADIENT, "dlogits"))
    ),
    Control(
        "gradients of rows follow their place",
        "gradient_packing/backward",
        (
            (
                CHOSEN,
                f"({CHOSEN} if t % 2 else canonical(powers[j] * d[s] - powers[j] * projected))",
            ),
        ),
    ),
    Control(
        "another order under the same bits id",
        "implementations_agree/update",
        (
            (
                "    half = LANES // 2\n    while half:\n        for lane in range(half):\n"
                "            lanes[lane] += lanes[lane + half]\n        half //= 2\n    return lanes[0]\n",
                "    for lane in range(1, LANES):\n        lanes[0] += lanes[lane]\n    return lanes[0]\n",
            ),
        ),
    ),
    Control(
        "powers of two instead of e",
        "accuracy_weights/update",
        (
            (
                "                values[s] = exp2((x[chosen[s]] - largest) * LOG2E)\n",
                "                values[s] = exp2(x[chosen[s]] - largest)\n",
            ),
        ),
    ),
    Control(
        "the gradient lacks its projection",
        "accuracy_dlogits/backward",
        ((CHOSEN, CHOSEN.replace("(d[s] - projected)", "d[s]")),),
    ),
)
