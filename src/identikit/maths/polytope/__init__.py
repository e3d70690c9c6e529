"""All attention with the same output: many rows at once, and the ends of what is read from them."""
