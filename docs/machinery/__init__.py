"""How the site is made: reference pages from the code, snippets and links of pages, and what Sphinx is taught."""
