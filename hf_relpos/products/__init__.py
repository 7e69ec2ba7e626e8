"""Products of linear layers, and of batches of matrices, on the CPU: by which library, and in which precision."""
