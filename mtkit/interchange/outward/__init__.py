"""Runs as folders that other libraries load by themselves."""
