"""Optional features of the engine, one file each, imported when they are asked for."""
