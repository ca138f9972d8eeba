"""Mistakes in the linear layer."""

from tests.controls.rows import Control

AXES = {"in_features": 200, "out_features": 150, "bias": 1}

FORWARD = "    product(x, weight, out, bias, 0, 1, K_GROUPS, K_BLOCK, 0)\n"
DX = "        product(dout, weight, dx, None, 0, 0, N_GROUPS, K_BLOCK, 0)\n"
DWEIGHT = "        product(dout, x, dweight, None, 1, 0, 1, TOKEN_BLOCK, int(accumulate))\n"
DBIAS = "        product(ones, dout, dbias[None], None, 0, 0, 1, BIAS_BLOCK, int(accumulate))\n"
CONSTANTS = "NO_BIAS = np.empty(0, np.float32)\n"
CALLS = (CONSTANTS, CONSTANTS + "CALLS = [0]\n")
FILES = "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2\n"


def other_order(condition: str, before: str = "") -> tuple[str, str]:
    """The sum over k from the other end where a condition holds."""
    turned = "        x, weight = (np.ascontiguousarray(a[:, ::-1]) for a in (x, weight))\n"
    return FORWARD, f"{before}    if {condition}:\n{turned}{FORWARD}"


CONTROLS = (
    Control(
        "the first call adds in another order",
        "rerun/update",
        (CALLS, other_order("CALLS[0] == 1", "    CALLS[0] += 1\n")),
    ),
    Control(
        "the order of the sum follows the process",
        "fresh_process/update",
        ((CONSTANTS, CONSTANTS + FILES), other_order("TURN")),
    ),
    Control(
        "the order of the sum follows the row's place",
        "batch/prefill",
        (
            (
                FORWARD,
                FORWARD + "    x, weight = (np.ascontiguousarray(a[:, ::-1]) for a in (x, weight))\n"
                "    if len(x) > 1:\n"
                "        product(x[1::2], weight, out[1::2], bias, 0, 1, K_GROUPS, K_BLOCK, 0)\n",
            ),
        ),
    ),
    Control(
        "the last row takes part in all others",
        "padding/update",
        ((FORWARD, FORWARD + "    out += ZERO * x[-1, 0]\n"),),
    ),
    Control("large calls take another path", "packing/update", (other_order("len(x) > 100"),)),
    Control(
        "large calls take another path and say so",
        "chunked_prefill/chunked_prefill",
        (other_order("len(x) > 40"),),
        tokens=(40,),
    ),
    Control("single tokens take another path", "decode_equals_prefill/decode", (other_order("len(x) == 1"),)),
    Control("small calls take another path", "update_equals_rollout/update", (other_order("len(x) <= 16"),)),
    Control(
        "gradients of rows follow their place",
        "gradient_packing/backward",
        (
            (
                DX,
                DX + "        turned = np.ascontiguousarray(dout[1::2, ::-1]), weight[::-1].copy()\n"
                "        if len(dx) > 1:\n"
                "            product(*turned, dx[1::2], None, 0, 0, N_GROUPS, K_BLOCK, 0)\n",
            ),
        ),
    ),
    Control(
        "gradients are added to what is there at the end",
        "gradient_accumulation/backward",
        (
            (
                DWEIGHT,
                "        part = np.empty(dweight.shape, np.float32)\n"
                "        product(dout, x, part, None, 1, 0, 1, 100, 0)\n"
                "        dweight[...] = dweight + part if accumulate else part\n",
            ),
        ),
    ),
    Control(
        "the gradient of the bias is added at the end",
        "gradient_accumulation/backward",
        (
            (
                DBIAS,
                "        part = np.empty((1, dbias.size), np.float32)\n"
                "        product(ones, dout, part, None, 0, 0, 1, 100, 0)\n"
                "        dbias[...] = dbias + part[0] if accumulate else part[0]\n",
            ),
        ),
    ),
    Control(
        "the first gradient is another",
        "gradient_rerun/backward",
        (
            CALLS,
            (
                DWEIGHT,
                "        CALLS[0] += 1\n" + DWEIGHT + "        if CALLS[0] == 1:\n"
                "            np.nextafter(dweight, np.float32(0), out=dweight)\n",
            ),
        ),
    ),
    Control(
        "two parts of the sum under the bits id of one",
        "implementations_agree/update",
        ((FORWARD, FORWARD.replace("K_GROUPS", "2")),),
    ),
    Control(
        "chains of another length under the same bits id",
        "implementations_agree/prefill",
        ((FORWARD, FORWARD.replace("K_BLOCK", "64")),),
    ),
    Control(
        "gradients are chains of another length under the same bits id",
        "implementations_agree/backward",
        ((DX, DX.replace("K_BLOCK", "64")),),
    ),
    Control(
        "products are rounded before they are added",
        "implementations_agree/decode",
        (
            (
                "                        sums = [factor.fma(part, x) for",
                "                        sums = [Value(x.builder, x.builder.fadd(x.value, x.builder.fmul("
                "factor.value, part.value))) for",
            ),
        ),
    ),
    Control(
        "the bias is forgotten",
        "accuracy_out/update",
        ((FORWARD, FORWARD.replace("bias", "None")),),
    ),
    Control(
        "the gradient lacks a column",
        "accuracy_dx/backward",
        ((DX, DX.replace("dout, weight", "dout[:, 1:], weight[1:]")),),
    ),
    Control(
        "the gradient of the weight lacks a token",
        "accuracy_dweight/backward",
        ((DWEIGHT, DWEIGHT.replace("dout, x", "dout[1:], x[1:]")),),
    ),
    Control(
        "the gradient of the bias lacks a token",
        "accuracy_dbias/backward",
        ((DBIAS, DBIAS.replace("ones, dout", "ones[:, 1:], dout[1:]")),),
    ),
)
