"""Ranks placed by the network, and against it."""
