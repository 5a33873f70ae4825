"""Arguments of the optimizer kernels: hyperparameters, tensors, the blocks of the compact state."""
