"""`python -m nanoengine "a prompt"`: see nanoengine_extensions/terminal.py."""

from nanoengine.seams import extension

extension("terminal").main()
