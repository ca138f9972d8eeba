"""RMS norm: rows divided by the root of their mean square, times a weight."""
