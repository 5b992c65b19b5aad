"""Measurements of megagrid, against others and against itself. megagrid imports none of it."""
