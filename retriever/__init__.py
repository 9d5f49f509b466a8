"""Search engines for language models, from a laptop's corpus to 21 million passages."""
