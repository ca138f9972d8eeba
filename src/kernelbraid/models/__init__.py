"""Models on unified operators: decoder layers, whole models, their weights, and the relations across operators."""
