"""Models on unified operators: decoder layers, whole models, weights, and relations across operators."""
