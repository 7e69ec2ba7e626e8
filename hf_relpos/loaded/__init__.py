"""Whether a loaded model holds what its checkpoint does, and buffers that its loader left without contents."""
