"""Pure functions on tensors: every formula, with its equation number and a slow twin in tests/reference."""
