"""Training prompts: reading files, filtering by length, and the order in which steps use them."""
