"""Attentions broken on purpose by short edits of `attention.py`, and what must reject each."""

from dataclasses import dataclass, field
from pathlib import Path

GOOD = (Path(__file__).parent / "attention.py").read_text()
KERNEL = GOOD[GOOD.index("@njit((READ") : GOOD.index("def scaled")]

CHOICE = "            chunk, block = CHUNK, KEY_BLOCK\n"
PAGED = "            attend(q[at], keys, values, n - rows, cl, chunk, block, out[at], lse[:, at])\n"
PACKED = "            attend(q[at], k[at], v[at], 0, cl, CHUNK, KEY_BLOCK, out[at], lse[:, at])\n"
GATHER = "            keys, values = k_cache[slots], v_cache[slots]\n"
SLOTS = "            slots = slots_of(page_table[b], k_cache.shape[1], n)\n"
CHUNKS = "            for first in range(0, seen, chunk):\n"
STORE = "                out[row, h, d] = canonical(A[d] / L + np.float32(0))\n"
WEIGHT = "                        p = weight(x[j - start], base)\n"
ACCUMULATE = "                            acc[d] = fma(p, values[j, g, d], acc[d])\n"
BLOCKS = "    size, turn = GRADIENT_BLOCK, 0\n"
IN_DECODE = (PAGED, PAGED.replace("attend(", "(twin if rows == 1 else attend)("))
IN_UPDATE = (PACKED, PACKED.replace("attend(", "twin("))
Edit = tuple[str, str]


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """Replace texts that occur once each."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"the good attention contains {text.count(old)} times, not once: {old!r}")
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Control:
    """One mistake."""

    name: str
    rejected_by: str
    """relation/regime, or accuracy_quantity/regime."""
    edits: tuple[Edit, ...] = ()
    twin: tuple[Edit, ...] = ()
    """Edits of a second kernel, `twin`, which `edits` put in the place of the first somewhere."""
    held: tuple[str, ...] = ()
    """Requirements that see nothing wrong: why the named one is needed."""
    edges: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Edges of the schedule that the implementation declares."""

    @property
    def text(self) -> str:
        text = edited(GOOD, self.edits)
        if self.twin:
            twin = edited(KERNEL, self.twin).replace("def attend(", "def twin(")
            text = text.replace("def scaled", f"{twin}def scaled")
        return text


def bfloat16(value: str) -> str:
    """Text that rounds a float32 to 8 significant bits."""
    return f"(({value}) * np.float32(65537) - (({value}) * np.float32(65537) - ({value})))"


