"""Everything that knows transformers: loading, the tap, and what differs between architectures."""
