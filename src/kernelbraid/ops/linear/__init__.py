"""Linear layers: y = x @ w^T + b and their gradients."""
