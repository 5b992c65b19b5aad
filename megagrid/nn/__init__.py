"""Layers that know their share: each gets the axis it is split over and states where its parameters lie."""
