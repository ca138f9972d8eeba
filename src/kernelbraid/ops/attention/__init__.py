"""Unified attention: the same bits in prefill, chunked prefill, prefix hits, decode and the packed update."""
