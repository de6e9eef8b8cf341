"""Why something does not work, or does not help: probes see facts, checks make findings of them."""
