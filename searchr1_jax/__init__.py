"""Search-R1 in JAX: language models that learn to search while they reason."""
