"""Mistakes in embedding."""

from tests.controls.rows import Control

AXES = {"width": 72}

COPY = "                o[j] = w[j]\n"
HOST = "    share(copy_rows, (ids, weight, out), equal_parts(len(ids), weight.shape[1]))\n"
ADD = "    share(add_rows, (dout, order, first, found, dweight), bounds)\n"
TOKENS = "        for at in range(first[i], first[i + 1]):\n"
NAN = "NAN = np.float32(np.nan)\n"


def inexact(condition: str) -> tuple[str, str]:
    """A copy that changes the last bits where a condition holds."""
    return (COPY, f"                o[j] = w[j] * np.float32(1.0000002) if {condition} else w[j]\n")


def backwards(condition: str) -> tuple[str, str]:
    """The tokens of an id from the last to the first where a condition holds."""
    places = "        for place in range(first[i], first[i + 1]):\n"
    return (
        TOKENS,
        f"{places}            at = first[i] + first[i + 1] - 1 - place if {condition} else place\n",
    )


CALLS = (NAN, f"{NAN}CALLS = [0]\n")
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
        "the order of tokens follows the process",
        "fresh_process/backward",
        ((NAN, NAN + FILES), backwards("TURN")),
    ),
    Control("every other row is multiplied by about 1", "batch/prefill", (inexact("t % 2"),)),
    Control(
        "an id outside of the table changes its neighbours",
        "padding/update",
        (inexact("not 0 <= ids[stop - 1] < weight.shape[0]"),),
    ),
    Control("large calls are inexact", "packing/update", (inexact("ids.size > 100"),)),
    Control(
        "large calls are inexact and say so",
        "chunked_prefill/chunked_prefill",
        (inexact("ids.size > 40"),),
        tokens=(40,),
    ),
    Control("single tokens are inexact", "decode_equals_prefill/decode", (inexact("ids.size == 1"),)),
    Control("small calls are inexact", "update_equals_rollout/update", (inexact("ids.size <= 16"),)),
    Control(
        "the order of tokens follows their number",
        "gradient_accumulation/backward",
        (backwards("dout.shape[0] > 100"),),
    ),
    Control(
        "pieces are summed apart and then added",
        "gradient_accumulation/backward",
        (
            (
                ADD,
                "    part = np.zeros_like(dweight)\n"
                + ADD.replace("found, dweight)", "found, part)")
                + "    dweight += part\n",
            ),
        ),
    ),
    Control(
        "the first gradient is another",
        "gradient_rerun/backward",
        (
            CALLS,
            (
                ADD,
                f"    CALLS[0] += 1\n{ADD}    if CALLS[0] == 1:\n"
                "        np.nextafter(dweight, np.float32(0), out=dweight)\n",
            ),
        ),
    ),
    Control("another order under the same bits id", "implementations_agree/backward", (backwards("True"),)),
    Control("all rows are inexact", "accuracy_out/update", (inexact("True"),)),
    Control(
        "an id's last token is forgotten",
        "accuracy_dweight/backward",
        ((TOKENS, TOKENS.replace("first[i + 1])", "first[i + 1] - 1)")),),
    ),
)
