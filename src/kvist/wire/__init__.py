"""The protocol between engine and daemon: bytes to messages and back, and no sockets. See docs/wire-protocol.md."""
