"""Mistakes in sampling."""

from tests.controls.rows import Control

AXES = {"vocabulary": 300}

GIVEN = "top_p[t], min_p[t], seeds[t], samples[t], positions[t])\n"
HOST = "    kernel = compiled(sample_rows)\n"
CALLS = ("THREAD_COST = 32768\n", "THREAD_COST = 32768\nCALLS = [0]\n")
FILES = "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2\n"


def other_numbers(condition: str) -> tuple[str, str]:
    """Other random numbers where a condition holds."""
    return GIVEN, GIVEN.replace("seeds[t]", f"seeds[t] + ({condition})")


CONTROLS = (
    Control(
        "the first call draws other numbers",
        "rerun/update",
        (
            CALLS,
            (
                HOST,
                "    CALLS[0] += 1\n    if CALLS[0] == 1:\n"
                "        operands = (*operands[:5], seeds + 1, *operands[6:])\n" + HOST,
            ),
        ),
    ),
    Control(
        "random numbers follow the process",
        "fresh_process/update",
        (("THREAD_COST = 32768\n", "THREAD_COST = 32768\n" + FILES), other_numbers("TURN")),
    ),
    Control("random numbers follow the row's place", "batch/prefill", (other_numbers("t"),)),
    Control(
        "random numbers follow the batch's last row",
        "padding/update",
        (other_numbers("seeds[tokens.size - 1] % 7"),),
    ),
    Control(
        "random numbers follow the number of rows", "packing/update", (other_numbers("tokens.size > 100"),)
    ),
    Control(
        "large calls draw other numbers and say so",
        "chunked_prefill/chunked_prefill",
        (other_numbers("tokens.size > 40"),),
        tokens=(40,),
    ),
    Control(
        "single tokens draw other numbers",
        "decode_equals_prefill/decode",
        (other_numbers("tokens.size == 1"),),
    ),
    Control(
        "small calls draw other numbers",
        "update_equals_rollout/update",
        (other_numbers("tokens.size <= 16"),),
    ),
    Control(
        "top-p stops short of its mass",
        "implementations_agree/update",
        (("(mass - above + own - 1) // own", "(mass - above) // own"),),
    ),
    Control(
        "nine rounds of Philox",
        "implementations_agree/decode",
        (("    for _ in range(10):\n", "    for _ in range(9):\n"),),
    ),
)
