"""Router of a mixture of experts: each token's best experts and their weights."""
