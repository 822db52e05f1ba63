"""Start of a run over several processes: which one this is, that all agree, and how they end together."""
