"""The standard benchmark rows, and the physical limits of the machine they stand beside."""
