import numpy as np
import pytest
from tests.ops.programs import Plain

from kernelbraid.contract import Workload
from kernelbraid.ops.attention import peers
from kernelbraid.ops.attention.lowering import timed, workload_lengths
from kernelbraid.ops.attention.spec import ATTENTION
from kernelbraid.ops.problem import View

HEADS = (("page_size", 16), ("query_heads", 6), ("kv_heads", 2), ("head_dim", 64))
WORKLOADS = (
    Workload("prefill", (("batch", 2), ("length", 17), *HEADS)),
    Workload("update", (("batch", 3), ("length", (5, 30, 1)), *HEADS)),
    Workload("chunked_prefill", (("batch", 3), ("length", (20, 30, 9)), ("query_length", (8, 1, 9)), *HEADS)),
    Workload("decode", (("batch", 4), ("length", (20, 1, 33, 7)), *HEADS)),
)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.phase)
def test_peers_compute_attention(workload):
    program = timed(workload, np.random.default_rng(1), 2, 0, contiguous=True)
    lengths, rows = workload_lengths(workload)
    used = [peer for peer in ATTENTION.peers if workload.phase in peer.phases]
    assert used
    for call in program.calls:
        arguments = {
            name: program.inputs[value.buffer][value.start : value.stop] if isinstance(value, View) else value
            for name, value in call.arguments.items()
        }
        expected = _expected(arguments, lengths, rows)
        for peer in used:
            outputs = getattr(peers, peer.entry_point)(**arguments)
            found = np.concatenate([_rows(output.numpy(), rows) for output in outputs])
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def _expected(arguments, lengths, rows):
    q = arguments["q"]
    out, lse, start = np.empty_like(q), np.empty((6, len(q)), np.float32), 0
    for b, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        part = slice(start, start + count)
        k, v = (arguments[name][b, :, :length].transpose(1, 0, 2) for name in ("k", "v"))
        Plain._rows(q[part], k, v, arguments["softmax_scale"], out[part], lse[:, part])
        start += count
    return out


def _rows(output, rows):
    """A peer's [B, heads, rows, D] as packed rows; the padded form's groups are heads."""
    if output.shape[1] == 2:
        return output.reshape(len(output), 6, 64)
    return output.transpose(0, 2, 1, 3).reshape(-1, 6, 64)
