"""Tensors that users hold on real ranks: a rank may have a part, but whatever reads them gives the whole answer."""
