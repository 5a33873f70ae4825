"""Which part of the model's states each rank keeps (floor 3)."""
