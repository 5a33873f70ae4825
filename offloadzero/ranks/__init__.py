"""The parts of the model's states that each rank keeps, and the collectives between the ranks."""
