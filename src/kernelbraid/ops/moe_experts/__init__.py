"""Experts of a mixture: a gated MLP a chosen expert for every token, added over its slots."""
