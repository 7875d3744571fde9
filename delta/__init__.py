"""Deltas between two versions: codecs, files and rebuilding a folder. Knows nothing of the bus."""
