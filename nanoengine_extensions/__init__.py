"""Optional features of the engine, one file each, imported when they are asked for."""

# first, since it imports llm.py, and this can be a part of importing any other file here
import nanoengine  # noqa: F401
