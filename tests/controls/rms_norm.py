"""Mistakes in RMS norm."""

from tests.controls.rows import Control

AXES = {"width": 72}

NORMALIZE = (
    "        r = factor(place, width, eps)\n        for j in range(width):\n"
    "            y[j] = canonical(a[j] * r * w[j])\n"
)
HOST = "    share(normalize, (x, weight, np.float32(eps), out), len(x), threads_of(x))\n"
DX = "                y[j] = canonical(r * fma(-c, a[j] * r, d[j] * w[j]))\n"
HALVES = "    sums, half = b.select(there, add(sums, *tails), sums), LANES // 2\n    while half:\n"
BLOCKS = "    for first in range(0, x.shape[0], BLOCK):\n"


def other_order(condition: str) -> tuple[str, str]:
    """The factor loses its last bit where a condition holds."""
    return (
        NORMALIZE,
        NORMALIZE.replace(
            "eps)\n", f"eps)\n        if {condition}:\n            r = np.nextafter(r, ZERO)\n", 1
        ),
    )


CALLS = ("LANES = 16\n", "LANES = 16\nCALLS = [0]\n")
FILES = "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2\n"
WEIGHT = "        share(differentiate_weight, (x, dout, factors, dweight), x.shape[1], threads)\n"

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
                + "    if CALLS[0] == 1:\n        np.nextafter(out, np.float32(0), out=out)\n",
            ),
        ),
    ),
    Control(
        "the factor follows the process",
        "fresh_process/update",
        (("LANES = 16\n", "LANES = 16\n" + FILES), other_order("TURN")),
    ),
    Control(
        "the factor follows the row's place",
        "batch/prefill",
        (other_order("t % 2"),),
    ),
    Control(
        "the last row takes part in all others",
        "padding/update",
        (
            (
                NORMALIZE,
                NORMALIZE.replace(
                    "y[j] = canonical(a[j] * r * w[j])",
                    "y[j] = canonical(a[j] * r * w[j] + ZERO * x[stop - 1, j])",
                ),
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
                    "r * fma(-c, a[j] * r, d[j] * w[j])",
                    "(r * fma(-c, a[j] * r, d[j] * w[j])) if t % 2 else "
                    "(r * (d[j] * w[j]) - r * (c * (a[j] * r)))",
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
            (HALVES, HALVES.replace("LANES // 2", "1").replace("while half", "while half < LANES")),
            ("        half //= 2\n", "        half *= 2\n"),
        ),
    ),
    Control(
        "eps is forgotten",
        "accuracy_out/update",
        (("/ np.float32(width) + eps)", "/ np.float32(width))"),),
    ),
    Control(
        "the gradient lacks its projection",
        "accuracy_dx/backward",
        ((DX, DX.replace("fma(-c, a[j] * r, d[j] * w[j])", "(d[j] * w[j])")),),
    ),
    Control(
        "the gradient of the weight lacks the factor",
        "accuracy_dweight/backward",
        (
            (
                "part[j] = fma(d[j], a[j] * r, part[j])",
                "part[j] = fma(d[j], a[j], part[j])",
            ),
        ),
    ),
)
