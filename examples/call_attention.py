"""Prefill a prompt, decode one token, and find the same bits in the packed forward of the update."""

import torch

from kernelbraid import attention, paged_attention, write_kv_cache

LENGTH, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 100, 9, 3, 64, 16

torch.manual_seed(0)
q = torch.randn(LENGTH, QUERY_HEADS, HEAD_DIM)
k, v = torch.randn(2, LENGTH, KV_HEADS, HEAD_DIM)

# Policy update: whole sequences, packed; here one of them.
update = attention(q, k, v, cu_seqlens=torch.tensor([0, LENGTH], dtype=torch.int32), max_seqlen=LENGTH)

# Rollout: the prompt but for its last token, then that token alone, on pages in any order.
pages = -(-LENGTH // PAGE)
k_cache, v_cache = torch.empty(2, pages, PAGE, KV_HEADS, HEAD_DIM)
page_table = torch.randperm(pages, dtype=torch.int32)[None]
rows = []
for start, stop in ((0, LENGTH - 1), (LENGTH - 1, LENGTH)):
    new = slice(start, stop)
    where = {
        "page_table": page_table,
        "cu_seqlens_q": torch.tensor([0, stop - start], dtype=torch.int32),
        "seqlens_k": torch.tensor([stop], dtype=torch.int32),
    }
    write_kv_cache(k[new], v[new], k_cache, v_cache, **where)
    limits = {"max_seqlen_q": stop - start, "max_seqlen_k": stop}
    rows.append(paged_attention(q[new], k_cache, v_cache, **where, **limits))

unequal = (torch.cat(rows).view(torch.int32) != update.view(torch.int32)).sum().item()
print(f"{update.numel()} numbers compared as bits, {unequal} unequal")
assert unequal == 0
