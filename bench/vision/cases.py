"""What `bench.vision` trains, and who does."""

THEIRS, OURS = "trl", "lowtide"
CONTESTANTS = (THEIRS, OURS)
CASES = {"all": {}, "frozen": {"freeze": True}}
"""What is trained: all of the model, or all but the vision tower."""
