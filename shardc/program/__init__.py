"""A program: its torch.fx graph, the typed facts about it, its collectives, stages, lifetimes and text."""
