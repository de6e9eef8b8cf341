"""The engine's end of the wire. Needs msgspec and numpy, nothing else; starts no thread."""
