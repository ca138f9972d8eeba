"""Mistakes in QK norm."""

from tests.controls.rows import Control

AXES = {"query_heads": 3, "kv_heads": 1, "head_dim": 24}

NORMALIZE = (
    "            r = factor(place, width, eps)\n            for j in range(width):\n"
    "                y[j] = canonical(a[j] * r * w[j])\n"
)
HOST = "    share(normalize, (q, k, q_weight, k_weight, np.float32(eps), q_out, k_out), len(q), threads)\n"
DX = "                    y[j] = canonical(r * fma(-c, a[j] * r, d[j] * w[j]))\n"
BLOCKS = "        ends = (t + 1) % TOKEN_BLOCK == 0 or t + 1 == x.shape[0]\n"
HALVES = "    sums, half = b.select(there, add(sums, *tails), sums), LANES // 2\n    while half:\n"


def other_order(condition: str) -> tuple[str, str]:
    """The factor loses its last bit where a condition holds."""
    changed = f"eps)\n            if {condition}:\n                r = np.nextafter(r, ZERO)\n"
    return NORMALIZE, NORMALIZE.replace("eps)\n", changed, 1)


CALLS = ("LANES = 16\n", "LANES = 16\nCALLS = [0]\n")
FILES = "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2\n"
WEIGHT = "            share(differentiate_weight, (x, dout, factors, dweight), x.shape[2], threads)\n"

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
    Control(
        "the factor follows the process",
        "fresh_process/update",
        (("LANES = 16\n", "LANES = 16\n" + FILES), other_order("TURN")),
    ),
    Control("the factor follows the token's place", "batch/prefill", (other_order("t % 2"),)),
    Control(
        "the last token takes part in all others",
        "padding/update",
        ((NORMALIZE, NORMALIZE.replace("* w[j])", "* w[j] + ZERO * x[stop - 1, h, j])")),),
    ),
    Control("large calls take another path", "packing/update", (other_order("x.shape[0] > 100"),)),
    Control(
        "large calls take another path and say so",
        "chunked_prefill/chunked_prefill",
        (other_order("x.shape[0] > 40"),),
        tokens=(40,),
    ),
    Control(
        "single tokens take another path", "decode_equals_prefill/decode", (other_order("x.shape[0] == 1"),)
    ),
    Control(
        "small calls take another path", "update_equals_rollout/update", (other_order("x.shape[0] <= 16"),)
    ),
    Control(
        "gradients of heads follow their token's place",
        "gradient_packing/backward",
        (
            (
                DX,
                DX.replace(
                    "r * fma(-c, a[j] * r, d[j] * w[j])",
                    "(r * fma(-c, a[j] * r, d[j] * w[j])) if t % 2 else "
                    "(r * (d[j] * w[j]) - r * (c * (a[j] * r)))",
                ),
            ),
        ),
    ),
    Control(
        "blocks of heads follow their number",
        "gradient_accumulation/backward",
        ((BLOCKS, BLOCKS.replace("TOKEN_BLOCK", "(TOKEN_BLOCK if x.shape[0] > 70 else 16)")),),
    ),
    Control(
        "the first gradient is another",
        "gradient_rerun/backward",
        (
            CALLS,
            (
                WEIGHT,
                "            CALLS[0] += 1\n" + WEIGHT + "            if CALLS[0] == 1:\n"
                "                np.nextafter(dweight, np.float32(0), out=dweight)\n",
            ),
        ),
    ),
    Control(
        "another order under the same bits id",
        "implementations_agree/update",
        (
            (HALVES, HALVES.replace("LANES // 2", "1").replace("while half", "while half < LANES")),
            ("        half //= 2\n", "        half *= 2\n"),
        ),
    ),
    Control(
        "keys take the queries' weight",
        "accuracy_k_out/update",
        (("    normalize_heads(k, k_weight,", "    normalize_heads(k, q_weight,"),),
    ),
    Control(
        "the mean leaves an element out",
        "accuracy_q_out/update",
        (
            (
                "sum_of_squares(x, width) / np.float32(width)",
                "sum_of_squares(x, width) / np.float32(width - 1)",
            ),
        ),
    ),
    *(
        Control(
            f"the gradient {name} lacks its projection",
            f"accuracy_{name}/backward",
            ((DX, DX.replace("fma(-c, a[j] * r, d[j] * w[j])", "(d[j] * w[j])")),),
        )
        for name in ("dq", "dk")
    ),
    *(
        Control(
            f"the gradient {name} lacks the factor",
            f"accuracy_{name}/backward",
            (("one[j] = fma(d[j], a[j] * r, one[j])", "one[j] = fma(d[j], a[j], one[j])"),),
        )
        for name in ("dq_weight", "dk_weight")
    ),
)
