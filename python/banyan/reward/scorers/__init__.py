"""One file per rule; registry.py finds them. They run inside the reward workers: no torch here."""
