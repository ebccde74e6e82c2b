"""Parameter sweeps: points of a grid, planned, run anywhere, and kept."""
