"""What a run will compute and communicate, in closed form. Pure arithmetic, no torch."""
