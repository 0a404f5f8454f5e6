"""Optional features of the engine. Each is a file, imported on demand, that can be deleted."""
