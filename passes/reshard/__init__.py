"""Reshards where producer and consumer differ, and the cheapest collectives for each."""
