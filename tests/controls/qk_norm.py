"""Mistakes in QK norm."""

from tests.controls.rows import Control

AXES = {"query_heads": 3, "kv_heads": 1, "head_dim": 24}

NORMALIZE = (
    "            r = factor(x[t, h], eps, lanes)\n            for j in range(weight.size):\n"
    "                out[t, h, j]"
)
HEADWISE = "                out[t, h, j] = canonical(x[t, h, j] * r * weight[j])\n"
HOST = "    share(normalize, (q, k, q_weight, k_weight, np.float32(eps), q_out, k_out), len(q), threads)\n"
DX = "                    dx[t, h, j] = canonical(r * fma(-c, x[t, h, j] * r, dout[t, h, j] * weight[j]))\n"
BLOCKS = "            if count % BLOCK == 0 or count == heads:\n"


def other_order(condition: str) -> tuple[str, str]:
    """The sum of squares from the other end where a condition holds."""
    return NORMALIZE, NORMALIZE.replace("x[t, h], eps", f"x[t, h][::-1] if {condition} else x[t, h], eps")


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
        "the order of the sum follows the process",
        "fresh_process/update",
        (("LANES = 16\n", "LANES = 16\n" + FILES), other_order("TURN")),
    ),
    Control("the order of the sum follows the token's place", "batch/prefill", (other_order("t % 2"),)),
    Control(
        "the last token takes part in all others",
        "padding/update",
        ((HEADWISE, HEADWISE.replace("weight[j])", "weight[j] + ZERO * x[stop - 1, h, j])")),),
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
                    "r * fma(-c, x[t, h, j] * r, dout[t, h, j] * weight[j])",
                    "(r * fma(-c, x[t, h, j] * r, dout[t, h, j] * weight[j])) if t % 2 else "
                    "(r * (dout[t, h, j] * weight[j]) - r * (c * (x[t, h, j] * r)))",
                ),
            ),
        ),
    ),
    Control(
        "blocks of heads follow their number",
        "gradient_accumulation/backward",
        ((BLOCKS, BLOCKS.replace("BLOCK", "(BLOCK if heads > 300 else 16)")),),
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
            (
                "    half = LANES // 2\n    while half:\n        for lane in range(half):\n"
                "            lanes[lane] += lanes[lane + half]\n        half //= 2\n    return lanes[0]\n",
                "    for lane in range(1, LANES):\n        lanes[0] += lanes[lane]\n    return lanes[0]\n",
            ),
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
        (("halved(lanes) / np.float32(width) + eps", "halved(lanes) / np.float32(width - 1) + eps"),),
    ),
    *(
        Control(
            f"the gradient {name} lacks its projection",
            f"accuracy_{name}/backward",
            (
                (
                    DX,
                    DX.replace(
                        "fma(-c, x[t, h, j] * r, dout[t, h, j] * weight[j])", "(dout[t, h, j] * weight[j])"
                    ),
                ),
            ),
        )
        for name in ("dq", "dk")
    ),
    *(
        Control(
            f"the gradient {name} lacks the factor",
            f"accuracy_{name}/backward",
            (
                (
                    "part[j] = fma(dout[t, h, start + j], x[t, h, start + j] * r, part[j])",
                    "part[j] = fma(dout[t, h, start + j], x[t, h, start + j], part[j])",
                ),
            ),
        )
        for name in ("dq_weight", "dk_weight")
    ),
)
