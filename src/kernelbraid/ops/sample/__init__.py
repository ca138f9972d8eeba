"""Next tokens drawn from logits with random numbers of their own: a token never depends on its batch."""
