"""What saving and loading cost: against the disk, against torch's own, and against training."""
