"""`lowtide convert`: a run of another trainer as a run file."""
