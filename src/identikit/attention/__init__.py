"""Which attention is real? Effective attention, intervals, and other attention with the same output."""
