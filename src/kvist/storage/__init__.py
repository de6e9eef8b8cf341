"""Where chunks lie: the pool of host memory, and later the tiers behind it."""
