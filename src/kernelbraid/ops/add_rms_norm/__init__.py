"""The residual add and RMS norm: a sum that goes on, and its norm."""
