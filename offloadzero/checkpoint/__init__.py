"""Checkpoints: safetensors and JSON, one unit in memory at a time."""
