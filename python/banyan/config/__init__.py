"""From command-line arguments to one checked, resolved tree of verl's keys."""
