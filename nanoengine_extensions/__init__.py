"""Optional features of the engine: a file each, imported when it is asked for, and deletable."""
