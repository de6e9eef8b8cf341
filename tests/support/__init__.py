"""What several tests need: memory, layouts, a daemon to talk to, a way to wait. No test lives here."""
