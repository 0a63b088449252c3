"""The laboratory of pmaf: its command line, its experiments, its races, the paper's tables."""
