"""Results to look at: one set of views, in a file, in a notebook, and on a server."""
