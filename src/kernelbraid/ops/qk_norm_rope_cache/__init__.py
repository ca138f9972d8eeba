"""The rollout's fused step between projection and attention: QK norm, rotation, cache write."""
