"""Block ids to copies to done: plans are pure arithmetic, an executor runs them on a device's own thread."""
