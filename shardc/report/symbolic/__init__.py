"""Costs as functions of sizes."""
