"""Layers that know their share: each is given the axis it is split over, and states where its
parameters lie.
"""
