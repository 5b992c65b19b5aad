"""Ranks, their places and their process groups."""
