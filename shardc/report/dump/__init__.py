"""A compiled model as text, JSON, dot or HTML; parts of it, differences and budgets."""
