"""Mistakes in log-probabilities."""

from dataclasses import replace

from tests.controls.rows import Control

AXES = {"width": 140, "vocabulary": 300}

SCORE = "            score(x, t, rows, panels, count, scores)\n            scores[:, count:] = -np.inf\n"
REDUCTION = "            emit_reduction((rows, address(scores), address(numbers), own, *strides))\n"
FINISH = (
    "        compiled(finish)(partials, chosen, wanted, vocabulary, logprob[part], entropies, lse[part])\n"
)
SHIFTED = "        logprob[t] = row[4] if 0 <= targets[t] < vocabulary else 0\n"
GRADIENT = "        emit_gradients((tokens, *own, start))\n"
SUMS = (
    "            for first in range(0, tokens, TOKEN_BLOCK):\n"
    "                depth = min(TOKEN_BLOCK, tokens - first)\n"
)
ACCUMULATED = "    if dweight is not None and not accumulate:\n"
CALLS = ("PIECE = 8\n", "PIECE = 8\nCALLS = [0]\n")
FEWER = ("ROWS = 6\n", "ROWS = 2\n")  # which compiles faster
FILES = "TURN = len(list(__import__('pathlib').Path(__file__).parent.glob('*.py'))) % 2\n"


def turned(condition: str) -> tuple[str, str]:
    """A block's columns moved by one, and so in other lanes, where a condition holds."""
    return (
        REDUCTION,
        f"            for r in range(rows):\n                if {condition}:\n"
        "                    scores[r] = np.roll(scores[r], 1)\n"
        + REDUCTION
        + f"            for r in range(rows):\n                if {condition}:\n"
        "                    scores[r] = np.roll(scores[r], -1)\n",
    )


MISTAKES = (
    Control(
        "the first call is off by an ulp",
        "rerun/update",
        (
            CALLS,
            (
                FINISH,
                "        CALLS[0] += 1\n" + FINISH + "        if CALLS[0] == 1:\n"
                "            np.nextafter(lse[part], np.float32(0), out=lse[part])\n",
            ),
        ),
    ),
    Control(
        "the order of the sum follows the process",
        "fresh_process/update",
        (("PIECE = 8\n", "PIECE = 8\n" + FILES), turned("TURN")),
    ),
    Control("the order of the sum follows the row's place", "batch/prefill", (turned("(t + r) % 2"),)),
    Control(
        "the last row takes part in all others",
        "padding/update",
        ((SHIFTED, SHIFTED + "        logprob[t] += partials[targets.size - 1, 1, 0] * 0\n"),),
    ),
    Control("large calls take another path", "packing/update", (turned("tokens > 100"),)),
    Control(
        "large calls take another path and say so",
        "chunked_prefill/chunked_prefill",
        (turned("tokens > 40"),),
        tokens=(40,),
    ),
    Control("single tokens take another path", "decode_equals_prefill/decode", (turned("tokens == 1"),)),
    Control(
        "logits to sample from are those of other arithmetic",
        "decode_equals_prefill/decode",
        (
            (
                "    share(write_logits, (x, weight, out), blocks, work, BLOCK * width)\n",
                "    out[...] = x.astype(np.float64) @ weight.T\n",
            ),
        ),
    ),
    Control("small calls take another path", "update_equals_rollout/update", (turned("tokens <= 16"),)),
    Control(
        "gradients of logits follow their place",
        "gradient_packing/backward",
        (
            (
                GRADIENT,
                GRADIENT + "        for t in range(tokens):\n            if t % 2:\n"
                "                g[block, t] *= np.float32(1.0000002)\n",
            ),
        ),
    ),
    Control(
        "blocks of tokens follow their number",
        "gradient_accumulation/backward",
        (
            (
                SUMS,
                "            size = TOKEN_BLOCK if tokens > 100 else 16\n"
                + SUMS.replace("TOKEN_BLOCK", "size"),
            ),
        ),
    ),
    Control(
        "what is there is forgotten",
        "gradient_accumulation/backward",
        ((ACCUMULATED, "    if dweight is not None:\n"),),
    ),
    Control(
        "the first gradient is another",
        "gradient_rerun/backward",
        (
            CALLS,
            (
                ACCUMULATED,
                "    CALLS[0] += 1\n    if CALLS[0] == 1:\n        dlogprob = dlogprob * np.float32(1.001)\n"
                + ACCUMULATED,
            ),
        ),
    ),
    Control(
        "another order under the same bits id",
        "implementations_agree/update",
        (("for distance in (8, 4, 2, 1):", "for distance in (1, 2, 4, 8):"),),
    ),
    Control(
        "chains of another length under the same bits id",
        "implementations_agree/prefill",
        (('"k_block": K_BLOCK}', '"k_block": 128}'), ("K_BLOCK = 128\n", "K_BLOCK = 64\n")),
    ),
    Control(
        "the temperature is forgotten",
        "accuracy_logprob/update",
        (
            (
                "    return np.array([1 / float(temperature)], np.float32)\n",
                "    return np.ones(1, np.float32)\n",
            ),
        ),
    ),
    Control(
        "the entropy is that of the unscaled weights",
        "accuracy_entropy/update",
        (("difference = (tops + i).load().origin() - base", "difference = (tops + i).load().origin() * 0"),),
    ),
    Control(
        "blocks are added without their maximum",
        "accuracy_lse/update",
        (("return [own.fma(factor, sums), products]", "return [own + sums, products]"),),
    ),
    Control(
        "the gradient of rows lacks the temperature",
        "accuracy_dx/backward",
        (("            place.store(g * scales)\n", "            place.store(g)\n"),),
    ),
    Control(
        "the target has no gradient of its own",
        "accuracy_dweight/backward",
        (('lane.pick("==", target, d - g, g * -1)', "g * -1"),),
    ),
)


CONTROLS = tuple(replace(each, edits=(*each.edits, FEWER)) for each in MISTAKES)
