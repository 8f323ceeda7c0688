"""The process of Python itself: what it imports and when, and its environment."""
