"""Which attention is determined by the output? Effective attention, intervals and alternatives."""
