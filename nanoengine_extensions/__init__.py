"""What the engine can do and its readers need not know: a file each, imported when asked for."""
