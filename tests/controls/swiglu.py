"""Mistakes in SwiGLU."""

from tests.controls.rows import Control

AXES = {"width": 72}

ROWWISE = "            o[j] = canonical(g[j] / (ONE + exp_of_minus(g[j])) * u[j])\n"
OTHER = "g[j] * (ONE / (ONE + exp_of_minus(g[j]))) * u[j]"
HOST = "    share(activate, (gate, up, out), len(gate), threads_of(gate))\n"
BACKWARD = "    share(differentiate, (gate, up, dout, dgate, dup), len(gate), threads_of(gate))\n"
DGATE = "            dg[j] = canonical(d[j] * u[j] * fma(y, ONE - s, s))\n"
DUP = "            du[j] = canonical(d[j] * y)\n"
DEGREE = "EXP2_DEGREE = 6\n"


def other_steps(condition: str) -> tuple[str, str]:
    """The gate times its sigmoid, rounded twice, where a condition holds."""
    return (ROWWISE, f"            if {condition}:\n                o[j] = canonical({OTHER})\n"
            f"            else:\n    {ROWWISE}")  # fmt: skip


def other_gradient(condition: str) -> tuple[str, str]:
    """The gradient of the gate from products rounded one by one, where a condition holds."""
    other = "canonical(d[j] * u[j] * (s + y * (ONE - s)))"
    return (
        DGATE,
        f"            if {condition}:\n                dg[j] = {other}\n            else:\n    {DGATE}",
    )


CALLS = (DEGREE, f"{DEGREE}CALLS = [0]\n")
FILES = "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2\n"

CONTROLS = (
    Control(
        "the first call gives other numbers",
        "rerun/update",
        (
            CALLS,
            (
                HOST,
                f"    CALLS[0] += 1\n{HOST}    if CALLS[0] == 1:\n"
                "        np.nextafter(out, np.float32(0), out=out)\n",
            ),
        ),
    ),
    Control(
        "the steps follow the process",
        "fresh_process/update",
        ((DEGREE, DEGREE + FILES), other_steps("TURN")),
    ),
    Control("the steps follow the row's place", "batch/prefill", (other_steps("t % 2"),)),
    Control(
        "the last row takes part in all others",
        "padding/update",
        ((ROWWISE, ROWWISE.replace("u[j])", "u[j] + ZERO * gate[stop - 1, j])")),),
    ),
    Control("large calls take another path", "packing/update", (other_steps("gate.shape[0] > 100"),)),
    Control(
        "large calls take another path and say so",
        "chunked_prefill/chunked_prefill",
        (other_steps("gate.shape[0] > 40"),),
        tokens=(40,),
    ),
    Control(
        "single tokens take another path",
        "decode_equals_prefill/decode",
        (other_steps("gate.shape[0] == 1"),),
    ),
    Control(
        "small calls take another path", "update_equals_rollout/update", (other_steps("gate.shape[0] <= 16"),)
    ),
    Control("gradients follow their place", "gradient_packing/backward", (other_gradient("t % 2"),)),
    Control(
        "gradients of large calls take another path",
        "gradient_accumulation/backward",
        (other_gradient("gate.shape[0] > 100"),),
    ),
    Control(
        "the first gradient is another",
        "gradient_rerun/backward",
        (
            CALLS,
            (
                BACKWARD,
                f"    CALLS[0] += 1\n{BACKWARD}    if CALLS[0] == 1:\n"
                "        np.nextafter(dup, np.float32(0), out=dup)\n",
            ),
        ),
    ),
    Control(
        "other steps under the same bits id",
        "implementations_agree/update",
        (("r = fma(c, -LOG2E_REST, fma(c, -LOG2E, -n))", "r = fma(c, -LOG2E, -n)"),),
    ),
    Control(
        "silu is rounded to 16 bits before the product",
        "accuracy_out/update",
        (
            (
                "g[j] / (ONE + exp_of_minus(g[j])) * u[j]",
                "from_bits(np.int32(bits_of(g[j] / (ONE + exp_of_minus(g[j]))) & -65536)) * u[j]",
            ),
        ),
    ),
    Control(
        "the gradient of the gate is the sigmoid alone",
        "accuracy_dgate/backward",
        ((DGATE, DGATE.replace("fma(y, ONE - s, s)", "s")),),
    ),
    Control(
        "the gradient of up lacks the gate",
        "accuracy_dup/backward",
        ((DUP, DUP.replace("d[j] * y", "d[j] * s")),),
    ),
)
