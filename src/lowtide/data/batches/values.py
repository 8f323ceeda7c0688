"""The names of what a collator knows of rows and scores beyond their tokens, and methods and passes read.

They are the keys of `RaggedBatch.row_values` and `RaggedBatch.score_values`.
"""

LENGTHS = "lengths"
"""Row value, [rows, completions]: the tokens of each completion."""
OF_PROMPT = "of_prompt"
"""Score value: whether a score is of a prompt. Absent where no prompt is scored."""
REFERENCE = "reference"
"""Score value: the reference's log-probability, where it was computed before training."""
