"""What each of several devices holds when states, weights or layers are spread over them: by formulas."""
