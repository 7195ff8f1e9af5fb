"""Why a sharding or a collective is there, what else was possible, and what would remove it."""
