"""Conversion of existing models: convert(), its report, and a measurement of the fastest recipe on this machine."""
