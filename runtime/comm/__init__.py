"""Communication: collectives on virtual ranks and on torch.distributed, shards of tensors, and local jobs."""
