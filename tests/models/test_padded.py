"""Log-probabilities of padded batches are, bit for bit, those of the packed rows without padding."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.models.unified import LENGTHS, bits, packed, padded, same, sequences, unified

from kernelbraid.models.padded import padded_logprobs
from kernelbraid.models.shared import packed_logprobs


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_padding_changes_no_bit(side: str) -> None:
    model, parts = unified("qwen3"), sequences()
    ids, mask = padded(parts, side)
    labels = ids.masked_fill(mask == 0, -100)
    found, entropies = padded_logprobs(model, ids, mask, labels, temperature=0.8)
    joint, offsets, longest = packed(parts)
    after = torch.cat([torch.cat([part[1:], torch.tensor([-100])]) for part in parts])
    wanted = packed_logprobs(model, joint, offsets, after, temperature=0.8, max_seqlen=longest)
    assert found.shape == entropies.shape == (len(parts), max(LENGTHS) - 1)
    counts = (mask[:, 1:] * mask[:, :-1]).bool()
    if side == "between":  # where padding parts two tokens the second one is not scored
        assert set(bits(found[counts]).tolist()) <= set(bits(wanted).tolist())
    else:
        assert same(found[counts], wanted[after != -100])
    assert not found[~counts].any() and not entropies[~counts].any()
    assert (entropies[counts] > 0).all()


def test_gradients_are_the_packed_ones() -> None:
    model, parts = unified("llama"), sequences()
    ids, mask = padded(parts, "left")
    found, _ = padded_logprobs(model, ids, mask, ids.masked_fill(mask == 0, -100))
    found.sum().backward()
    one = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    joint, offsets, longest = packed(parts)
    after = torch.cat([torch.cat([part[1:], torch.tensor([-100])]) for part in parts])
    packed_logprobs(model, joint, offsets, after, max_seqlen=longest).sum().backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(one[name], each.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_only_the_rows_that_count_are_scored() -> None:
    """A row without labels, and one without tokens, give zeros and change nothing beside them."""
    model, parts = unified("llama"), sequences()
    ids, mask = padded(parts, "left")
    labels = ids.masked_fill(mask == 0, -100)
    whole, _ = padded_logprobs(model, ids, mask, labels)
    labels[0], mask[1] = -100, 0
    labels[1] = -100
    found, _ = padded_logprobs(model, ids, mask, labels)
    assert not found[:2].any()
    assert same(found[2:], whole[2:])
    nothing, _ = padded_logprobs(model, ids, mask, torch.full_like(labels, -100))
    nothing.sum().backward()
    assert not nothing.any()


def test_another_token_before_changes_the_bits() -> None:
    """A control of the comparisons above."""
    model, parts = unified("llama"), sequences()
    ids, mask = padded(parts, "left")
    labels = ids.masked_fill(mask == 0, -100)
    right, _ = padded_logprobs(model, ids, mask, labels)
    ids[3, 0] += 1
    other, _ = padded_logprobs(model, ids, mask, labels)
    assert same(other[:3], right[:3])
    assert not torch.equal(bits(other[3]), bits(right[3]))


def test_refusals() -> None:
    model = unified("llama")
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"input_ids must be \[batch, slots\]"):
        padded_logprobs(model, ids[0], ids[0], ids[0])
    with pytest.raises(ValueError, match="labels must have the shape of input_ids"):
        padded_logprobs(model, ids, ids, ids[:, :4])
    model.lm_head.forward = torch.nn.Identity()
    with pytest.raises(ValueError, match="not unified"):
        padded_logprobs(model, ids, ids, ids)
