"""`python -m nanoengine "a prompt"`: see nanoengine_extras/tools/terminal.py."""

from nanoengine.features import extension

if __name__ == "__main__":
    extension("tools.terminal", "python -m nanoengine").main()
