"""Loops over texts and layers that call `maths/` and give Results. No formula lives here."""
