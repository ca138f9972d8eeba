"""Mistakes in a mixture's experts."""

from tests.controls.rows import Control

AXES = {"width": 140, "intermediate": 24, "experts": 4, "top_k": 2}

CHAIN = "    chain(down[expert], block[:inside], found, blocks_of(inside), False)\n"
HOST = "        one(x[rows], weights[rows], experts[rows], gate_up, down, out[rows])\n"
DX = "        chain(gate_up[expert].T, block, found, blocks_of(2 * inside), True)\n"
MATRIX = "    chain(own, right[first:last], rows, ends[:count], True)\n"
GRADIENT = "    whole = pieces(starts, max(1, len(order)))\n"
CALLS = ("ROWS = 64\n", "ROWS = 64\nCALLS = [0]\n")
FILES = "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2\n"


def other_order(condition: str) -> tuple[str, str]:
    """The product with `down` from the other end where a condition holds."""
    turned = CHAIN.replace("down[expert]", "down[expert][:, ::-1]").replace("[:inside]", "[:inside][::-1]")
    return CHAIN, f"    if {condition}:\n    {turned}    else:\n    {CHAIN}"


CONTROLS = (
    Control(
        "the first call differs",
        "rerun/update",
        (
            CALLS,
            (
                HOST,
                HOST + "    CALLS[0] += 1\n    if CALLS[0] == 1:\n        np.nextafter(out, ZERO, out=out)\n",
            ),
        ),
    ),
    Control(
        "the order of the sum follows the process",
        "fresh_process/update",
        (("ROWS = 64\n", "ROWS = 64\n" + FILES), other_order("TURN")),
    ),
    Control(
        "the order of the sum follows the place of an expert's first token",
        "batch/prefill",
        (other_order("order[first] % 2"),),
    ),
    Control(
        "the last row takes part in all others",
        "padding/update",
        ((HOST, HOST + "    out += ZERO * x[-1, 0]\n"),),
    ),
    Control("popular experts take another path", "packing/update", (other_order("last - first > 30"),)),
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
        "gradients of rows follow the place of an expert's first token",
        "gradient_packing/backward",
        (
            (
                DX,
                "        if order[first] % 2:\n"
                "            turned = gate_up[expert].T[:, ::-1]\n"
                "            chain(turned, block[::-1], found, blocks_of(2 * inside), True)\n"
                f"        else:\n    {DX}",
            ),
        ),
    ),
    Control(
        "every call adds a sum of its own",
        "gradient_accumulation/backward",
        (
            (
                MATRIX,
                "    part = np.zeros(rows.shape, np.float32)\n"
                + MATRIX.replace(", rows,", ", part,")
                + "    rows += part\n",
            ),
        ),
    ),
    Control(
        "the first gradient is another",
        "gradient_rerun/backward",
        (
            CALLS,
            (
                GRADIENT,
                "    CALLS[0] += 1\n    if CALLS[0] == 1:\n        dblock *= np.float32(1.5)\n" + GRADIENT,
            ),
        ),
    ),
    Control(
        "another order under the same bits id", "implementations_agree/update", (other_order("first >= 0"),)
    ),
    Control(
        "chains of another length under the same bits id",
        "implementations_agree/prefill",
        (("found, blocks_of(inside)", "found, np.array([8, inside])"),),
    ),
    Control(
        "pairs of several blocks of tokens are one chain",
        "gradient_accumulation/backward",
        ((" or order[i] // top_k // BLOCK != order[begin] // top_k // BLOCK:", ":"),),
    ),
    Control(
        "gates are not closed",
        "accuracy_out/update",
        (
            (
                "            block[i, r] = gate * sigmoid(gate) * block[inside + i, r]\n",
                "            block[i, r] = gate * block[inside + i, r]\n",
            ),
        ),
    ),
    Control("the gate's slope is its value", "accuracy_dx/backward", (("fma(silu, ONE - s, s)", "s"),)),
    Control(
        "the gradient of the weights forgets up",
        "accuracy_dweights/backward",
        (("fma(dact[i, r], act[i, r], part[r])", "fma(dact[i, r], silu, part[r])"),),
    ),
    Control(
        "the gradient of gate and up forgets the weight",
        "accuracy_dgate_up/backward",
        (("            d = dact[i, r] * share[r]\n", "            d = dact[i, r]\n"),),
    ),
    Control(
        "the gradient of down forgets the weight",
        "accuracy_ddown/backward",
        (("            act[i, r] *= share[r]\n", ""),),
    ),
)
