"""Communication: collectives on virtual ranks and on torch.distributed, messages, launch, agreement."""
