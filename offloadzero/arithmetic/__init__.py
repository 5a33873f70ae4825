"""The arithmetic of gradients and updates outside of the native kernels: in torch operations, and in Triton."""
