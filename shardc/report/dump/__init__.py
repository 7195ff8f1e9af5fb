"""Dumps of a compiled model as text, JSON, Graphviz or HTML; selections, differences and budgets."""
