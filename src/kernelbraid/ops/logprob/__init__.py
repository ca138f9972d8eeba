"""Log-probabilities of chosen tokens under a language model's head, without its logits in memory."""
