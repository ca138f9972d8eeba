"""Reinforcement learning on unified operators: records, objectives, reuse of log-probabilities, tasks."""
