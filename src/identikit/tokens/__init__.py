"""Which token is this? Maps from hidden vectors back to input tokens, and how often they succeed."""
