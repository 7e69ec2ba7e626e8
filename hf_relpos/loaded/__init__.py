"""Verify loaded weights against the checkpoint's files, and initialise buffers that the loader left uninitialised."""
