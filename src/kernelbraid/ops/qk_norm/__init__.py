"""QK norm: RMS norm of every head of queries and keys."""
