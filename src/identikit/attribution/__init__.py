"""Where did it come from? How much of each input token is mixed into each hidden vector."""
