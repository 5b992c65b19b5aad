"""What ranks tell of themselves while they run, and what follows when one of them falls silent."""
