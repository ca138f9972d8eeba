"""Rotary position embedding: halves of heads turned by the angles of their positions."""
