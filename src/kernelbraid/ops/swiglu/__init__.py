"""SwiGLU: the sigmoid-weighted gate of an MLP, times its other half."""
