"""Loading a model safely, and proving that it is read right."""
