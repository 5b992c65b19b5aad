"""Starts the ranks of a node, looks after them, decides with other nodes what follows an end."""
