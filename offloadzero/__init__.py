"""offloadzero."""
