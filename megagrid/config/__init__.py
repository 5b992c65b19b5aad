"""What a run is: the recipe's keys, presets, loading, rules across keys, and the dump. No torch."""
