"""Where chunks lie: the pool of host memory, and the tiers behind it."""
