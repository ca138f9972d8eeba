"""Other embeddings on a GPU: what a benchmark runs beside ours."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def torch_embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.embedding(ids, weight)


def torch_embedding_backward(ids: Tensor, weight: Tensor, dout: Tensor) -> Any:
    """The dense gradient that torch's autograd asks for, in the dtype of dout."""
    return torch.ops.aten.embedding_dense_backward(dout, ids, len(weight), -1, False)


def liger_embedding(ids: Tensor, weight: Tensor) -> Any:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return LigerEmbeddingFunction.forward(_context(ids, weight), weight, ids)


def liger_embedding_backward(ids: Tensor, weight: Tensor, dout: Tensor) -> Any:
    """Its gradient, added up by atomics."""
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return LigerEmbeddingFunction.backward(_context(ids, weight), dout)


def _context(*saved: Tensor) -> Any:
    """What a forward leaves for its backward."""
    return SimpleNamespace(saved_tensors=saved, save_for_backward=lambda *tensors: None)
