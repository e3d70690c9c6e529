"""What a person reads: words, tables, figures. Everything here is made from results; no model is touched."""
