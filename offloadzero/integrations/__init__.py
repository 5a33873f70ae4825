"""What a framework needs that it does not find by itself; each module imports its framework, and only that."""
