"""What ranks say to each other: collectives, their differentiable forms, and point to point."""
