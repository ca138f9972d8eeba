"""Gradients of two sequences, packed or alone, checkpointed or compiled: the same bits."""

import torch
from torch.utils.checkpoint import checkpoint

from kernelbraid import attention

LENGTHS, QUERY_HEADS, KV_HEADS, HEAD_DIM = (70, 130), 9, 3, 64

torch.manual_seed(0)
x = torch.randn(sum(LENGTHS), QUERY_HEADS * HEAD_DIM)
projection = torch.randn(x.shape[1], (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM).mul_(0.02)
dout = torch.randn(sum(LENGTHS), QUERY_HEADS, HEAD_DIM)
heads = (x @ projection).unflatten(1, (-1, HEAD_DIM)).split((QUERY_HEADS, KV_HEADS, KV_HEADS), dim=1)


def gradients(rows, lengths, call=attention):
    """dq, dk and dv of some rows, a loss whose derivative in the output is dout."""
    q, k, v = (tensor[rows].detach().requires_grad_() for tensor in heads)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    out = call(q, k, v, cu_seqlens=offsets, max_seqlen=max(lengths))
    return torch.autograd.grad(out, (q, k, v), dout[rows])


def checkpointed(*tensors, **lengths):
    return checkpoint(attention, *tensors, use_reentrant=False, **lengths)


first, second = slice(0, LENGTHS[0]), slice(LENGTHS[0], None)
packed = gradients(slice(None), LENGTHS)
others = {
    "one at a time": [
        torch.cat(parts)
        for parts in zip(gradients(first, LENGTHS[:1]), gradients(second, LENGTHS[1:]), strict=True)
    ],
    "checkpointed": gradients(slice(None), LENGTHS, checkpointed),
    "compiled": gradients(
        slice(None), LENGTHS, torch.compile(attention, fullgraph=True, backend="aot_eager")
    ),
}
for name, found in others.items():
    unequal = sum(
        int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in zip(found, packed, strict=True)
    )
    print(f"{name}: {sum(x.numel() for x in packed)} numbers compared as bits, {unequal} unequal")
    assert unequal == 0
