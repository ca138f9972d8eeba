"""The optimization IR: records of a study, the store that keeps them, and the questions that it answers."""
