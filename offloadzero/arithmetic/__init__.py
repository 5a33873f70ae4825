"""The arithmetic of gradients and updates away from the native kernels: torch operations, Triton (floor 3)."""
