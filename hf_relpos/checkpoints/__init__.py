"""Files of checkpoints of any model: find, download, read and check them, and what must not leave this machine."""
