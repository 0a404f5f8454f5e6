"""Optional features of the engine. Each is a file, which is imported on demand and can be
deleted."""
