"""What a real run holds over time, and the page that shows it."""
