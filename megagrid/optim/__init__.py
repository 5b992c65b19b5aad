"""What turns gradients into new weights."""
