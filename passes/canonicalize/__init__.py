"""First phase: few kinds of op, each with a rule; contractions that keep their dims; stages."""
