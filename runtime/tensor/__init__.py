"""Tensors that users hold on real ranks: a rank may store only a part, but every reading gives the whole result."""
