"""A localized program as instructions, and what runs them."""
