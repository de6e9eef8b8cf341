"""The tests. ``unit`` mirrors ``src``; everything here runs without a GPU and without an engine."""
