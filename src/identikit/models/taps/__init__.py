"""Where attention is captured: one tap for almost every architecture, and a few of their own."""
