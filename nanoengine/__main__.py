"""`python -m nanoengine "a prompt"`: see nanoengine_extensions/terminal.py."""

from nanoengine.features import extension

if __name__ == "__main__":
    extension("terminal", "python -m nanoengine").main()
