"""A transformers model on unified attention by name: a padded batch, and each sequence alone.

Needs the extra `models`. Attention's rows have the same bits wherever a sequence stands; the linear layers
around it are torch's, so logits are near and not equal. `kernelbraid.unify(model)` makes them equal.
"""

import torch
import transformers

from kernelbraid import attention
from kernelbraid.integrations.transformers import guard, register

register()
config = transformers.Qwen3Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="kernelbraid").eval()
guard(model)  # refuses what the contract excludes, caches too, before a call begins

ids = torch.randint(1, 512, (2, 20))
mask = torch.ones_like(ids)
mask[0, :8] = 0  # padding on the left
with torch.no_grad():
    logits = model(ids, attention_mask=mask).logits
    alone = model(ids[:1, 8:]).logits
print(
    "logits of the first sequence, padded and alone: at most", float((logits[0, 8:] - alone[0]).abs().max())
)
print(
    "generated", model.generate(ids, attention_mask=mask, max_new_tokens=4, pad_token_id=0)[:, 20:].tolist()
)

# What the layers compute, on rows of one's own: tokens 8 to 20 packed with others, and alone.
q, k, v = torch.randn(20, 2, 64), torch.randn(20, 1, 64), torch.randn(20, 1, 64)
starts = torch.tensor([0, 8, 20], dtype=torch.int32)
packed = attention(q, k, v, cu_seqlens=starts, max_seqlen=12)[8:]
single = attention(q[8:], k[8:], v[8:], cu_seqlens=torch.tensor([0, 12], dtype=torch.int32), max_seqlen=12)
print(
    "bits of attention",
    "equal" if torch.equal(packed.view(torch.int32), single.view(torch.int32)) else "differ",
)
