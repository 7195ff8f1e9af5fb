"""Initial parameters, shard by shard, with the same bits on every mesh."""
