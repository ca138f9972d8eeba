"""Mistakes in the residual add and RMS norm."""

from tests.controls.rows import Control

AXES = {"width": 72}

NORMALIZE = "        r = factor(total[t], eps, lanes)\n"
ROWWISE = "            out[t, j] = canonical(total[t, j] * r * weight[j])\n"
HOST = (
    "    share(add_and_normalize, (x, residual, weight, np.float32(eps), out, residual_out), len(x), "
    "threads_of(x))\n"
)
DX = "                    dx[t, j] = canonical(fma(r, part, dtotal[t, j]))\n"
BLOCKS = "    for first in range(0, x.shape[0], BLOCK):\n"


def other_order(condition: str) -> tuple[str, str]:
    """The sum of squares from the other end where a condition holds."""
    return NORMALIZE, f"        r = factor(total[t][::-1] if {condition} else total[t], eps, lanes)\n"


CALLS = ("LANES = 16\n", "LANES = 16\nCALLS = [0]\n")
FILES = "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2\n"
WEIGHT = "        share(differentiate_weight, (x, dout, factors, dweight), x.shape[1], threads)\n"

CONTROLS = (
    Control(
        "the first call adds in another order",
        "rerun/update",
        (
            CALLS,
            (
                HOST,
                "    CALLS[0] += 1\n    turn = -1 if CALLS[0] == 1 else 1\n"
                + HOST.replace(
                    "(x, residual, weight,", "(x[:, ::turn], residual[:, ::turn], weight[::turn],"
                ).replace("out, residual_out)", "out[:, ::turn], residual_out[:, ::turn])"),
            ),
        ),
    ),
    Control(
        "the order of the sum follows the process",
        "fresh_process/update",
        (("LANES = 16\n", "LANES = 16\n" + FILES), other_order("TURN")),
    ),
    Control(
        "the order of the sum follows the row's place",
        "batch/prefill",
        (other_order("t % 2"),),
    ),
    Control(
        "the last row takes part in all others",
        "padding/update",
        (
            (
                ROWWISE,
                ROWWISE.replace("weight[j])", "weight[j] + ZERO * x[stop - 1, j])"),
            ),
        ),
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
        "gradients of rows follow their place",
        "gradient_packing/backward",
        (
            (
                DX,
                DX.replace(
                    "fma(r, part, dtotal[t, j])",
                    "fma(r, part, dtotal[t, j]) if t % 2 else r * part + dtotal[t, j]",
                ),
            ),
        ),
    ),
    Control(
        "blocks of tokens follow their number",
        "gradient_accumulation/backward",
        (
            (
                BLOCKS,
                "    size = BLOCK if x.shape[0] > 100 else 16\n" + BLOCKS.replace("BLOCK", "size"),
            ),
            (
                "        for t in range(first, min(first + BLOCK, x.shape[0])):\n",
                "        for t in range(first, min(first + size, x.shape[0])):\n",
            ),
        ),
    ),
    Control(
        "the first gradient is another",
        "gradient_rerun/backward",
        (
            CALLS,
            (
                WEIGHT,
                "        CALLS[0] += 1\n" + WEIGHT + "        if CALLS[0] == 1:\n"
                "            np.nextafter(dweight, np.float32(0), out=dweight)\n",
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
        "the mean leaves an element out",
        "accuracy_out/update",
        (("halved(lanes) / np.float32(width) + eps", "halved(lanes) / np.float32(width - 1) + eps"),),
    ),
    Control(
        "the residual is added twice",
        "accuracy_residual_out/update",
        (("canonical(x[t, j] + residual[t, j])", "canonical(x[t, j] + residual[t, j] + residual[t, j])"),),
    ),
    Control(
        "what comes to the sum from elsewhere is lost",
        "accuracy_dx/backward",
        ((DX, DX.replace("dtotal[t, j]", "ZERO")),),
    ),
    Control(
        "the gradient lacks its projection",
        "accuracy_dx/backward",
        ((DX, DX.replace("part", "(dout[t, j] * weight[j])")),),
    ),
    Control(
        "the gradient of the weight lacks the factor",
        "accuracy_dweight/backward",
        (
            (
                "part[j] = fma(dout[t, start + j], x[t, start + j] * r, part[j])",
                "part[j] = fma(dout[t, start + j], x[t, start + j], part[j])",
            ),
        ),
    ),
)
