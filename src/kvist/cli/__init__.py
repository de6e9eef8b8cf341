"""The ``kvist`` command. The only place that configures logging."""
