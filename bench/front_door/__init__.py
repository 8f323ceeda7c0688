"""How soon the commands that people meet first answer, and what questions of lm-eval cost."""
