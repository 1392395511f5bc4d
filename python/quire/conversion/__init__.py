"""Models that exist become models of quire: convert(), its report, and which recipe pays on this machine."""
