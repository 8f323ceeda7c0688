"""What an allocator holds while the births and deaths of a run are replayed through it."""
