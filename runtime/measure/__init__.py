"""Measurements of links and devices, and the models fitted to them."""
