"""The daemon: request control flow, sessions, transport and their composition."""