CONTROLS = (
    Control(
        "keys_split_by_length",  # a long decode cuts its keys into four equal parts, to fill the machine
        "decode_equals_prefill/decode",
        ((CHOICE, CHOICE + "            chunk = -(-n // 4) if rows == 1 and n > CHUNK else chunk\n"),),
        held=("batch/decode", "paging/decode", "rerun/decode"),
    ),
    Control(
        "block_origin_at_the_request",  # blocks count from the call's first row, not from position 0
        "chunked_prefill/chunked_prefill",
        (
            (
                CHOICE,
                CHOICE + "            block = (n - rows) % KEY_BLOCK or KEY_BLOCK if rows > 1 else block\n",
            ),
        ),
        held=("batch/chunked_prefill", "paging/chunked_prefill", "rerun/chunked_prefill"),
    ),
    Control(
        "decode_with_another_block",
        "decode_equals_prefill/decode",
        ((CHOICE, CHOICE + "            block = 2 * KEY_BLOCK if max_seqlen_q == 1 else block\n"),),
        held=("paging/decode", "paging/prefill"),
    ),
    Control(
        "low_precision_in_one_regime",  # the packed forward rounds its accumulator to 8 bits
        "update_equals_rollout/update",
        (IN_UPDATE,),
        ((ACCUMULATE, ACCUMULATE + f"                            acc[d] = {bfloat16('acc[d]')}\n"),),
        held=("packing/update", "batch/update", "decode_equals_prefill/decode"),
    ),
    Control(
        "schedule_follows_the_batch",  # sixteen requests or more get another block
        "batch/decode",
        ((CHOICE, CHOICE + "            block = 2 * KEY_BLOCK if len(seqlens_k) >= 16 else block\n"),),
        held=("rerun/decode", "paging/decode"),
    ),
    Control(
        "declared_edge_of_the_batch",  # the same far out, where only a declared edge leads the checks
        "batch/prefill",
        ((CHOICE, CHOICE + "            block = 2 * KEY_BLOCK if len(seqlens_k) == 697 else block\n"),),
        held=("rerun/prefill", "paging/prefill"),
        edges={"batch": (697,)},
    ),
    Control(
        "order_follows_max_seqlen",  # a longer neighbour changes the block
        "packing/update",
        ((PACKED, PACKED.replace("KEY_BLOCK", "KEY_BLOCK if max_seqlen <= 100 else 2 * KEY_BLOCK")),),
        held=("rerun/update", "fresh_process/update"),
    ),
    Control(
        "empty_chunk_unguarded",  # rows walk the longest request's chunks; an empty one gives 0 / 0
        "batch/decode",
        ((PAGED, PAGED.replace("attend(", "twin(").replace("chunk,", "chunk, max_seqlen_k,")),),
        (
            ("int64, int64, WRITTEN", "int64, int64, int64, WRITTEN"),
            ("chunk, block, out, lse):", "chunk, longest, block, out, lse):"),
            (CHUNKS, CHUNKS.replace("seen", "max(seen, longest)")),
            (
                "                M, L = merge(",
                "                for d in range(A.size):\n"
                "                    acc[d] = acc[d] / total * total\n"
                "                M, L = merge(",
            ),
        ),
        held=("rerun/decode", "paging/decode"),
    ),
    Control(
        "stale_output",  # a request of one token has nothing to attend to, so its row is never written
        "rerun/prefill",
        (("        if rows:\n", "        if rows and n > 1:\n"),),
    ),
    Control(
        "page_order_assumed",  # pages of a request follow its first one
        "paging/prefill",
        (
            (
                SLOTS,
                "            first = page_table[b, 0] + np.arange(page_table.shape[1])\n"
                + SLOTS.replace("page_table[b]", "np.minimum(first, len(k_cache) - 1)"),
            ),
        ),
        held=("batch/prefill", "chunked_prefill/chunked_prefill", "padding/prefill"),
    ),
    Control(
        "block_is_the_page",
        "paging/decode",
        ((CHOICE, CHOICE + "            block = k_cache.shape[1]\n"),),
        held=("batch/decode", "rerun/decode"),
    ),
    Control(
        "negative_zero_laundered",  # equal as numbers: a decode returns -0.0 where prefill returns +0.0
        "decode_equals_prefill/decode",
        (IN_DECODE,),
        ((STORE, STORE.replace("A[d] / L + np.float32(0)", "-(np.float32(0) - A[d] / L)")),),
        held=("rerun/decode", "fresh_process/decode"),
    ),
    Control(
        "contraction_in_one_regime",  # the compiler fused a multiply and an add in one kernel only
        "decode_equals_prefill/decode",
        (IN_DECODE,),
        ((ACCUMULATE, "                            acc[d] += p * values[j, g, d]\n"),),
        held=("rerun/decode", "paging/decode"),
    ),
    Control(
        "merged_as_they_arrive",  # two threads' chunks, added in the order in which the threads finish
        "rerun/prefill",
        (
            ("import numpy as np\n", "import random\n\nimport numpy as np\n"),
            ("LANES = 16\n", "LANES = 16\nARRIVAL = random.Random(1)\n"),
            (PAGED, PAGED.replace("attend(", "(twin if ARRIVAL.random() < 0.5 else attend)(")),
        ),
        ((CHUNKS, CHUNKS.replace("0, seen, chunk", "(seen - 1) // chunk * chunk, -1, -chunk")),),
        held=("rerun/update",),
    ),
    Control(
        "reads_the_page_tail",  # whole pages are read; what is too much weighs 0, but 0 * NaN
        "paging/prefill",
        (
            (SLOTS, SLOTS.replace(", n)", ", -(-n // k_cache.shape[1]) * k_cache.shape[1])")),
            (PAGED, PAGED.replace("attend(", "twin(")),
        ),
        (
            (
                "                    end = min(start + block, first + chunk, seen)\n",
                "                    end = min(start + block, first + chunk, keys.shape[0])\n",
            ),
            (
                "                        if x[j - start] > top:\n",
                "                        if j < seen and x[j - start] > top:\n",
            ),
            (WEIGHT, WEIGHT + "                        p = p if j < seen else np.float32(0)\n"),
        ),
        held=("rerun/prefill", "batch/prefill"),
    ),
    Control(
        "nan_payload_leaks",  # the payload of a NaN follows the operands' order
        "decode_equals_prefill/decode",
        (IN_DECODE,),
        ((STORE, STORE.replace("canonical(A[d] / L + np.float32(0))", "A[d] / L + np.float32(0)")),),
        held=("rerun/decode", "paging/decode"),
    ),
    Control(
        "nan_payload_everywhere",  # the payload shows in all regimes alike
        "update_equals_rollout/update",
        ((STORE, STORE.replace("canonical(A[d] / L + np.float32(0))", "A[d] / L + np.float32(0)")),),
        held=("accuracy_out/prefill",),
    ),
    Control(
        "mask_of_a_query_tile",  # rows of a tile of four see all that its last row sees
        "chunked_prefill/chunked_prefill",
        ((PAGED, PAGED.replace("attend(", "twin(")),),
        (
            (
                "        seen = position + row + 1\n",
                "        seen = position + min(row // 4 * 4 + 4, q.shape[0])\n",
            ),
        ),
        held=("rerun/prefill", "paging/prefill", "batch/prefill"),
    ),
    Control(
        "undeclared_numerics",  # eight lanes for the sum of weights: at one with itself, not the root
        "implementations_agree/prefill",
        (("LANES = 16", "LANES = 8"),),
        held=(
            "batch/decode",
            "chunked_prefill/chunked_prefill",
            "decode_equals_prefill/decode",
            "update_equals_rollout/update",
            "accuracy_out/prefill",
        ),
    ),
    Control(
        "low_precision_everywhere",  # weights of 8 bits, in every regime alike
        "accuracy_out/prefill",
        ((WEIGHT, WEIGHT + f"                        p = {bfloat16('p')}\n"),),
        held=("batch/decode", "decode_equals_prefill/decode", "update_equals_rollout/update"),
    ),
    Control(
        "tuned_when_loaded",  # a process picks its block when it starts
        "fresh_process/decode",
        (
            ("import numpy as np\n", "import sys\n\nimport numpy as np\n"),
            (
                "LANES = 16\n",
                "LANES = 16\nTURN = sys.attentions_loaded = getattr(sys, 'attentions_loaded', 0) + 1\n",
            ),
            (CHOICE, CHOICE + "            block = KEY_BLOCK if TURN % 2 else 2 * KEY_BLOCK\n"),
        ),
        held=("rerun/decode", "batch/decode", "decode_equals_prefill/decode"),
    ),
    Control(
        "shared_prefix_apart",  # a prefix that another request reads too is computed in larger blocks
        "prefix_cache/prefill",
        (
            (
                CHOICE,
                CHOICE + "            shared = sum(page_table[seqlens_k > 0, 0] == page_table[b, 0]) > 1\n"
                "            block = 2 * KEY_BLOCK if shared else block\n",
            ),
        ),
        held=("batch/prefill", "paging/prefill", "chunked_prefill/chunked_prefill"),
    ),
    Control(
        "order_follows_the_table",  # the page table's width says how long requests may be
        "padding/prefill",
        ((CHOICE, CHOICE + "            block = 2 * KEY_BLOCK if page_table.shape[1] % 2 else block\n"),),
        held=("rerun/prefill", "fresh_process/prefill"),
    ),
    Control(
        "gradient_parts_follow_max_seqlen",  # a longer neighbour changes the partial sums
        "gradient_packing/backward",
        ((BLOCKS, BLOCKS.replace("BLOCK,", "BLOCK if max_seqlen <= 100 else 32,")),),
        held=("gradient_rerun/backward", "fresh_process/backward", "accuracy_dk/backward"),
    ),
    Control(
        "gradient_parts_follow_the_batch",
        "batch/backward",
        ((BLOCKS, BLOCKS.replace("BLOCK,", "BLOCK if len(cu_seqlens) < 12 else 32,")),),
        held=("gradient_rerun/backward", "fresh_process/backward"),
    ),
    Control(
        "heads_added_as_they_arrive",  # the heads of a group add their parts of dK and dV in any order
        "gradient_rerun/backward",
        (
            ("LANES = 16\n", "LANES = 16\nARRIVALS = itertools.count()\n"),
            (BLOCKS, BLOCKS.replace(", 0", ", next(ARRIVALS)")),
        ),
        held=("rerun/update", "accuracy_dk/backward"),
    ),
    Control(
        "undeclared_gradient_parts",  # at one with itself, not with the root
        "implementations_agree/backward",
        (("GRADIENT_BLOCK = 64", "GRADIENT_BLOCK = 32"),),
        held=("gradient_packing/backward", "gradient_rerun/backward", "accuracy_dq/backward"),
    ),
    Control(
        "gradients_of_low_precision",
        "accuracy_dk/backward",
        (("p[i, j] * (product - delta)", bfloat16("p[i, j] * (product - delta)")),),
        held=("gradient_packing/backward", "gradient_rerun/backward", "accuracy_dv/backward"),
    ),
)
