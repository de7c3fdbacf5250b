"""Random batches of everything that makes them, against the slow reference: `python -m tests.fuzz --help`."""
