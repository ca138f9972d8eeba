"""Tasks: prompts in a repeatable order, and rewards of the answers to them."""
