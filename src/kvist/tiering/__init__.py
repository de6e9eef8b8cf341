"""Chunks on their way between the pool and the tiers behind it."""
